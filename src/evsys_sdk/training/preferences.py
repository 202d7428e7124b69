"""Pairs of answers of which one is better: how they are read, and the loss that learns from them.

In: rows with a prompt, a chosen and a rejected answer. Out: data in pairs (chosen, then rejected), and Direct
Preference Optimisation's loss as a callable: the answer's own tokens alone count, compared with the reference's
logprobs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evsys_sdk.data_types import TEXT_ROLE, ChatMessagesRow, from_dict
from evsys_sdk.errors import DataError, need, shorten
from evsys_sdk.protocols import Renderer
from evsys_sdk.surface import Datum, LossCallable, Messages, TensorData
from evsys_sdk.training.render import row_to_data

REFERENCE = "reference_logprobs"
"""A datum's input with the logprobs of its targets under the reference weights; only the loss reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """One prompt with a better and a worse answer."""

    row_id: str
    prompt: Messages
    chosen: str
    rejected: str


def read_preferences(rows: Any) -> list[Preference]:
    """The rows as preferences, or an error that names the first row that is none."""
    rows = list(rows or [])
    if not rows:
        raise DataError("there are no training rows")
    read = []
    for index, row in enumerate(rows):
        try:
            read.append(_preference(row, index))
        except DataError as exc:
            needed = (
                "dpo needs rows with `prompt` (text or messages) or `messages`, `chosen` and `rejected`; "
                "the transform to_preference makes such rows"
            )
            raise DataError(f"row {index}: {exc}\n{needed}") from exc
    return read


def _preference(row: dict[str, Any], index: int) -> Preference:
    fields = {**(row.get("metadata") or {}), **row}  # a transform may have put columns there
    prompt = _messages(fields.get("messages", fields.get("prompt")))
    chosen, rejected = _answer(fields, "chosen", prompt), _answer(fields, "rejected", prompt)
    if chosen == rejected:
        raise DataError("chosen and rejected are the same")
    return Preference(row_id=str(fields.get("id", index)), prompt=prompt, chosen=chosen, rejected=rejected)


def _messages(prompt: Any) -> Messages:
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError("it has neither `prompt` nor `messages`")
    chat = from_dict({"messages": prompt})
    assert isinstance(chat, ChatMessagesRow)
    if chat.messages[0]["role"] == TEXT_ROLE:
        raise DataError("its prompt is plain text outside any chat; dpo compares answers in a chat")
    if chat.messages[-1]["role"] == "assistant":
        raise DataError("its prompt ends with the assistant, who is to answer in `chosen` and `rejected`")
    return chat.messages


def _answer(fields: dict[str, Any], key: str, prompt: Messages) -> str:
    """The answer as text; it may come as text, as a message, or as a chat that ends with it."""
    value = fields.get(key)
    if isinstance(value, list) and value:
        before, value = value[:-1], value[-1]
        if before and before != prompt:
            raise DataError(f"`{key}` is a chat that does not begin with the prompt")
    if isinstance(value, dict) and value.get("role") == "assistant":
        value = value.get("content")
    if not isinstance(value, str) or not value:
        raise DataError(f"`{key}` must be the assistant's answer, not {shorten(repr(value))}")
    return value


def pair_of(preference: Preference, renderer: Renderer, *, max_length: int) -> list[Datum] | None:
    """The two answers as data, chosen first; None where one is longer than `max_length`: half an answer proves
    nothing."""
    pair = []
    for answer in (preference.chosen, preference.rejected):
        chat = ChatMessagesRow(messages=[*preference.prompt, {"role": "assistant", "content": answer}])
        data, truncated = row_to_data(chat, renderer, train_on="last", max_length=max_length)
        if truncated:
            return None
        if not data:
            raise DataError(f"row {preference.row_id}: the chat template shows nothing of the answer")
        pair += data
    return pair


def whole_sequence(datum: Datum) -> list[int]:
    """The tokens of a datum before its targets were shifted against its input."""
    return [*datum.model_input.tokens, datum.loss_fn_inputs["target_tokens"].data[-1]]


def with_reference(datum: Datum, logprobs: Sequence[float]) -> Datum:
    """The datum, carrying what the reference thinks of its targets."""
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, REFERENCE: TensorData(array("f", logprobs))})


def dpo_loss(*, beta: float, label_smoothing: float, pairs: int) -> LossCallable:
    """-log sigmoid(beta * margin), averaged over the step's `pairs`, where the margin is how much more the chosen
    answer has gained on the reference than the rejected one. `label_smoothing` is the chance that a label is wrong."""

    def loss_of_pairs(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        torch = need("torch", extra="local")
        logsigmoid = torch.nn.functional.logsigmoid
        gains = torch.stack([_gain(*each) for each in zip(data, logprobs, strict=True)])
        chosen, rejected = beta * gains[0::2], beta * gains[1::2]
        margin = chosen - rejected
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
        seen = {"margin": margin, "accuracy": margin > 0, "reward/chosen": chosen, "reward/rejected": rejected}
        return losses.sum() / pairs, {name: float(value.detach().double().mean()) for name, value in seen.items()}

    return loss_of_pairs


def _gain(datum: Datum, logprobs: Any) -> Any:
    """How much likelier the answer is than under the reference, in nats."""
    inputs = datum.loss_fn_inputs
    gained = logprobs - inputs[REFERENCE].to_torch().to(logprobs)
    return (inputs["weights"].to_torch().to(logprobs) * gained).sum()
