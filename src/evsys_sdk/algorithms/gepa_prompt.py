"""Prompt search by GEPA: the weights stay as they are, the system prompt gets better.

In: rows with inputs and an expected output (or tasks with their own verifiers), a model that answers, and a model that
reflects on its mistakes. Out: the best system prompt found, as the artifact `prompt`, with which benchmarks are scored
and `evsys serve` answers. The package `gepa` decides which prompt to change and which to keep; asking, scoring, the
budget and the memory of what was asked are ours.

A search that was killed starts `gepa` again from its seed and answers every question it asked before from the journal
of calls. The decisions are then the same, and nothing is paid twice. gepa's own files (a pickle) are not used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from evsys_sdk import registry
from evsys_sdk.algorithms.base import service_of
from evsys_sdk.concurrency import run_async
from evsys_sdk.constants import CALLS_FILE
from evsys_sdk.data_types import (
    Columns,
    HarborTask,
    InProcessVerifier,
    PromptExample,
    from_dict,
)
from evsys_sdk.errors import BackendError, DataError, need
from evsys_sdk.files import write_json
from evsys_sdk.inference.policy import TrainedModelClient
from evsys_sdk.protocols import (
    InferenceClient,
    KeptWeights,
    Row,
    RunContext,
    RunResult,
)
from evsys_sdk.registry import register_algorithm
from evsys_sdk.training.prompt_search import (
    COMPONENT,
    PROMPT_FILE,
    UNTRAINED_RANK,
    AnsweringModel,
    CallJournal,
    PromptSearch,
    PromptSearchParams,
)
from evsys_sdk.training.prompts import prompt_of
from evsys_sdk.training.rendering import renderer_of
from evsys_sdk.training_api import SamplingParams


@register_algorithm("gepa_prompt")
class GepaPrompt:
    """Searches a better system prompt by reflection on mistakes (GEPA). Changes no weights."""

    class Config(PromptSearchParams): ...

    cfg: Config
    requires: ClassVar = {"gepa": "gepa"}
    supports_resume: ClassVar[bool] = True

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    def check_rows(self, rows: list[Row]) -> None:
        """Refuse rows that cannot be asked or graded."""
        tasks_of(rows, self.cfg)

    @property
    def starting_prompt(self) -> str:
        """The system prompt that the model of this run has before the search."""
        return self.cfg.seed_prompt

    def task_client(self) -> InferenceClient | None:
        """The client that answers in the place of the run's weights; None where the weights do."""
        spec = self.cfg.task_model
        client = None if spec is None else registry.inference.build(spec.kind, dict(spec.params))
        # `mock`, `local` and `tinker` are names for the run's own model.
        return None if isinstance(client, TrainedModelClient) else client

    def train(self, ctx: RunContext) -> RunResult:
        """Search, score the finalists again, and leave the best prompt."""
        need("gepa", extra="gepa")
        if ctx.rollouts is None:
            raise BackendError("this run has no rollout engine; give one to the context (RunContext.rollouts)")
        train, val = self._split(ctx)
        spent = len(val) * self.cfg.num_samples
        least = 2 * spent + 2 * self.cfg.minibatch_size * self.cfg.num_samples
        if self.cfg.max_metric_calls < least:
            raise DataError(
                f"gepa_prompt: max_metric_calls is {self.cfg.max_metric_calls}, and one round with {len(val)} "
                f"validation rows takes {least}; raise it, or take fewer validation rows"
            )
        answering, weights = run_async(self._open(ctx))
        search = PromptSearch(
            cfg=self.cfg,
            ctx=ctx,
            answering=answering,
            reflecting=self._reflecting,
            calls=CallJournal(
                ctx.output_dir / (f"{ctx.stage}.{CALLS_FILE}" if ctx.stage else CALLS_FILE),
                keep=ctx.resume,
                hooks=ctx.hooks,
            ),
            train=train,
            val=val,
        )
        if ctx.hooks:
            ctx.hooks.train_start(None)
            if ctx.resume:
                run_async(ctx.hooks.resumed(KeptWeights(step=0)))
        try:
            candidates = search.run()
            final = search.rescore(candidates)
        finally:
            search.calls.close()
        path = write_json(ctx.output_dir / PROMPT_FILE, {COMPONENT: final.text, "finalists": final.table})
        if ctx.hooks:
            run_async(ctx.hooks.train_end(final.metrics))
        artifacts = {"prompt": str(path), **weights}
        for name, artifact in artifacts.items():
            ctx.log_store.log_artifact(name, artifact)
        return RunResult(
            run_id=ctx.run_id,
            status="completed",
            metrics=final.metrics,
            artifacts=artifacts,
            extras={"prompt": final.text, "prompt_search": final.about},
        )

    def _split(self, ctx: RunContext) -> tuple[list[HarborTask], list[HarborTask]]:
        """The rows to learn from, and the rows to rank by."""
        rows = list(ctx.extras.get("train_rows") or [])
        if self.cfg.val_data is not None:
            load = ctx.extras.get("load_rows")
            if load is None:
                raise DataError("val_data can be loaded only by a run from a config")
            val = tasks_of(load(self.cfg.val_data, "algorithm.params.val_data"), self.cfg, prefix="val-")
            return tasks_of(rows, self.cfg), val
        tasks = tasks_of(rows, self.cfg)
        if len(tasks) < 2:
            raise DataError(f"gepa_prompt needs at least 2 rows to learn from and to rank by, not {len(tasks)}")
        random.Random(ctx.seed).shuffle(tasks)
        cut = min(max(1, round(len(tasks) * self.cfg.val_fraction)), len(tasks) - 1)
        return tasks[cut:], tasks[:cut]

    async def _open(self, ctx: RunContext) -> tuple[AnsweringModel, dict[str, str]]:
        """The model that answers, and what a run of it leaves: its weights as they are, saved, so that the run can be
        named, served and trained on like any other. A hosted model leaves none."""
        service, client = service_of(ctx), self.task_client()
        renderer, saved = renderer_of(ctx, service), dict[str, str]()
        if client is None:
            saved_rank = getattr(service, "saved_rank", None)
            rank = int(saved_rank(ctx.start_from)) if ctx.start_from and saved_rank else UNTRAINED_RANK
            weights = await service.create_training_client(rank=rank, seed=ctx.seed)
            if ctx.start_from:
                await weights.load_state(ctx.start_from, optimizer=False)
            saved["final_checkpoint"] = await weights.save_state("prompt-state")
            saved["final_sampler"] = await weights.save_weights_for_sampler("prompt")
        sampler = await service.create_sampling_client(saved.get("final_sampler"))
        reflection = self.cfg.reflection_model
        self._reflecting: InferenceClient = registry.inference.build(reflection.kind, dict(reflection.params))
        if isinstance(self._reflecting, TrainedModelClient):
            self._reflecting.attach(sampler, renderer, ctx.seed)
        sampling = SamplingParams(max_tokens=self.cfg.max_tokens, temperature=self.cfg.temperature, seed=ctx.seed)
        model = AnsweringModel(ctx=ctx, sampler=sampler, renderer=renderer, sampling=sampling, client=client)
        return model, saved


