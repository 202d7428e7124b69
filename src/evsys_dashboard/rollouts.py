"""Rollouts as pages and the API show them.

In: `Prediction` rows, filled from a journal or by any client. Out: those that a filter means, and a `Transcript` of
each: what was asked, what the model wrote turn by turn, its tool calls, the reward and why. Everything in a transcript
is text of a model or of a task: it is never taken for markup, and of images only data URLs of pictures are offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.db.models import Q, QuerySet, TextField
from django.db.models.fields.json import KeyTextTransform, KeyTransform
from django.db.models.functions import Cast
from django.http import QueryDict

from evsys_dashboard.models import PredictionRow, Project

PASSES = 1.0
"""A reward of at least this is a pass, as in the metric `pass@1`."""
FOLDED_FROM = 2_000
"""Characters from which a text is folded; so many of it stand before the fold."""
LONGEST_SHOWN = 100_000
"""Characters of one text on a page; the rest is in the download."""
PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+")
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FAILED, PASSED = "0", "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts a page or a client asks for; each field is a parameter of the URL."""

    run: str = ""
    eval: str = ""
    status: str = ""
    passed: str = ""
    """`1`: only passes; `0`: only failures and errors."""
    task: str = ""
    key: str = ""
    """`topic:addition`: metadata key and value; `topic` alone: rollouts that have it."""
    q: str = ""
    """Text in the task's id, the question or the answer."""

    @classmethod
    def of(cls, query: QueryDict, **given: str) -> RolloutFilter:
        """The filter of a URL; `given` counts more."""
        names = cls.__dataclass_fields__
        return cls(**{name: given.get(name) or query.get(name, "").replace("\0", "") for name in names})

    def url(self, **changed: str) -> str:
        """`?run=...&passed=0`: this filter with some fields changed; other names are added."""
        given = {name: text for name, text in (asdict(self) | changed).items() if text}
        return "?" + urlencode(given, errors="replace")  # a value of metadata may hold half a surrogate pair


def select_rollouts(project: Project, wanted: RolloutFilter) -> QuerySet[PredictionRow]:
    """The rollouts of a project that the filter means, by task and in the order in which they came."""
    found = PredictionRow.objects.filter(project=project)
    exact = {"generation_id": wanted.run, "eval_id": wanted.eval, "task_id": wanted.task}
    found = found.filter(**{name: text for name, text in exact.items() if text})
    if wanted.status:  # a client that names none means ok
        found = found.filter(status__in=("ok", "") if wanted.status == "ok" else (wanted.status,))
    is_pass = Q(reward__gte=PASSES) & Q(status__in=("ok", ""))
    if wanted.passed == PASSED:
        found = found.filter(is_pass)
    elif wanted.passed == FAILED:
        found = found.exclude(is_pass)  # Django's `exclude` keeps rows whose reward is NULL
    if wanted.key:
        name, colon, value = wanted.key.partition(":")
        # What the rollout says of itself, and what its task says: scores are broken down by the latter.
        of_rollout = KeyTextTransform(name, KeyTransform("metadata", "body"))
        of_task = KeyTextTransform(name, KeyTransform("metadata", KeyTransform("question", "body")))
        found = found.annotate(of_rollout=Cast(of_rollout, TextField()), of_task=Cast(of_task, TextField()))
        is_any = Q(of_rollout__isnull=False) | Q(of_task__isnull=False)
        found = found.filter(Q(of_rollout=value) | Q(of_task=value) if colon else is_any)
    if wanted.q:
        # In the body a text stands as JSON writes it.
        quoted = json.dumps(wanted.q)[1:-1]
        found = found.annotate(body_text=Cast("body", TextField()))
        found = found.filter(
            Q(task_id__icontains=wanted.q) | Q(completion__icontains=wanted.q) | Q(body_text__icontains=quoted)
        )
    return found.order_by("task_id", "created", "id")


def is_passed(row: PredictionRow) -> bool:
    return row.reward is not None and row.reward >= PASSES and row.status in ("ok", "")


