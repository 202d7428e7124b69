"""The three shapes a row can have, and the verification plans that ride on them.

In: plain dicts from JSONL. Out: frozen dataclasses, and back without loss. They mirror the production
interchange types, so field names and the meaning of `kind` are a contract, not a taste.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

from evsys_sdk.errors import DataError, not_known, shorten
from evsys_sdk.files import read_rows

TEXT_ROLE = "text"
"""The role of a message that is plain text outside any chat, trained on without the chat template."""

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
"""What `json.loads` returns. Narrow it with `isinstance`, or parse it with a model, before reading a key."""
type JsonObject = dict[str, Json]

Block = dict[str, Any]
"""One part of a message's content."""
Message = dict[str, Any]
"""`role`, `content` and what else a chat message has, as files have it."""
Columns = dict[str, Any]
"""A row, or a part of one, as a file has it."""
Content = str | list[Block]


class TargetFormat(StrEnum):
    """Which algorithm family a row is for."""

    CHAT_MESSAGES = "chat_messages"
    HARBOR_TASK = "harbor_task"
    PROMPT_DATASET = "prompt_dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessVerifier:
    """A registered Python function looks at the completion. Sub-millisecond."""

    kind: ClassVar[Literal["in_process"]] = "in_process"
    fn_name: str
    expected: Any = None
    params: Columns = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class E2BVerifier:
    """Tests run against the model's output in a sandbox; the exit code decides."""

    kind: ClassVar[Literal["e2b"]] = "e2b"
    dockerfile: str
    test_sh: str
    test_state_py: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMJudgeVerifier:
    """Another model scores the completion against a rubric."""

    kind: ClassVar[Literal["llm_judge"]] = "llm_judge"
    judge_model: str
    rubric: str


VerifierPayload = InProcessVerifier | E2BVerifier | LLMJudgeVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessagesRow:
    """A conversation to imitate (SFT)."""

    messages: list[Message]
    target_assistant: str | None = None
    """What the assistant should say next; without it the last assistant message is the target."""
    metadata: Columns = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """Something to do and a way to tell whether it was done (RL, validation, benchmarks)."""

    task_id: str
    instruction: Content
    verifier: VerifierPayload
    metadata: Columns = field(default_factory=dict)

    @property
    def target(self) -> Any:
        """The answer that its verifier expects, where that is a function of ours."""
        return self.verifier.expected if isinstance(self.verifier, InProcessVerifier) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExample:
    """Inputs and the output wanted (prompt tuning, distillation)."""

    inputs: Columns
    expected: Any = None
    metadata: Columns = field(default_factory=dict)


TypedRow = ChatMessagesRow | HarborTask | PromptExample

_VERIFIERS: dict[str, type] = {cls.kind: cls for cls in (InProcessVerifier, E2BVerifier, LLMJudgeVerifier)}
_ROWS: dict[str, type] = {
    TargetFormat.CHAT_MESSAGES: ChatMessagesRow,
    TargetFormat.HARBOR_TASK: HarborTask,
    TargetFormat.PROMPT_DATASET: PromptExample,
}


def detect_format(row: Columns) -> str:
    """`chat_messages`, `harbor_task`, `prompt_dataset`, or `unknown`.

    A row that has the columns of several is a task first, then inputs, then a chat."""
    order = (TargetFormat.HARBOR_TASK, TargetFormat.PROMPT_DATASET, TargetFormat.CHAT_MESSAGES)
    return next((shape.value for shape in order if _has_columns(row, shape)), "unknown")


def _has_columns(row: object, shape: TargetFormat) -> bool:
    if not isinstance(row, dict):
        return False
    if shape is TargetFormat.HARBOR_TASK:
        return "instruction" in row and "verifier" in row
    if shape is TargetFormat.PROMPT_DATASET:
        return isinstance(row.get("inputs"), dict)
    return isinstance(row.get("messages"), list)


def from_dict(row: Columns) -> TypedRow:
    """The typed row that `row` describes; columns that are not fields go into `metadata`."""
    shape = detect_format(row)
    if shape == "unknown":
        keys = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"this row has no known shape (it has: {keys}); expected `messages`, or `instruction` with "
            "`verifier`, or `inputs`"
        )
    return _to_typed(row, TargetFormat(shape))


