"""Supervised fine-tuning: imitate what the assistant says in the rows.

In: `ctx.extras["train_rows"]`, chats as plain dicts. Out: batches with cross-entropy on the assistant's own tokens.
Rows are rendered and tokenised once, at the start; what a step sees follows from its number and the seed alone.
"""

from __future__ import annotations

from pydantic import Field

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.config.base import tunable
from evsys_sdk.protocols import Row, RunContext
from evsys_sdk.registry import register_algorithm
from evsys_sdk.training.batch import RowOrder, TrainingBatch, packs
from evsys_sdk.training.chat_data import OnTruncate, chat_data, check_chats
from evsys_sdk.training.rendering import TrainOn
from evsys_sdk.training_api import Capabilities, TrainingService


class ChatParams(LoopParams):
    """Settings of every algorithm that imitates chats."""

    train_on: TrainOn = Field(default="all", json_schema_extra=tunable())
    """Learn from every assistant turn of a row, or from its last one."""
    max_length: int = Field(default=2048, ge=2)
    """Tokens per row."""
    on_truncate: OnTruncate = "cut"
    """What happens to a row that is longer. It is counted and named in any case."""


@register_algorithm("sft")
class SFT(BaseAlgorithm):
    """Cross-entropy on what the assistant wrote."""

    class Config(ChatParams):
        packing: bool = Field(default=False, json_schema_extra=tunable())
        """Let `batch_size` count packs of up to `max_length` tokens instead of rows: short rows share a pack, and steps
        are of even size. Rows never see each other."""

    cfg: Config

    def needs(self, capabilities: Capabilities) -> str | None:
        if "cross_entropy" in capabilities.losses:
            return None
        return "this backend has no cross_entropy loss; use one that has, such as mock"

    def check_rows(self, rows: list[Row]) -> None:
        check_chats(rows, self.name)

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        self.chats = chat_data(
            ctx.extras.get("train_rows"),
            self.renderer,
            algorithm="sft",
            train_on=self.cfg.train_on,
            max_length=self.cfg.max_length,
            on_truncate=self.cfg.on_truncate,
        )
        self.notes |= self.chats.notes()
        self.data, self.row_ids = self.chats.data, self.chats.row_ids
        self.packs = self._packs(ctx.seed)
        self.order = RowOrder(
            len(self.packs), batch_size=self.cfg.batch_size * self.cfg.grad_accumulation, seed=ctx.seed
        )

    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    async def build_batch(self, step: int) -> TrainingBatch:
        chosen = [index for pack in self.order.indices(step) for index in self.packs[pack]]
        return TrainingBatch([self.data[i] for i in chosen], row_ids=[self.row_ids[i] for i in chosen])

    def run_metrics(self) -> dict[str, float]:
        return self.chats.metrics() | ({"packs": len(self.packs)} if self.cfg.packing else {})

    def _packs(self, seed: int) -> list[list[int]]:
        """Which data count as one place of a batch."""
        if not self.cfg.packing:
            return [[index] for index in range(len(self.data))]
        lengths = [datum.model_input.length for datum in self.data]
        return packs(lengths, room=self.cfg.max_length, seed=seed)


@register_algorithm("mock_sft")
class MockSFT(SFT):
    """`sft`, for tests: refuses to run anywhere but on the mock backend."""

    only_on, instead = "mock", "sft"
