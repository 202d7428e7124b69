"""Chat becomes tokens, by the model's own template; rows become training data.

In: messages, or a `ChatMessagesRow`. Out: token ids with a mask of what the assistant wrote, or `Datum`s. Training,
validation and benchmarks all render here, so the model is asked in exactly the words it was taught in.

Some templates rewrite earlier turns once later ones follow (thinking models drop old thoughts). Each assistant turn is
learnt after the very prompt that the model would have answered, so such a chat becomes several sequences. A template's
`{% generation %}` marks are of no use here: they show the turns as they look afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from evsys_sdk.data_types import TEXT_ROLE, ChatMessagesRow, content_text, is_learnt, with_system_prompt, with_tools
from evsys_sdk.errors import (
    BackendError,
    DataError,
    EvsysError,
    MissingDependency,
    closest,
    error_boundary,
    need,
    not_known,
    shorten,
)
from evsys_sdk.protocols import Renderer, RunContext
from evsys_sdk.training_api import Datum, Messages, ModelInput, TensorData, Tokenizer, TrainingService

TrainOn = Literal["all", "last"]
Masked = tuple[list[int], list[int]]
"""Tokens and, per token, 1 where the assistant wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedTurn:
    """What the assistant said once, behind all it was said in answer to."""

    index: int
    """Of the message."""
    tokens: list[int]
    begin: int
    end: int
    """Where in `tokens` its own words are."""