def tasks_of(rows: Sequence[Row], cfg: GepaPrompt.Config, prefix: str = "") -> list[HarborTask]:
    """The rows as tasks with distinct ids; a DataError names the first that cannot be asked or graded."""
    if not rows:
        raise DataError("there are no training rows")
    tasks = []
    for index, row in enumerate(rows):
        try:
            tasks.append(replace(_task(from_dict(row), index, cfg), task_id=f"{prefix}{index}"))
        except DataError as exc:
            raise DataError(f"row {index}: {exc}") from exc
    return tasks


def _task(row: Any, index: int, cfg: GepaPrompt.Config) -> HarborTask:
    if isinstance(row, HarborTask):
        return row
    if not isinstance(row, PromptExample):
        found = prompt_of(row, index)
        if not found.judged:
            raise DataError("it shows no answer, so no answer to it can be graded")
        return replace(found.task, verifier=_verifier(cfg, found.answer))
    if row.expected is None:
        raise DataError("it has no `expected`, so no answer to it can be graded")
    return HarborTask(
        task_id=str(index), instruction=_question(row.inputs, cfg.template), verifier=_verifier(cfg, row.expected)
    )


def _verifier(cfg: GepaPrompt.Config, expected: object) -> InProcessVerifier:
    return InProcessVerifier(fn_name=cfg.verifier.kind, expected=expected, params=dict(cfg.verifier.params))


def _question(inputs: Columns, template: str | None) -> str:
    if template is None:
        if len(inputs) == 1:
            return str(next(iter(inputs.values())))
        return "\n".join(f"{name}: {value}" for name, value in inputs.items())
    try:
        return template.format_map(inputs)
    except (KeyError, IndexError, ValueError, AttributeError) as exc:
        raise DataError(f"template does not fit its inputs ({', '.join(inputs)}): {exc!r}") from exc