def _to_typed(row: Columns, shape: TargetFormat) -> TypedRow:
    cls = _ROWS[shape]
    names = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    known = {key: value for key, value in row.items() if key in names}
    extra = {key: value for key, value in row.items() if key not in names}
    metadata = known.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(f"metadata must be a mapping, not {type(metadata).__name__}")
    if extra or metadata is None:
        known["metadata"] = {**extra, **(metadata or {})}
    if shape is TargetFormat.HARBOR_TASK:
        known["verifier"] = _verifier_from(row["verifier"])
        if known.get("task_id") is None:  # a name by content, so that it is the same in every run
            text = json.dumps([row["instruction"], row["verifier"]], sort_keys=True, default=str)
            known["task_id"] = "task-" + hashlib.sha256(text.encode()).hexdigest()[:12]
        known["task_id"] = str(known["task_id"])
        _check_content(known["instruction"], "instruction")
        if "system_prompt" in known["metadata"] and "system" not in known["metadata"]:
            raise DataError("a task has no `system_prompt`, and the model would not see it; write the key as `system`")
    elif shape is TargetFormat.CHAT_MESSAGES:
        messages = known["messages"]
        for index, message in enumerate(messages):
            _check_message(message, f"messages[{index}]")
        if not messages:
            raise DataError("messages is empty")
        if len(messages) > 1 and any(message["role"] == TEXT_ROLE for message in messages):
            raise DataError(f"a message of role {TEXT_ROLE} is plain text outside any chat and must be the only one")
        if not isinstance(known.get("target_assistant"), str | None):
            raise DataError("target_assistant must be text")
    return cls(**known)


def _check_message(message: object, place: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{place} must be a mapping with `role` and `content`")
    if message.get("content") is not None:
        _check_content(message["content"], f"{place}.content")
    elif not message.get("tool_calls"):  # a message that only calls tools may be silent
        raise DataError(f"{place} has no `content`")
    weight = message.get("weight")
    if weight is None:
        return
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"{place}.weight must be 0 (no loss on this message) or 1, not {shorten(repr(weight))}")
    if weight and message["role"] not in ("assistant", TEXT_ROLE):
        raise DataError(
            f"{place}.weight is 1 on a message of role {message['role']!r}; only assistant messages are trained on; "
            "leave the weight out, or set it to 0"
        )


def _check_content(content: object, place: str) -> None:
    blocks = isinstance(content, list) and all(isinstance(block, dict) for block in content)
    if not (blocks or isinstance(content, str)):
        raise DataError(f"{place} must be text or a list of content blocks, not {shorten(repr(content))}")
    if isinstance(content, list) and any("role" in block for block in content):
        # Read as blocks, messages hold no text at all, and the model would be asked an empty question.
        raise DataError(
            f"{place} is a list of chat messages, not text or content blocks; in a task, write the user's text as "
            "`instruction`, the system prompt as metadata.system, and earlier messages as metadata.history"
        )


def _verifier_from(value: object) -> VerifierPayload:
    if isinstance(value, InProcessVerifier | E2BVerifier | LLMJudgeVerifier):
        return value
    if not isinstance(value, dict):
        raise DataError(f"verifier must be a mapping with `kind`, not {shorten(repr(value))}")
    fields = dict(value)
    kind = fields.pop("kind", "in_process")
    cls = _VERIFIERS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise DataError("verifier.kind: " + not_known(str(kind), "verifier plan", _VERIFIERS))
    known = cls.__dataclass_fields__  # type: ignore[attr-defined]
    for key in fields:
        if key not in known:
            raise DataError(f"verifier.{key}: " + not_known(key, f"field of {kind}", set(known) - {"kind"}))
        wanted: type = {"params": dict, "expected": object}.get(key, str)
        if not isinstance(fields[key], wanted):
            expected = "a mapping" if wanted is dict else "text"
            raise DataError(f"verifier.{key} must be {expected}, not {shorten(repr(fields[key]))}")
    try:
        return cls(**fields)
    except TypeError as exc:
        raise DataError(f"verifier of kind {kind}: {str(exc).split('__init__() ')[-1]}") from exc


def to_dict(obj: TypedRow | VerifierPayload) -> Columns:
    """The plain form of a typed row or verifier; `from_dict` reads it back to an equal row."""
    out: Columns = {}
    if isinstance(obj, InProcessVerifier | E2BVerifier | LLMJudgeVerifier):
        out["kind"] = obj.kind
    for name in obj.__dataclass_fields__:
        if name == "kind":
            continue
        value = getattr(obj, name)
        if name == "verifier":
            value = to_dict(value)
        if name == "target_assistant" and value is None:
            continue
        out[name] = value
    return out