class ChatRenderer:
    """Renders by prefixes: what a message adds to the tokens before it is that message's own."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def prompt(self, messages: Messages) -> list[int]:
        """Tokens up to where the assistant is to speak."""
        with error_boundary(DataError, "the chat template"):
            return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def whole(self, messages: Messages) -> list[int]:
        """Tokens of the chat as it stands."""
        with error_boundary(DataError, "the chat template"):
            return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=False))

    def conversation(self, messages: Messages) -> Masked:
        """The whole chat as one sequence; refused where the template rewrites an earlier turn."""
        tokens = self.whole(messages)
        mask = [0] * len(tokens)
        for turn in self._turns(messages):
            if tokens[: len(turn.tokens)] != turn.tokens:
                raise DataError(
                    f"messages[{turn.index}]: this model's chat template renders earlier turns differently once later "
                    "ones follow, so one sequence cannot show each turn as it was written; ask for `sequences`"
                )
            mask[turn.begin : turn.end] = [1] * (turn.end - turn.begin)
        return tokens, mask

    def sequences(self, messages: Messages, *, last_only: bool = False) -> list[Masked]:
        """Every assistant turn (or the last) in the context it was written in; turns share a sequence where the later
        one's context has the earlier one as it was. Turns of weight 0 are context only."""
        if messages and messages[0]["role"] == TEXT_ROLE:
            return [self.plain_text(content_text(messages[0].get("content")))] if is_learnt(messages[0]) else []
        turns = self._turns(messages, last_only=last_only)
        found: list[Masked] = []
        # From the last turn backwards: the longest sequence comes first, and earlier turns that it begins with share
        # it.
        for turn in reversed(turns):
            home = next((have for have in found if have[0][: len(turn.tokens)] == turn.tokens), None)
            if home is None:
                home = turn.tokens, [0] * len(turn.tokens)
                found.append(home)
            home[1][turn.begin : turn.end] = [1] * (turn.end - turn.begin)
        return found[::-1]

    def plain_text(self, text: str) -> Masked:
        """Text without the chat template, learnt from its first token to its end mark."""
        start = list(getattr(self.tokenizer, "text_start", []))
        tokens = [*start, *self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        return tokens, [0] * len(start) + [1] * (len(tokens) - len(start))

    def _turns(self, messages: Messages, *, last_only: bool = False) -> list[RenderedTurn]:
        learnt = [index for index, message in enumerate(messages) if is_learnt(message)]
        return [self._turn(messages[: index + 1]) for index in (learnt[-1:] if last_only else learnt)]

    def _turn(self, messages: Messages) -> RenderedTurn:
        """The last of `messages`, which is the assistant's."""
        before, after = self.prompt(messages[:-1]), self.whole(messages)
        if after[: len(before)] != before:
            after = [*before, *self._continuation(messages, before, after)]
        end = self._end_of_turn(after, len(before))
        return RenderedTurn(index=len(messages) - 1, tokens=after, begin=len(before), end=end)

    def _continuation(self, messages: Messages, before: list[int], after: list[int]) -> list[int]:
        """What the model would write after the prompt `before` to say the last message, where the template shows that
        message in a way (`after`) that does not begin with the prompt."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        offered = self.tokenizer.decode(before[same:])
        split = self._split_at(after[same:], offered)
        if split is not None:
            return split
        message = messages[-1]
        said, shown = content_text(message.get("content")), after[same:]
        # The template differs from the prompt only inside the last message, and shows its content whole: that is taken
        # for what the model writes.
        if same >= self._history(messages) and said.strip() in self.tokenizer.decode(shown):
            return shown
        if message.get("tool_calls"):
            raise DataError(
                f"messages[{len(messages) - 1}]: this model's chat template shows these tool calls only in another "
                "context than the one they were made in; leave them out, or write them into the content"
            )
        # The template leaves out part of what was said (thoughts), or changes what went before.
        opened = offered.strip()
        if said.startswith(offered):  # what the prompt has begun for it (an opened thought)
            said = said[len(offered) :]
        elif opened and said.startswith(opened):
            said = said[len(opened) :].lstrip("\n")
        return [*self.tokenizer.encode(said), self.tokenizer.eos_token_id]

    def _split_at(self, tokens: list[int], beginning: str) -> list[int] | None:
        """`tokens` without the text `beginning`, where a token reaches over its end; None if they begin otherwise."""
        for end in range(1, len(tokens) + 1):
            text = self.tokenizer.decode(tokens[:end])
            if len(text) >= len(beginning) and not text.endswith("\ufffd"):  # that is half a character
                rest = text.removeprefix(beginning)
                return [*self.tokenizer.encode(rest), *tokens[end:]] if text.startswith(beginning) else None
        return None

    def _history(self, messages: Messages) -> int:
        """Tokens before the last message."""
        return len(self.whole(messages[:-1])) if len(messages) > 1 else 0

    def _end_of_turn(self, tokens: list[int], begin: int) -> int:
        # What the template puts behind the end-of-turn token (ChatML: a newline) is never generated.
        for position in range(len(tokens) - 1, begin - 1, -1):
            if tokens[position] == self.tokenizer.eos_token_id:
                return position + 1
        return len(tokens)


class PromptedRenderer(ChatRenderer):
    """Another renderer with a system prompt in front of every chat: how a model is asked whose prompt was searched."""

    def __init__(self, inner: ChatRenderer, system_prompt: str):
        super().__init__(inner.tokenizer)
        self.inner, self.system_prompt = inner, system_prompt

    def prompt(self, messages: Messages) -> list[int]:
        return self.inner.prompt(with_system_prompt(messages, self.system_prompt))

    def whole(self, messages: Messages) -> list[int]:
        return self.inner.whole(with_system_prompt(messages, self.system_prompt))


def with_prompt(renderer: ChatRenderer, system_prompt: str | None) -> ChatRenderer:
    """The renderer, with the system prompt in front of every chat where there is one."""
    return PromptedRenderer(renderer, system_prompt) if system_prompt else renderer


def renderer_for(model: Any, tokenizer: Tokenizer, backend_kind: str) -> ChatRenderer:
    """The one renderer of a run, for training and scoring: by the model's own template, or by `model.renderer_name`.

    The mock's table model has one template and no use for the name, which the record then says."""
    name = None if backend_kind == "mock" else model.renderer_name
    if name is None:
        return ChatRenderer(tokenizer)

    return CookbookRenderer(name, tokenizer)


def renderer_of(ctx: RunContext, service: TrainingService) -> ChatRenderer:
    """The run's renderer, which scoring uses too; by the model's own template where none was made."""
    made: ChatRenderer | None = ctx.extras.get("renderer")
    return made or ChatRenderer(service.get_tokenizer())


def messages_of(row: ChatMessagesRow) -> Messages:
    """The whole chat to imitate, with `target_assistant` as the last turn unless it is there already; the row's
    `tools`, if it has any, stand on the first message."""
    messages, target = row.messages, row.target_assistant
    last = messages[-1]
    if target is not None and not (last["role"] == "assistant" and last.get("content") == target):
        messages = [*messages, {"role": "assistant", "content": target}]
    return with_tools(messages, row.metadata)


def row_to_data(
    row: ChatMessagesRow, renderer: Renderer, *, train_on: TrainOn, max_length: int
) -> tuple[list[Datum], bool]:
    """The row as training data, and whether something was cut to `max_length` tokens. Mostly that is one datum; none
    where nothing is left to learn, several where the template rewrites earlier turns."""
    found = renderer.sequences(messages_of(row), last_only=train_on == "last")
    # From 1: no position predicts the first token, so a mask that is 1 only there teaches nothing.
    data = [datum(tokens[:max_length], mask[:max_length]) for tokens, mask in found if any(mask[1:max_length])]
    return data, any(len(tokens) > max_length for tokens, _ in found)


def datum(tokens: list[int], mask: list[int]) -> Datum:
    """A sequence to imitate where the mask is 1: each position predicts the next token."""
    inputs = {
        "target_tokens": TensorData(array("q", tokens[1:]), "int64"),
        "weights": TensorData(array("f", mask[1:])),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


# Render as tinker-cookbook does, for models that were tuned with its renderers.
#
# In: the name of one of its renderers (`model.renderer_name`) and a Hugging Face tokenizer. Out: a `ChatRenderer`
# whose tokens are that renderer's. The library is imported when a name asks for it.


WHERE = "model.renderer_name"
THOUGHT = re.compile(r"<think>(.*?)</think>(.*)", re.DOTALL)
"""Text that begins with a thought, which the cookbook keeps apart from the answer."""


class CookbookRenderer(ChatRenderer):
    """`renderers.get_renderer(name, tokenizer)` of tinker-cookbook."""

    def __init__(self, name: str, tokenizer: Tokenizer, where: str = WHERE):
        super().__init__(tokenizer)
        self.name, self.where = name, where
        renderers = _known_renderer(name, where)
        if not hasattr(tokenizer, "inner"):
            raise BackendError(f"{where}: a Hugging Face tokenizer is needed, and this backend has none; leave it out")
        with error_boundary(BackendError, f"{where}: {name!r} with this model's tokenizer"):
            self.inner = renderers.get_renderer(name, tokenizer.inner)
            stops = self.inner.get_stop_sequences()
        if tokenizer.eos_token_id not in stops:
            # Sampling ends at the tokenizer's end of turn; a model that learns another end would never seem to end.
            raise BackendError(
                f"{where}: {name!r} ends a turn with {stops}, this model's tokenizer with {tokenizer.eos_token_id}; "
                "take the renderer that belongs to the model, or leave it out"
            )

    def prompt(self, messages: Messages) -> list[int]:
        with error_boundary(DataError, f"renderer {self.name!r}"):
            return list(self.inner.build_generation_prompt(_theirs(messages, self.where)).to_ints())

    def whole(self, messages: Messages) -> list[int]:
        with error_boundary(DataError, f"renderer {self.name!r}"):
            return list(self.inner.build_supervised_example(_theirs(messages, self.where))[0].to_ints())


def renderer_problem(name: str, where: str = WHERE) -> str | None:
    """Why there is no renderer of that name, or None."""
    try:
        _known_renderer(name, where)
    except EvsysError as exc:
        return str(exc)
    return None


def _known_renderer(name: str, where: str) -> Any:
    """The cookbook's renderers, if `name` is one of them."""
    try:
        renderers = need("tinker_cookbook.renderers", extra="tinker")
    except MissingDependency as exc:
        raise MissingDependency(f"{where}: {exc}; or leave it out, and the model's own template is used") from exc
    known = known_names(renderers)
    if name not in known:
        raise BackendError(f"{where}: {not_known(name, 'renderer of tinker-cookbook', known)}")
    return renderers


def known_names(renderers: Any) -> set[str]:
    """The names that its `get_renderer` documents, and those that a project registered."""
    listed = re.findall(r'- ``"(\w+)"``', renderers.get_renderer.__doc__ or "")
    return {*listed, *renderers.get_registered_renderer_names()}


def _theirs(messages: Messages, where: str = WHERE) -> list[dict[str, Any]]:
    """Our messages in the cookbook's form: text as content, calls as its own records."""
    if any(message.get("tools") for message in messages):
        raise DataError(f"tools cannot be shown with {where}; leave it out, and the model's own template shows them")
    converted = []
    for message in messages:
        content: Any = content_text(message.get("content"))
        thought = THOUGHT.fullmatch(content) if message["role"] == "assistant" else None
        if thought:
            content = [{"type": "thinking", "thinking": thought[1]}, {"type": "text", "text": thought[2]}]
        converted.append({**message, "content": content})
        if message.get("tool_calls"):
            converted[-1]["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return converted


def _call(call: dict[str, Any]) -> Any:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    record = need("tinker_cookbook.renderers", extra="tinker").ToolCall
    return record.model_validate({"function": {"name": function.get("name"), "arguments": text}, "id": call.get("id")})


# Another chat template than the model's own: `chat_template` of a benchmark entry.
#
# In: Jinja text, a file of it, or the name of a tinker-cookbook renderer. Out: a renderer. Which of the three is
# meant is decided only here: text has Jinja's braces in it, a file ends as such files do, everything else is a name.


TEMPLATE_PLACE = "chat_template"
ENDINGS = (".jinja", ".jinja2", ".j2")
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Of the assistant's words, for training: a tag that Jinja itself does not know."""


def renderer_with(template: str, tokenizer: Tokenizer, folders: Sequence[Path]) -> ChatRenderer:
    """A renderer by this template instead of the tokenizer's own."""
    text = template_text(template, folders)
    if text is None:
        return CookbookRenderer(template, tokenizer, TEMPLATE_PLACE)
    change: Any = getattr(tokenizer, "with_template", None)
    if change is None:
        raise BackendError(
            f"{TEMPLATE_PLACE}: a Hugging Face tokenizer is needed, and this backend has none; leave it out"
        )
    return ChatRenderer(change(text))


def template_text(template: str, folders: Sequence[Path]) -> str | None:
    """The Jinja text; None where `template` names a renderer."""
    if "{%" in template or "{{" in template:
        return template
    if not template.endswith(ENDINGS):
        return None
    for folder in folders:
        if (folder / template).is_file():
            return (folder / template).read_text(encoding="utf-8")
    beside = {path.name for folder in folders for path in (folder / template).parent.glob("*")}
    near = closest(Path(template).name, beside)
    hint = f"; closest: {near}" if near else ""
    raise DataError(f"no template at {shorten(repr(template))}; looked in {', '.join(map(str, folders))}{hint}")


def template_problem(template: str, folders: Sequence[Path]) -> str | None:
    """What is wrong with it, as far as that can be said without a model."""
    try:
        text = template_text(template, folders)
    except (DataError, OSError, UnicodeDecodeError) as exc:
        return str(exc)
    if text is None:
        known = renderer_problem(template, TEMPLATE_PLACE)
        return known and f"{known}; or give Jinja text, or a file that ends in {' or '.join(ENDINGS)}"
    if importlib.util.find_spec("jinja2") is None:
        return None  # the tokenizer that brings it will say so
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
    except TemplateSyntaxError as exc:
        return f"it is no Jinja template: line {exc.lineno}: {exc.message}"
    return None
