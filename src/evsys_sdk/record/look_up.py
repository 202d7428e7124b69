"""Which of the experiments are meant.

In: a history, and a name, a prefix, a path or conditions. Out: entries; or an error that says what there is.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.record.digest import Digest
from evsys_sdk.record.history import STATUSES, Entry, History, newest_by_name, read_one, records_in
from evsys_sdk.score_names import is_test_score, names_split, readings_of

LISTED = 8
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq, "==": operator.eq,
}  # fmt: skip
_CONDITION = re.compile(r"(?P<name>[^<>=]+?)\s*(?:(?P<sign>>=|<=|==|>|<|=)\s*(?P<value>\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The experiment that was meant, and what the asker should know of the choice."""

    entry: Entry
    note: str | None = None


def look_up(ref: str, history: History) -> Found:
    """By path of its record, journal or folder; by name; or by the only name that begins so."""
    names = newest_by_name(history.entries)
    begins = bool(ref) and any(name.startswith(ref) for name in names)
    if not begins and ("/" in ref or (ref and Path(ref).exists())):
        return Found(entry=_at(Path(ref)))
    if ref not in names:
        ref = _only_prefix(ref, names)
    same = [entry for entry in history.entries if entry.name == ref]
    if len(same) == 1:
        return Found(entry=same[0])
    others = ", ".join(str(entry.record) for entry in same[1:4])
    return Found(
        entry=same[0],
        note=f"{len(same)} experiments are called {ref}; this is the newest ({same[0].date}). Others by path: {others}",
    )


def _only_prefix(ref: str, names: dict[str, Entry]) -> str:
    begin = [name for name in names if name.startswith(ref)] if ref else []
    if len(begin) == 1:
        return begin[0]
    if begin:
        raise EvsysError(f"{ref!r} is the beginning of {len(begin)} experiments: {_listed(begin)}; say which")
    if not names:
        raise EvsysError(
            f"there is no experiment {ref!r}: none is known here. Run one, go to its project, or name the path of its "
            "record (<output_dir>/<name>.experiment_result.json)"
        )
    near = difflib.get_close_matches(ref, list(names), n=3, cutoff=0.4)
    told = f"closest: {', '.join(near)}" if near else f"known: {_listed(list(names))}"
    raise EvsysError(f"there is no experiment {ref!r}; {told}\nnext: evsys history")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(sorted(names)[:LISTED]) + more


def _at(path: Path) -> Entry:
    if path.is_dir():
        records = records_in(path)
        if len(records) > 1:
            raise EvsysError(f"{path} holds {len(records)} experiments; name the record of one: {records[0]}")
        path = records[0] if records else path
    for kind in (JOURNAL_FILE, EXPERIMENT_RESULT_FILE):
        if path.name.endswith(f".{kind}"):
            path = path.with_name(f"{path.name.removesuffix(f'.{kind}')}.{EXPERIMENT_RESULT_FILE}")
            found = read_one(path)
            if found is not None:
                return found
    raise EvsysError(
        f"there is no record of an experiment at {path}; expected <name>.{EXPERIMENT_RESULT_FILE}, "
        f"<name>.{JOURNAL_FILE}, or a folder with one of them"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Experiments in which some arm has this metric, and within this bound."""

    metric: str
    sign: str = ""
    value: float = 0.0

    def values(self, entry: Entry) -> list[float]:
        """The metric's mean for each arm that has it, by any name that means it, or as the success metric."""
        found = []
        for arm in entry.digest.arms:
            keys = [key for key in arm.metrics if self._means(key, entry.digest)]
            found += [arm.metrics[key] for key in keys]
            if not keys and self.metric == entry.digest.metric and arm.mean is not None and self._may_choose(entry):
                found.append(arm.mean)
        return found

    def _means(self, key: str, digest: Digest) -> bool:
        """A bound is not met by a test score, which chooses nothing, unless that is allowed or the bound names it."""
        if not readings_of(self.metric, key):
            return False
        is_open = not is_test_score(key) or digest.allows_test or names_split(self.metric, "test")
        return not self.sign or is_open

    def _may_choose(self, entry: Entry) -> bool:
        return not self.sign or entry.digest.selects or names_split(self.metric, "test")

    def holds(self, entry: Entry) -> bool:
        values = self.values(entry)
        return bool(values) and (not self.sign or any(_COMPARE[self.sign](value, self.value) for value in values))


def parse_condition(text: str) -> Condition:
    """`pass@1`, `val/tools/pass@1>=0.5`, `loss<0.2`."""
    match = _CONDITION.fullmatch(text.strip())
    example = "--metric takes a name, or a name with a bound in quotes, e.g. --metric 'pass@1>=0.5'"
    if not match:
        raise EvsysError(f"{example}; got {text!r}")
    try:
        value = float(match["value"]) if match["sign"] else 0.0
    except ValueError:
        raise EvsysError(f"{example}; {match['value']!r} is no number") from None
    return Condition(metric=match["name"], sign=match["sign"] or "", value=value)


def select(
    entries: Sequence[Entry], *, tags: Sequence[str] = (), statuses: Sequence[str] = (), conditions: Sequence[str] = ()
) -> list[Entry]:
    """The entries that have every tag, one of the statuses, and meet every condition."""
    for status in statuses:
        if status not in STATUSES:
            raise EvsysError(f"--status: {not_known(status, 'status', STATUSES)}")
    parsed = [parse_condition(text) for text in conditions]
    return [
        entry
        for entry in entries
        if set(tags) <= set(entry.digest.tags)
        and (not statuses or entry.status in statuses)
        and all(condition.holds(entry) for condition in parsed)
    ]
