"""Direct Preference Optimisation: make the chosen answer likelier than the rejected one, by comparison with the start.

In: rows with `prompt` (or `messages`), `chosen` and `rejected`. Out: batches of pairs with a loss of their own. The
reference is the weights this run, or stage, starts with; what it thinks of an answer is asked once.
"""

from __future__ import annotations

import asyncio

from pydantic import Field

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.errors import DataError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import Row, RunContext
from evsys_sdk.registry import register_algorithm
from evsys_sdk.surface import Capabilities, Datum, TrainingService
from evsys_sdk.training.batch import RowOrder, TrainingBatch
from evsys_sdk.training.preferences import dpo_loss, pair_of, read_preferences, whole_sequence, with_reference
from evsys_sdk.training.teachers import completion_logprobs


@register_algorithm("dpo", yields=True)
class DPO(BaseAlgorithm):
    """Learns from pairs of answers of which one is better."""

    class Config(LoopParams):
        beta: float = Field(default=0.1, gt=0)
        """How closely the model is held to its start: the smaller, the further it may go."""
        label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
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
        size = self.cfg.batch_size * self.cfg.grad_accumulation
        self.order = RowOrder(len(self.pairs), batch_size=size, seed=ctx.seed)
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
            keep_together=2,
        )

    async def compared_pair(self, index: int) -> list[Datum]:
        """A pair with the logprobs that the reference gives its tokens."""
        if index not in self.compared:
            _, pair = self.pairs[index]
            asked = [completion_logprobs(self.reference, whole[:1], whole[1:]) for whole in map(whole_sequence, pair)]
            told = await asyncio.gather(*asked)
            self.compared[index] = [with_reference(*each) for each in zip(pair, told, strict=True)]
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
