"""Direct Preference Optimisation: make the chosen answer likelier than the rejected one, by comparison with the start.

In: rows with `prompt` (or `messages`), `chosen` and `rejected`. Out: batches of pairs (chosen, then rejected) with
DPO's loss (Rafailov et al. 2023, equation 7) as a callable; only the tokens of the answers count. The reference is the
weights this run, or stage, starts with; its logprobs of an answer are computed once.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.config.base import tunable
from evsys_sdk.data_types import TEXT_ROLE, ChatMessagesRow, from_dict
from evsys_sdk.errors import DataError, need, shorten
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import Renderer, Row, RunContext
from evsys_sdk.registry import register_algorithm
from evsys_sdk.training.batch import RowOrder, TrainingBatch
from evsys_sdk.training.rendering import row_to_data
from evsys_sdk.training.teachers import completion_logprobs
from evsys_sdk.training_api import Capabilities, Datum, LossCallable, Messages, TensorData, TrainingService

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE = "reference_logprobs"
"""A datum's input with the logprobs of its targets under the reference weights; only the loss reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """One prompt with a better and a worse answer."""

    row_id: str
    prompt: Messages
    chosen: str
    rejected: str


def read_preferences(rows: Iterable[Row] | None) -> list[Preference]:
    """The rows as preferences, or an error that names the first row that is none."""
    rows = list(rows or [])
    if not rows:
        raise DataError("there are no training rows")
    read = []
    for index, row in enumerate(rows):
        try:
            fields = {**(row.get("metadata") or {}), **row}  # a transform may have put columns there
            prompt = _messages(fields.get("messages", fields.get("prompt")))
            chosen, rejected = _answer(fields, "chosen", prompt), _answer(fields, "rejected", prompt)
            if chosen == rejected:
                raise DataError("chosen and rejected are the same")
            row_id = str(fields.get("id", index))
            read.append(Preference(row_id=row_id, prompt=prompt, chosen=chosen, rejected=rejected))
        except DataError as exc:
            needed = (
                "dpo needs rows with `prompt` (text or messages) or `messages`, `chosen` and `rejected`; "
                "the transform to_preference makes such rows"
            )
            raise DataError(f"row {index}: {exc}\n{needed}") from exc
    return read


def _messages(prompt: object) -> Messages:
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


def _answer(fields: Row, key: str, prompt: Messages) -> str:
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

    def gain(datum: Datum, logprobs: Tensor) -> Tensor:
        """How much likelier the answer is than under the reference, in nats."""
        inputs = datum.loss_fn_inputs
        gained = logprobs - inputs[REFERENCE].to_torch().to(logprobs)
        return (inputs["weights"].to_torch().to(logprobs) * gained).sum()

    def loss_of_pairs(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        torch = need("torch", extra="local")
        logsigmoid = torch.nn.functional.logsigmoid
        gains = torch.stack([gain(*each) for each in zip(data, logprobs, strict=True)])
        # `keep_together` of the batch guarantees that a call has whole pairs, in this order.
        chosen, rejected = beta * gains[0::2], beta * gains[1::2]
        margin = chosen - rejected
        # Rafailov et al. 2023, equation 7, with the smoothing of Mitchell 2023 (conservative DPO).
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
        seen = {"margin": margin, "accuracy": margin > 0, "reward/chosen": chosen, "reward/rejected": rejected}
        # By the pairs of the step and not of this call: gradients of several calls add up to the mean over the step.
        return losses.sum() / pairs, {name: float(value.detach().double().mean()) for name, value in seen.items()}

    return loss_of_pairs


@register_algorithm("dpo")
class DPO(BaseAlgorithm):
    """Learns from pairs of answers of which one is better."""

    class Config(LoopParams):
        beta: float = Field(default=0.1, gt=0, json_schema_extra=tunable(0.01, 1.0, log=True))
        """How closely the model is held to its start: the smaller, the further it may go."""
        label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, json_schema_extra=tunable(0.0, 0.4))
        """The share of pairs that may be labelled the wrong way round."""
        max_length: int = Field(default=2048, ge=2)
        """Tokens of prompt and answer; longer pairs are left out, counted and named."""

    cfg: Config

    def needs(self, capabilities: Capabilities) -> str | None:
        if not capabilities.custom_loss:
            return (
                "its loss is a callable, which this backend cannot run here; custom losses need torch "
                "(pip install 'evsys-sdk[local]')"
            )
        if not capabilities.prompt_logprobs:
            return "it compares with the start weights' logprobs, which this backend cannot tell; use one that can"
        return None

    def check_rows(self, rows: list[Row]) -> None:
        read_preferences(rows)

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        preferences = read_preferences(ctx.extras.get("train_rows"))
        pairs = [pair_of(each, self.renderer, max_length=self.cfg.max_length) for each in preferences]
        named = [(each.row_id, pair) for each, pair in zip(preferences, pairs, strict=True)]
        self.pairs = [(row_id, pair) for row_id, pair in named if pair is not None]
        self.dropped = [row_id for row_id, pair in named if pair is None]
        self._report()
        # Pairs per optimiser step, which is what a step of the run is.
        size = self.cfg.batch_size * self.cfg.grad_accumulation
        self.order = RowOrder(len(self.pairs), batch_size=size, seed=ctx.seed)
        # The reference is the model before the first step, which training moves away from: it has to be saved now.
        start = await self.client.save_weights_for_sampler("reference")
        self.reference = await backend.create_sampling_client(start)
        self.compared: dict[int, list[Datum]] = {}
        """Pairs that already carry the reference's logprobs."""

    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    async def build_batch(self, step: int) -> TrainingBatch:
        chosen = self.order.indices(step)
        pairs = await asyncio.gather(*[self.compared_pair(index) for index in chosen])
        loss = dpo_loss(beta=self.cfg.beta, label_smoothing=self.cfg.label_smoothing, pairs=len(pairs))
        return TrainingBatch(
            [datum for pair in pairs for datum in pair],
            loss_fn=loss,
            row_ids=[self.pairs[index][0] for index in chosen],
            loss_scale=1.0,
            # A micro-batch holds whole pairs: the loss compares the two.
            keep_together=2,
        )

    async def compared_pair(self, index: int) -> list[Datum]:
        """A pair with the logprobs that the reference gives its tokens."""
        if index not in self.compared:
            _, pair = self.pairs[index]
            # A prompt of one token: the logprobs then stand beside the datum's targets, one for each.
            asked = [completion_logprobs(self.reference, whole[:1], whole[1:]) for whole in map(whole_sequence, pair)]
            logprobs = await asyncio.gather(*asked)
            self.compared[index] = [with_reference(*each) for each in zip(pair, logprobs, strict=True)]
        return self.compared[index]

    def run_metrics(self) -> dict[str, float]:
        return {"rows_dropped": len(self.dropped)}

    def _report(self) -> None:
        if self.dropped:
            said = f"{len(self.dropped)} pairs are longer than max_length {self.cfg.max_length} and were left out"
            get_logger(__name__).warning("%s: %s", said, ", ".join(self.dropped[:20]))
            self.notes["dropped_rows"] = self.dropped
        if not self.pairs:
            raise DataError(f"no pair is left to train on: all are longer than max_length {self.cfg.max_length}")
