"""Rows as a run's model sees them: the tokens that its chat template makes of them, and which of these are learnt.

In: a run's config and rows behind its transforms. Out: for each row its sequences, in spans that are learnt or context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from evsys_sdk import registry
from evsys_sdk.config.schema import RunConfig
from evsys_sdk.data_types import ChatMessagesRow, HarborTask, TargetFormat, detect_format, from_dict, task_messages
from evsys_sdk.protocols import Row
from evsys_sdk.run.open_model import Target, check_target, open_model
from evsys_sdk.training.rendering import ChatRenderer, Masked, TrainOn, messages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens in a row that are all learnt, or all context."""

    text: str
    n_tokens: int
    is_learnt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One sequence of a row. A template that rewrites earlier turns makes several of one chat."""

    spans: list[TokenSpan]
    n_cut: int
    """Tokens behind `max_length`, which the run leaves out."""

    @property
    def summary(self) -> str:
        tokens = sum(span.n_tokens for span in self.spans)
        learnt = sum(span.n_tokens for span in self.spans if span.is_learnt)
        cut = f"; {self.n_cut} more are behind max_length" if self.n_cut else ""
        return f"{tokens} tokens, {learnt} learnt{cut}"


def view_tokens(run: RunConfig, rows: Sequence[Row]) -> list[list[TokenSequence]]:
    """The sequences of each row; none for a row that is neither a chat nor a task. Opens the run's model.

    Only algorithms that imitate learn from rows: for the others a row is shown up to where the model answers."""
    settings = registry.algorithms.build(run.algorithm.kind, dict(run.algorithm.params)).cfg
    train_on: TrainOn | None = getattr(settings, "train_on", None)
    max_length: int | None = getattr(settings, "max_length", None)
    target = Target(
        name=run.model.name, model=run.model.name, backend=run.backend.kind, backend_params=dict(run.backend.params),
        renderer_name=run.model.renderer_name,
    )  # fmt: skip
    check_target(target)
    with open_model(target) as opened:
        renderer = opened.renderer()
        assert isinstance(renderer, ChatRenderer)
        return [
            [_to_spans(renderer, one, max_length) for one in _sequences_of(row, renderer, train_on)] for row in rows
        ]


def _sequences_of(row: Row, renderer: ChatRenderer, train_on: TrainOn | None) -> list[Masked]:
    if detect_format(row) not in (TargetFormat.CHAT_MESSAGES, TargetFormat.HARBOR_TASK):
        return []
    typed = from_dict(row)
    if isinstance(typed, ChatMessagesRow):
        messages = messages_of(typed)
        if train_on is not None:
            return renderer.sequences(messages, last_only=train_on == "last")
        prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    else:
        assert isinstance(typed, HarborTask)
        prompt = task_messages(typed)
    tokens = renderer.prompt(prompt)
    return [(tokens, [0] * len(tokens))]


def _to_spans(renderer: ChatRenderer, sequence: Masked, max_length: int | None) -> TokenSequence:
    tokens, mask = sequence
    seen = list(zip(tokens, mask, strict=True))[:max_length]
    spans = []
    for is_learnt, pairs in groupby(seen, key=lambda pair: bool(pair[1])):
        part = [token for token, _ in pairs]
        spans.append(TokenSpan(text=renderer.tokenizer.decode(part), n_tokens=len(part), is_learnt=is_learnt))
    return TokenSequence(spans=spans, n_cut=len(tokens) - len(seen))
