"""One contestant in supervised training: `python -m contest.sft engine|trl|bare KIND STEPS MODEL_DIR`.

In: the number of a step, by pipe. Out: its real (not padding) tokens and seconds. All train LoRA of rank 8 on every
linear layer of the decoder, in fp32, with AdamW, every token in the loss, without recomputing activations.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

from contest.rows import BATCH, make_steps
from contest.turns import Turns

RANK, ALPHA, LEARNING_RATE = 8, 32, 1e-4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Steps = list[list[list[int]]]


def run_engine(steps: Steps, model_dir: str, turns: Turns) -> None:
    from pathlib import Path

    from evsys_engine.engine import Engine
    from evsys_engine.types import LoraSettings

    engine = Engine.load(Path(model_dir), device="cpu", dtype="float32")
    turns.serve(engine_step(engine.create_adapter(LoraSettings(rank=RANK, alpha=ALPHA)), steps))


def engine_step(adapter: Any, steps: Steps) -> Callable[[int], int]:
    """As many positions go in as with the others, and one more per row comes into the loss."""
    import numpy as np

    from evsys_engine.types import AdamParams, TrainingDatum

    def step(number: int) -> int:
        data = [
            TrainingDatum(
                tokens=row,
                inputs={"target_tokens": np.array(row[1:] + row[:1]), "weights": np.full(len(row), 1 / BATCH)},
            )
            for row in steps[number]
        ]
        adapter.forward_backward(data, "cross_entropy")
        adapter.optim_step(AdamParams(learning_rate=LEARNING_RATE))
        return count(steps[number])

    return step


def load_model(model_dir: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")


def run_bare(steps: Steps, model_dir: str, turns: Turns) -> None:
    """What a careful person writes by hand."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(load_model(model_dir), lora_config()).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def step(number: int) -> int:
        rows = steps[number]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(width) < lengths[:, None]
        labels = ids.masked_fill(~real, -100)
        mask = None if bool(real.all()) else real.long()
        model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return count(rows)

    turns.serve(step)


def run_trl(steps: Steps, model_dir: str, turns: Turns) -> None:
    """TRL's own loop; a callback stops it between two steps."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class InTurns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.ready()
            turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.report(count(steps[state.global_step - 1]))
            control.should_training_stop = turns.wait() is None

    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=len(steps),
            max_length=None,
            learning_rate=LEARNING_RATE,
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            max_grad_norm=0.0,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        SFTTrainer(
            model=load_model(model_dir),
            args=config,
            train_dataset=Dataset.from_list([{"input_ids": row} for rows in steps for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(model_dir, local_files_only=True),
            peft_config=lora_config(),
            callbacks=[InTurns()],
        ).train()


def count(rows: list[list[int]]) -> int:
    return sum(map(len, rows))


WAYS = {"engine": run_engine, "trl": run_trl, "bare": run_bare}


if __name__ == "__main__":
    way, kind, number, model_dir = sys.argv[1:]
    turns = Turns()
    WAYS[way](make_steps(kind, int(number)), model_dir, turns)