def iter_jsonl(path: str | Path) -> Iterator[TypedRow]:
    """Typed rows of a JSONL file, mixed formats allowed; a bad line is named by file and number."""
    yield from read_rows(path, from_dict)


def parse_rows(rows: Iterable[Columns], target: TargetFormat | str) -> list[Any]:
    """All rows as `target`, or one error naming the first row that is not. Nothing is dropped or guessed."""
    try:
        shape = TargetFormat(target)
    except ValueError:
        raise DataError(not_known(str(target), "row format", [f.value for f in TargetFormat])) from None
    parsed = []
    for index, row in enumerate(rows):
        if not _has_columns(row, shape):  # the columns of another shape beside its own do no harm
            keys = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise DataError(f"row {index} is {detect_format(row)}, not {shape.value}; it has: {shorten(keys, 120)}")
        try:
            parsed.append(_to_typed(row, shape))
        except DataError as exc:
            raise DataError(f"row {index}: {exc}") from exc
    return parsed


def text_block(text: str) -> Block:
    return {"type": "text", "text": text}


def image_url_block(url: str, detail: str | None = None) -> Block:
    """An image by address, in OpenAI's shape."""
    image: Columns = {"url": url}
    if detail is not None:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def image_base64_block(media_type: str, b64: str) -> Block:
    """An image by value, in Anthropic's shape."""
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": b64}}


def block_to_image_src(block: Block) -> str | None:
    """What an `<img src>` needs for either image shape; None for a block that is no image."""
    src = None
    if block.get("type") == "image_url":
        image = block.get("image_url")
        src = image.get("url") if isinstance(image, dict) else image
    elif block.get("type") == "image" and isinstance(block.get("source"), dict):
        source = block["source"]
        if source.get("type") == "url":
            src = source.get("url")
        elif source.get("data"):
            src = f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
    return src if isinstance(src, str) else None


def has_images(row: TypedRow | Columns) -> bool:
    """Whether any message, instruction or input holds an image block. A row of no known shape holds none."""
    columns = row if isinstance(row, dict) else to_dict(row)
    messages, inputs = columns.get("messages"), columns.get("inputs")
    contents = [message.get("content") for message in messages or [] if isinstance(message, dict)]
    contents += [columns.get("instruction"), *(inputs.values() if isinstance(inputs, dict) else ())]
    return any(
        isinstance(block, dict) and block_to_image_src(block) is not None
        for content in contents
        if isinstance(content, list)
        for block in content
    )


def task_messages(task: HarborTask) -> list[Message]:
    """The chat that puts a task to the model: `metadata.system` speaks first, `metadata.history` went before."""
    system = task.metadata.get("system")
    before = [{"role": "system", "content": system}] if system else []
    messages = [*before, *task.metadata.get("history", []), {"role": "user", "content": task.instruction}]
    return with_tools(messages, task.metadata)


def with_system_prompt(messages: list[Message], prompt: str | None) -> list[Message]:
    """The messages with `prompt` in front, as the system message; the text of one that is there follows it."""
    if not prompt:
        return messages
    if not messages or messages[0].get("role") != "system":
        first: Message = {"role": "system", "content": prompt}
        if messages and "tools" in messages[0]:  # they stand on the first message, wherever that is
            first["tools"] = messages[0]["tools"]
            messages = [{key: value for key, value in messages[0].items() if key != "tools"}, *messages[1:]]
        return [first, *messages]
    first, *rest = messages
    own = content_text(first.get("content"))
    return [{**first, "content": f"{prompt}\n\n{own}" if own else prompt}, *rest]


def with_tools(messages: list[Message], metadata: Columns) -> list[Message]:
    """The messages with the tools that `metadata.tools` describes on the first one, where chat templates find them."""
    tools = metadata.get("tools")
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        return messages
    return [{**messages[0], "tools": tools}, *messages[1:]]


def is_learnt(message: Message) -> bool:
    """Whether imitation trains on this message: the assistant wrote it (or it is plain text), and its `weight`, as in
    OpenAI's fine-tuning files, is not 0."""
    return message["role"] in ("assistant", TEXT_ROLE) and message.get("weight") != 0


def content_text(content: Content | None) -> str:
    """The text of a message's content; images contribute nothing."""
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content if isinstance(block, dict))
    return content or ""
