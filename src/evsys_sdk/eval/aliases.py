"""Alias matching: another name for the right answer is right too.

In: verified aliases, and optionally a second, looser set; a prediction and its target. Out: at which
level they match: `exact`, `alias`, `secondary`, or not at all. Files are JSON: `{"GMAIL_SEND_EMAIL": ["GMAIL_SEND"]}`
says which other names count for a target (one way only); a list of groups, `[["A", "B"]]`, says that all names of a
group stand for one thing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from evsys_sdk.answers import answer_in, has_answer, parsed_json, texts_between, wanted_answer
from evsys_sdk.data_types import Message
from evsys_sdk.errors import DataError, shorten
from evsys_sdk.files import reason

# How a model is asked for one identifier, such as a tool's slug, and how that is read from what it says.
#
# In: a query; a completion. Out: a prompt; the identifier. The `qwen_*` helpers write out a chat as text, for clients
# that take raw text; our own clients take messages and render them with the model's own template.


DEFAULT_SYSTEM = (
    "Choose the one tool that does what the user asks for. Answer with the tool's slug between <answer> and </answer>."
)
DEFAULT_SYSTEM_NO_THINK = f"{DEFAULT_SYSTEM} /no_think"
"""With the switch that keeps Qwen3 from thinking aloud."""

_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_CALL, _CALL_END = re.compile(r"<tool_call>"), re.compile(r"</tool_call>")
# With an underscore at least: `OK` or `JSON` in a sentence is no slug.
_SLUG = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
# The last tag, because `.*` is greedy; up to the next `<`, which may begin a closing tag that was cut off.
_OPEN = re.compile(r".*<answer>([^<]*)", re.DOTALL | re.IGNORECASE)
_AROUND = " \t\r\n\"'`.*"


def chat_messages(query: str, system: str | None = DEFAULT_SYSTEM) -> list[Message]:
    """The chat that asks for a slug."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": query}]


def qwen_chat_prompt(query: str, system: str | None = DEFAULT_SYSTEM) -> str:
    """The chat in Qwen's form (ChatML), up to where the assistant is to speak."""
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat_messages(query, system)]
    return "".join(turns) + "<|im_start|>assistant\n"


def qwen3_chat_template_prompt(
    query: str, system: str | None = DEFAULT_SYSTEM, *, enable_thinking: bool = False
) -> str:
    """The chat as Qwen3's template writes it: without thinking, the assistant begins with an empty thought."""
    prompt = qwen_chat_prompt(query, system)
    return prompt if enable_thinking else f"{prompt}<think>\n\n</think>\n\n"


def extract_predicted_slug(completion: str) -> str | None:
    """The identifier that a completion answers with, or None where none can be read.

    What stands in `<answer>` tags comes first, also in a tag that a stop sequence or the limit on tokens left open,
    then a tool call's name, then an answer of one line, then the last word that looks like a slug (`GMAIL_SEND_EMAIL`).
    Thoughts are passed over, also one that never ends.
    """
    said = _THOUGHT.sub("", completion).strip()
    if has_answer(said):
        return _plain(answer_in(said))
    begun = _OPEN.match(said)
    if begun and begun[1].strip():
        # An answer that is not closed: JSON over several lines counts as it is, else the first line.
        return _plain(begun[1] if parsed_json(begun[1]) is not None else begun[1].strip().splitlines()[0])
    blocks = (block.strip() for block in texts_between(said, _CALL, _CALL_END))
    calls = [block for block in blocks if block.startswith("{") and block.endswith("}")]
    if calls:
        call = parsed_json(calls[-1])
        return _plain(str(call["name"])) if isinstance(call, dict) and call.get("name") else None
    if said and "\n" not in said:
        return _plain(said)
    found = _SLUG.findall(said)
    return found[-1] if found else None


def _plain(text: str) -> str | None:
    fields = parsed_json(text)
    if isinstance(fields, dict):
        text = str(wanted_answer(fields)) if wanted_answer(fields) is not fields else ""
    return text.strip(_AROUND) or None


