"""How a score is called, and which scores a name means.

In: the split, benchmark and metric of a score; or a name that a user wrote, with the keys that exist. Out: the score's
key in logs and records, or the keys that the name means. The record, the checks, `success_metric`, `best_by`,
`early_stopping`, hypotheses, searches and the history all make and resolve names here.

A key is `<split>/<benchmark>/<metric>`, or `<split>/<metric>` where the benchmark is called like its split. A user may
leave out the split, the benchmark or both, and may write `.` instead of `/`. `<split>/*/<metric>` means all benchmarks
of a split, and `train/<number>` a number that the algorithm reports of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from evsys_sdk.errors import EvsysError

SPLITS = ("val", "eval", "test")
"""In the order in which a metric alone prefers them: test scores only where there are no others."""

ALL = "*"
"""Stands for every benchmark of a split."""
TRAIN = "train"
"""What a name begins with that means a number of the run and no score."""

Reading = Literal["key", "split and benchmark", "all benchmarks", "split", "benchmark", "metric", "number"]
"""Which parts of a score's key a name gives; `number` is something that an algorithm reports of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreName:
    """The parts of a score's key."""

    split: str
    benchmark: str
    metric: str
    """Has no slash, so that a key has one meaning."""

    @property
    def suite(self) -> str:
        """`val/tools`: how the tasks of a benchmark are called in the record."""
        return f"{self.split}/{self.benchmark}"

    @property
    def key(self) -> str:
        return score_key(self.split, self.benchmark, self.metric)


def suite_label(split: str, benchmark: str) -> str:
    """The part of a score's key before the metric: `val/tools`, or `val` for a benchmark that is called `val`."""
    return split if split == benchmark else f"{split}/{benchmark}"


def score_key(split: str, benchmark: str, metric: str) -> str:
    """The score's key in logs and records."""
    return f"{suite_label(split, benchmark)}/{metric}"


def parse_key(key: str) -> ScoreName | None:
    """The parts of a score's key; None for a number that no evaluation made, such as `final_loss`."""
    split, slash, rest = key.partition("/")
    if not slash or split not in SPLITS:
        return None
    *middle, metric = rest.split("/")
    return ScoreName(split=split, benchmark="/".join(middle) or split, metric=metric)


def metric_of(key: str) -> str:
    """The metric in a score's key; the number itself where no evaluation made it."""
    score = parse_key(key)
    return key.rsplit("/", 1)[-1] if score is None else score.metric


class AmbiguousName(EvsysError):
    """A name that can mean different scores."""

    def __init__(self, name: str, keys: Iterable[str], *, has_mean: bool = True):
        """`has_mean`: whether the mean over all benchmarks of a split may be written where this name was."""
        self.keys = list(dict.fromkeys(keys))
        scores = [score for key in self.keys if (score := parse_key(key)) is not None]
        means = {score_key(score.split, ALL, score.metric) for score in scores}
        mean = (
            f", or {means.pop()} for the mean over the tasks of all of them"
            if has_mean and len(scores) > 1 and len(means) == 1
            else ""
        )
        whole = "write the whole name of one score" if len(scores) == len(self.keys) else "write one of them"
        super().__init__(f"{name!r} is ambiguous: it can mean {', or '.join(self.keys)}; {whole}{mean}")


def readings_of(name: str, key: str) -> set[Reading]:
    """The ways in which `name` can be read so that it means `key`; empty if it does not mean it."""
    if name == key:
        return {"key"}
    score = parse_key(key)
    if score is None:
        return {"number"} if key.endswith(f"/{name}") or name in _spellings((TRAIN, key)) else set()
    if not name.endswith(score.metric):
        return set()
    if name == score.metric:  # every other reading is longer
        return {"metric"}
    parts: dict[Reading, tuple[str, ...]] = {
        "split and benchmark": (score.split, score.benchmark, score.metric),
        "all benchmarks": (score.split, ALL, score.metric),
        "split": (score.split, score.metric),
        "benchmark": (score.benchmark, score.metric),
        "metric": (score.metric,),
    }
    return {reading for reading, words in parts.items() if name in _spellings(words)}


