"""Supervised fine-tuning: imitate what the assistant says in the rows.

In: `ctx.extras["train_rows"]`, chats as plain dicts. Out: batches with cross-entropy on the assistant's own tokens.
Rows are rendered and tokenised once, at the start.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.data_types import ChatMessagesRow, TargetFormat, parse_rows
from evsys_sdk.errors import BackendError, DataError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunContext, RunResult
from evsys_sdk.registry import register_algorithm
from evsys_sdk.surface import Capabilities, Datum, TrainingService
from evsys_sdk.training.batch import RowOrder, TrainingBatch
from evsys_sdk.training.render import TrainOn, row_to_datum

SHOWN_IDS = 20


@register_algorithm("sft")
class SFT(BaseAlgorithm):
    """Cross-entropy on what the assistant wrote."""

    class Config(LoopParams):
        train_on: TrainOn = "all"
        """Learn from every assistant turn of a row, or from its last one."""
        max_length: int = Field(default=2048, ge=2)
        """Tokens per row."""
        on_truncate: Literal["cut", "drop", "error"] = "cut"
        """What happens to a row that is longer. It is counted and named in any case."""

    cfg: Config

    def needs(self, capabilities: Capabilities) -> str | None:
        if "cross_entropy" in capabilities.losses:
            return None
        return "this backend has no cross_entropy loss; use one that has, such as mock"

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        self.data: list[Datum] = []
        self.row_ids: list[str] = []
        self.truncated: list[str] = []
        self.dropped: list[str] = []
        for index, row in enumerate(read_chats(ctx.extras.get("train_rows"))):
            self._add(row, row_id(row, index))
        self._report()
        self.order = RowOrder(
            len(self.data), batch_size=self.cfg.batch_size * self.cfg.grad_accumulation, seed=ctx.seed
        )

    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    async def build_batch(self, step: int) -> TrainingBatch:
        chosen = self.order.indices(step)
        return TrainingBatch([self.data[i] for i in chosen], row_ids=[self.row_ids[i] for i in chosen])

    def run_metrics(self) -> dict[str, float]:
        return {"rows_truncated": len(self.truncated), "rows_dropped": len(self.dropped)}

    def _add(self, row: ChatMessagesRow, name: str) -> None:
        try:
            datum, truncated = row_to_datum(
                row, self.renderer, train_on=self.cfg.train_on, max_length=self.cfg.max_length
            )
        except DataError as exc:
            raise DataError(f"row {name}: {exc}") from exc
        if truncated:
            self.truncated.append(name)
        elif datum is None:
            raise DataError(f"row {name} has nothing to learn from: no assistant message with content")
        if datum is None or (self.cfg.on_truncate == "drop" and truncated):
            self.dropped.append(name)
        else:
            self.data.append(datum)
            self.row_ids.append(name)

    def _report(self) -> None:
        if self.truncated:
            said = (
                f"{len(self.truncated)} rows are longer than max_length {self.cfg.max_length} "
                f"({len(self.dropped)} of them left out): {_listed(self.truncated)}"
            )
            if self.cfg.on_truncate == "error":
                raise DataError(f"{said}; raise max_length, or set on_truncate to cut or drop")
            get_logger(__name__).warning(said)
            self.notes |= {"truncated_rows": self.truncated, "dropped_rows": self.dropped}
        if not self.data:
            raise DataError("no row is left to train on")


@register_algorithm("mock_sft")
class MockSFT(SFT):
    """`sft`, for tests: refuses to run anywhere but on the mock backend."""

    def train(self, ctx: RunContext) -> RunResult:
        kind = getattr(ctx.backend, "name", type(ctx.backend).__name__)
        if kind != "mock":
            raise BackendError(f"mock_sft runs on the mock backend only, not on {kind!r}; on {kind!r} use sft")
        return super().train(ctx)


def read_chats(rows: Any) -> list[ChatMessagesRow]:
    """Typed chat rows, or an error that says how to get them."""
    rows = list(rows or [])
    if not rows:
        raise DataError("there are no training rows")
    try:
        return parse_rows(rows, TargetFormat.CHAT_MESSAGES)
    except DataError as exc:
        raise DataError(f"{exc}\nsft needs chats: add the transform jsonl_to_chat to data.transforms") from exc


def row_id(row: ChatMessagesRow, index: int) -> str:
    """The row's own id where it has one, else its number (from 0)."""
    return str(row.metadata.get("id", index))


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN_IDS
    return ", ".join(names[:SHOWN_IDS]) + (f" and {more} more" if more > 0 else "")