Level = Literal["exact", "alias", "secondary"]
Aliases = Mapping[str, Iterable[str]] | Iterable[Iterable[str]]
LEVELS: tuple[Level, ...] = ("exact", "alias", "secondary")


class AliasMatcher:
    """Says whether a prediction means the target."""

    def __init__(
        self, aliases: Aliases | None = None, secondary: Aliases | None = None, *, case_sensitive: bool = False
    ):
        self.case_sensitive = case_sensitive
        self._aliases = self._read(aliases, "aliases")
        self._secondary = self._read(secondary, "secondary aliases")
        self.has_secondary = secondary is not None

    @classmethod
    def from_files(
        cls, aliases: str | Path, secondary: str | Path | None = None, *, case_sensitive: bool = False
    ) -> AliasMatcher:
        """The aliases in one JSON file, and perhaps the looser ones in another."""
        loose = None if secondary is None else _load(secondary)
        return cls(_load(aliases), loose, case_sensitive=case_sensitive)

    def match(self, predicted: str | None, target: object) -> Level | None:
        """The strictest level at which they match. Of a target that is a list, any one will do."""
        if predicted is None:
            return None
        wanted = wanted_answer(target)
        levels = [self._level(predicted, str(one)) for one in (wanted if isinstance(wanted, list) else [wanted])]
        return next((level for level in LEVELS if level in levels), None)

    def matches(self, predicted: str | None, target: object, *, level: Level = "alias") -> bool:
        """Whether they match at `level` or more strictly."""
        found = self.match(predicted, target)
        return found is not None and LEVELS.index(found) <= LEVELS.index(level)

    @property
    def sha256(self) -> str:
        """The same for the same aliases."""
        tables = [
            {name: sorted(others) for name, others in table.items()} for table in (self._aliases, self._secondary)
        ]
        text = json.dumps([tables, self.case_sensitive, self.has_secondary], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __len__(self) -> int:
        """Names that have aliases."""
        return len(self._aliases)

    def _level(self, predicted: str, target: str) -> Level | None:
        if predicted.strip() == target.strip():
            return "exact"
        # Another case is the right name, but not the very answer: it counts from `alias` on.
        said, wanted = self._fold_case(predicted), self._fold_case(target)
        if said == wanted or said in self._aliases.get(wanted, ()):
            return "alias"
        return "secondary" if said in self._secondary.get(wanted, ()) else None

    def _fold_case(self, name: str) -> str:
        return name.strip() if self.case_sensitive else name.strip().casefold()

    def _read(self, aliases: Aliases | None, what: str) -> dict[str, set[str]]:
        table: dict[str, set[str]] = {}
        for name, others in _pairs(aliases, what):
            table.setdefault(self._fold_case(name), set()).update(map(self._fold_case, others))
        return table


def _pairs(aliases: object, what: str) -> Iterable[tuple[str, list[str]]]:
    if aliases is None:
        return []
    if isinstance(aliases, Mapping):
        return [(str(name), _names(others, f"{what} of {name!r}")) for name, others in aliases.items()]
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise DataError(f"{what} are a mapping (name -> other names) or a list of groups, not {shorten(repr(aliases))}")
    groups = [_names(group, f"{what}, group {index}") for index, group in enumerate(aliases)]
    return [(name, group) for group in groups for name in group]


def _names(value: object, place: str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise DataError(f"{place} must be a list of names, not {shorten(repr(value))}")
    found = list(names)
    wrong = next((name for name in found if not isinstance(name, str) or not name.strip()), None)
    if wrong is not None:
        raise DataError(f"{place}: {shorten(repr(wrong))} is no name")
    return found


def _load(path: str | Path) -> Aliases:
    try:
        found: Aliases = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(f"{path}: {getattr(exc, 'strerror', None) or reason(exc)}") from exc
    _pairs(found, f"{path}: aliases")  # a mistake is named with its file
    return found
