"""Small recipes for tinker-cookbook's own training loops: data and environments only; the loops are theirs, unmodified.

Importing this takes seconds, so tests do it late.
"""

import json
from functools import partial
from pathlib import Path

import chz
from tinker_cookbook import renderers
from tinker_cookbook.distillation import sdft, train_off_policy, train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as sft_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "qwen3_instruct"
QUESTIONS = ["what colour is the sky?", "say hello", "one two three", "name a number"]
ANSWERS = ["blue", "hello", "four", "seven"]


class ShortAnswerEnv(ProblemEnv):
    """Rewards an answer with few letters `e`: about half of what a random model writes."""

    def __init__(self, question, renderer):
        super().__init__(renderer)
        self.question = question

    def get_question(self):
        return self.question

    def check_answer(self, sample_str):
        return sample_str.count("e") < 1

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return ""


def environments(model: str, group_size: int):
    renderer = renderers.get_renderer(RENDERER, tokenizer=get_tokenizer(model))
    return [
        ProblemGroupBuilder(env_thunk=partial(ShortAnswerEnv, question, renderer), num_envs=group_size)
        for question in QUESTIONS
    ]


class Environments(RLDataset):
    def __init__(self, model: str, steps: int, group_size: int):
        self.builders, self.steps = environments(model, group_size), steps

    def get_batch(self, index: int):
        return self.builders

    def __len__(self) -> int:
        return self.steps


@chz.chz
class EnvironmentsBuilder(RLDatasetBuilder):
    model: str
    steps: int = 3
    group_size: int = 4

    async def __call__(self):
        return Environments(self.model, self.steps, self.group_size), None


@chz.chz
class PromptsBuilder(RLDatasetBuilder):
    model: str

    async def __call__(self):
        tokenizer = get_tokenizer(self.model)
        renderer = renderers.get_renderer(RENDERER, tokenizer=tokenizer)
        return PromptOnlyDataset(QUESTIONS * 2, 4, 2, renderer, tokenizer), None


class Demonstrations:
    """What `sdft.main` takes: environments with their questions and golden answers."""

    def __init__(self, model: str):
        self.model = model

    def get_batch(self, index: int):
        return environments(self.model, 1), QUESTIONS, ANSWERS

    def __len__(self) -> int:
        return 2


def conversations(model: str, folder: Path, *, repeats: int = 6) -> FromConversationFileBuilder:
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    file = folder / "conversations.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows * repeats))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=256, batch_size=4
    )
    return FromConversationFileBuilder(common_config=common, file_path=str(file), test_size=4)


def _common(model: str, url: str, log: Path) -> dict:
    return {
        "model_name": model, "base_url": url, "log_path": str(log), "recipe_name": "test", "renderer_name": RENDERER,
        "lora_rank": 8,
    }  # fmt: skip


async def supervised(model: str, url: str, log: Path, *, max_steps: int | None = None) -> None:
    config = sft_train.Config(
        **_common(model, url, log), dataset_builder=conversations(model, log.parent), learning_rate=1e-2,
        save_every=2, rolling_save_every=1, eval_every=2, num_epochs=2, lr_schedule="constant", max_steps=max_steps,
    )  # fmt: skip
    await sft_train.main(config)


async def reinforcement(model: str, url: str, log: Path, **options) -> None:
    config = rl_train.Config(
        **_common(model, url, log), dataset_builder=EnvironmentsBuilder(model=model), learning_rate=1e-2,
        max_tokens=8, save_every=2, eval_every=0, **options,
    )  # fmt: skip
    await rl_train.main(config)


async def on_policy_distillation(model: str, url: str, log: Path, teacher: str | None) -> None:
    dataset = DistillationDatasetConfig(
        dataset_builder=PromptsBuilder(model=model),
        teacher_config=TeacherConfig(base_model=model, load_checkpoint_path=teacher),
        groups_per_batch=4,
    )
    config = train_on_policy.Config(
        **_common(model, url, log), dataset_configs=[dataset], learning_rate=1e-3, max_tokens=8, eval_every=0
    )
    await train_on_policy.main(config)


async def off_policy_distillation(model: str, url: str, log: Path, teacher: str | None) -> None:
    dataset = train_off_policy.DatasetWithTeacher(
        dataset_builder=conversations(model, log.parent),
        teacher_config=TeacherConfig(base_model=model, load_checkpoint_path=teacher),
    )
    config = train_off_policy.Config(
        **_common(model, url, log), dataset_configs=[dataset], learning_rate=1e-3, n_teacher_targets=5,
        batch_size=4, max_steps=2, eval_every=0,
    )  # fmt: skip
    await train_off_policy.main(config)


async def self_distillation(model: str, url: str, log: Path, **options) -> None:
    config = sdft.Config(
        **_common(model, url, log), learning_rate=1e-3, max_tokens=8, eval_every=0, max_context_length=1024, **options
    )
    await sdft.main(config, Demonstrations(model))
