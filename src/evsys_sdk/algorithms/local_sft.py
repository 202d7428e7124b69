"""`sft` by TRL's SFTTrainer, for people who want TRL.

In: `ctx.extras["train_rows"]`, chats as plain dicts, on the local backend. Out: weights that the local backend loads.
Rows are rendered by our renderer, so masks and prompts are those of `sft`; the loss is TRL's: a mean over tokens.
"""

from __future__ import annotations

import copy

from evsys_sdk.algorithms.sft import ChatParams
from evsys_sdk.algorithms.trl_loop import TrlAlgorithm, TrlParams, trl_settings
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import need
from evsys_sdk.protocols import Row, RunContext
from evsys_sdk.registry import register_algorithm
from evsys_sdk.training.chat_data import chat_data, check_chats
from evsys_sdk.training_api import Datum, TrainingService

NO_TARGET = -100
"""TRL's label of a token that is not learnt."""


@register_algorithm("local_sft")
class LocalSFT(TrlAlgorithm):
    """Cross-entropy on what the assistant wrote, by TRL's SFTTrainer on the local model."""

    class Config(TrlParams, ChatParams): ...

    cfg: Config
    instead = "sft"

    def check_rows(self, rows: list[Row]) -> None:
        check_chats(rows, self.name)

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        self.chats = chat_data(
            ctx.extras.get("train_rows"),
            self.renderer,
            algorithm=self.name,
            train_on=self.cfg.train_on,
            max_length=self.cfg.max_length,
            on_truncate=self.cfg.on_truncate,
        )
        self.notes |= self.chats.notes()

    def steps_per_epoch(self) -> int:
        return -(-len(self.chats.data) // (self.cfg.batch_size * self.cfg.grad_accumulation))

    def run_metrics(self) -> dict[str, float]:
        return self.chats.metrics()

    def make_trainer(self, model: object, tokenizer: object, settings: JsonObject, callback: object) -> object:
        trl, datasets = need("trl", extra="local"), need("datasets", extra="local")
        ours = settings | {
            "per_device_train_batch_size": self.cfg.batch_size,
            "max_length": None,  # rows are cut already
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }

        class Trainer(trl.SFTTrainer):  # type: ignore[name-defined]
            def _send_telemetry(self) -> None:
                """TRL reports nothing: the loop logs its steps."""

        return Trainer(
            model=model,
            args=trl.SFTConfig(**trl_settings(trl.SFTConfig, ours, self.cfg.trl)),
            train_dataset=datasets.Dataset.from_list([trl_row(datum) for datum in self.chats.data]),
            processing_class=copy.deepcopy(tokenizer),  # TRL sets its pad token
            callbacks=[callback],
        )


def trl_row(datum: Datum) -> dict[str, list[int]]:
    """Our datum as TRL wants it: unshifted, with labels only where something is learnt."""
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    weights = datum.loss_fn_inputs["weights"].tolist()
    labels = [token if weight else NO_TARGET for token, weight in zip(targets, weights, strict=True)]
    return {"input_ids": [*datum.model_input.tokens, targets[-1]], "labels": [NO_TARGET, *labels]}