def outcome_of(row: PredictionRow) -> str:
    """`passed`, `failed`, or the status of a rollout that errored."""
    return "passed" if is_passed(row) else row.status if row.status not in ("ok", "") else "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToolCall:
    """One call that the model asked for."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """One entry of a transcript."""

    role: str
    text: str = ""
    tool_calls: list[ShownToolCall] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    """Data URLs."""
    n_prompt_tokens: int | None = None
    n_tokens: int | None = None
    """Tokens that the model read and wrote, where they were counted."""

    @property
    def is_folded(self) -> bool:
        return len(self.text) > FOLDED_FROM

    @property
    def head(self) -> str:
        return self.text[:FOLDED_FROM] if self.is_folded else self.text

    @property
    def rest(self) -> str:
        return self.text[FOLDED_FROM:LONGEST_SHOWN]

    @property
    def n_hidden(self) -> int:
        """Characters that only the download has."""
        return max(0, len(self.text) - LONGEST_SHOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One try of the model at one task, as a person reads it."""

    id: str
    task_id: str
    outcome: str
    status: str
    reward: float | None
    messages: list[ShownMessage]
    expected: str = ""
    error: str = ""
    verifier: dict[str, str] = field(default_factory=dict)
    """What the verifier said of the answer."""
    metadata: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    cost_usd: float | None = None
    n_tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plain_text(value: object) -> str:
    """A value of JSON as a person reads it: a text as it is, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)


def read_transcript(row: PredictionRow) -> Transcript:
    """The rollout behind a row; what a client sent in another form is shown as text, never refused."""
    body = row.body if isinstance(row.body, Mapping) else {}
    question = _mapping(body.get("question"))
    metadata = dict(_mapping(body.get("metadata")))
    asked = [_message(one, "user") for one in _list(question.get("messages"))]
    if not asked and metadata.get("prompt"):
        asked = [ShownMessage(role="user", text=plain_text(metadata["prompt"]))]
    said = [_message(one, "assistant") for one in _list(body.get("turns"))]
    # A client may send the answer alone, without the turns that led to it.
    if not said and row.completion:
        said = [ShownMessage(role="assistant", text=row.completion, tool_calls=list(calls_in(row.completion)))]
    expected = question.get("expected", body.get("expected", metadata.get("target")))
    verifier = metadata.pop("verifier", None) or body.get("verifier")
    told = _mapping(verifier) if isinstance(verifier, Mapping) else {"verifier": verifier} if verifier else {}
    # What the turns counted; a client that sends no turns may say the number itself.
    counts = [message.n_tokens for message in said if message.n_tokens is not None]
    written = sum(counts) if counts else _whole(metadata.get("n_output_tokens"))
    for shown_elsewhere in ("prompt", "target"):
        metadata.pop(shown_elsewhere, None)
    metadata = dict(_mapping(question.get("metadata"))) | metadata
    return Transcript(
        id=row.pk,
        task_id=row.task_id,
        outcome=outcome_of(row),
        status=row.status or "ok",
        reward=row.reward,
        messages=[*asked, *said],
        expected=plain_text(expected),
        error=plain_text(body.get("error")),
        verifier={str(key): plain_text(value) for key, value in told.items()},
        metadata={str(key): plain_text(value) for key, value in metadata.items()},
        seconds=_float(body.get("seconds")),
        cost_usd=_float(body.get("cost_usd")),
        n_tokens=written,
    )


def _message(given: object, role: str) -> ShownMessage:
    """An entry as a text, as `{text}`, or as chat APIs have it: role, content, tool_calls."""
    if not isinstance(given, Mapping):
        text = plain_text(given)
        return ShownMessage(role=role, text=text, tool_calls=list(calls_in(text)))
    parts = given.get("text", given.get("content"))
    texts, pictures = [], []
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, Mapping):
            texts.append(plain_text(part))
            continue
        link = part.get("image_url")
        url = link.get("url") if isinstance(link, Mapping) else link
        if isinstance(url, str):
            is_picture = PICTURE.fullmatch(url) is not None
            pictures += [url] if is_picture else []
            texts += [] if is_picture else [f"[image: {url[:200]}]"]  # an address elsewhere is never fetched
        else:
            texts.append(plain_text(part.get("text", part)))
    text = "\n".join(text for text in texts if text)
    calls = [_call(one) for one in _list(given.get("tool_calls"))]
    return ShownMessage(
        role=str(given.get("role") or role)[:40],
        text=text,
        tool_calls=calls or list(calls_in(text)),
        pictures=pictures,
        n_prompt_tokens=_count(given, "n_prompt_tokens", "prompt_tokens"),
        n_tokens=_count(given, "n_completion_tokens", "completion_tokens"),
    )


def calls_in(text: str) -> Iterator[ShownToolCall]:
    """Tool calls that a model wrote into its text, as Qwen's and Hermes' templates have them."""
    for found in TOOL_CALL.finditer(text):
        try:
            yield _call(json.loads(found[1]))
        except ValueError:
            yield ShownToolCall(name="(cannot be parsed)", arguments=found[1].strip())


def _call(given: object) -> ShownToolCall:
    call = _mapping(_mapping(given).get("function") or given)
    if not call:
        return ShownToolCall(name="(cannot be parsed)", arguments=plain_text(given))
    return ShownToolCall(name=plain_text(call.get("name")) or "(no name)", arguments=plain_text(call.get("arguments")))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _count(given: Mapping[str, Any], number: str, tokens: str) -> int | None:
    found = given.get(number, given.get(tokens))
    return len(found) if isinstance(found, list) else _whole(found)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