def _spellings(words: tuple[str, ...]) -> set[str]:
    """The words with a dot or a slash between any two of them."""
    found = {words[0]}
    for word in words[1:]:
        # Names of metrics hold dots and slashes, so a name cannot be split: every spelling is tried.
        found = {f"{start}{mark}{word}" for start, mark in product(found, "./")}
    return found


def resolve(name: str, keys: Iterable[str]) -> list[str]:
    """The keys that `name` means; none if there is no such score.

    A metric alone means validation scores where there are any, then those of `run.eval`, then test scores. A name that
    can mean several scores is an AmbiguousName, unless it is `<split>/*/<metric>`, the mean over the tasks of
    all benchmarks of a split. A score comes before a number of the run or of a step that is called like its metric
    (`tokens`): a metric that a benchmark lists is meant. That number is `train/tokens`.
    """
    # Once each, in their order: several runs have the same keys.
    known = list(dict.fromkeys(keys))
    if name in known and parse_key(name) is not None:
        return [name]
    found: dict[Reading, list[str]] = {}
    for key in known:
        for reading in readings_of(name, key):
            found.setdefault(reading, []).append(key)
    # `key` is here a number called exactly so: a score's key has returned above.
    numbers = found.pop("key", None) or found.pop("number", [])
    found.pop("number", None)
    together = found.pop("all benchmarks", [])
    # Who names a benchmark but no split may mean the tasks of either; a metric alone is that of the validation scores.
    chosen = (keys if reading == "benchmark" else _prefer(keys) for reading, keys in found.items())
    meant = list(dict.fromkeys(key for keys in chosen for key in keys))
    if len(meant) > 1:
        raise AmbiguousName(name, [*meant, *(f"{TRAIN}/{number}" for number in numbers)])
    return meant or together or numbers


def resolve_one(name: str, keys: Iterable[str]) -> str | None:
    """The one key that `name` means, for what is decided by a single curve; None if there is no such score."""
    try:
        found = resolve(name, keys)
    except AmbiguousName as exc:
        raise AmbiguousName(name, exc.keys, has_mean=False) from None
    if len(found) > 1:
        raise AmbiguousName(name, found, has_mean=False)
    return found[0] if found else None


def _prefer(keys: list[str]) -> list[str]:
    chosen = ([key for key in keys if key.startswith(f"{split}/")] for split in SPLITS)
    # Keys of other splits are left as they are.
    return next((found for found in chosen if found), keys)


def step_metric(name: str) -> str:
    """The number of a step that a name means if it is no score: `train/tokens` and `train.tokens` are `tokens`."""
    return name.removeprefix(f"{TRAIN}/").removeprefix(f"{TRAIN}.")


def names_split(name: str, split: str) -> bool:
    """Whether a name begins with this split."""
    return name.startswith((f"{split}/", f"{split}."))


def names_metric(name: str, metric: str) -> bool:
    """Whether a name, with or without split and benchmark, is that of a score by this metric."""
    return name == metric or name.endswith((f"/{metric}", f".{metric}"))


def is_test_score(key: str) -> bool:
    """Whether a key is that of a test score."""
    return key.startswith("test/")


def metric_named(name: str, *, split: str, benchmark: str) -> list[str]:
    """What can be the metric in `name`, if it means a score of this benchmark: `val.pass_rate` -> `pass_rate`; the
    whole name first."""
    prefixes = [_spellings(words) for words in ((split,), (benchmark,), (split, benchmark), (split, ALL))]
    starts = [f"{prefix}{mark}" for found in prefixes for prefix in sorted(found) for mark in "./"]
    rests = [name, *(name.removeprefix(start) for start in starts if name.startswith(start))]
    return [rest for rest in dict.fromkeys(rests) if rest and "/" not in rest]
