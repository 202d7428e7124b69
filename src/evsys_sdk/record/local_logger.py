"""The research record of one run as a tree of plain files, no dashboard needed.

In: a run's events. Out, below `<run_dir>/logs/`:

    hypothesis.md  conclusion.md            why it was run; what came of it
    data/training_data.jsonl                every row that went into training
    training/metrics.jsonl                  a line per step
    validation/ test/ eval/                 per split: metrics.jsonl (a line per eval), rollouts.jsonl (a line per try)
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from evsys_sdk.config.base import Params
from evsys_sdk.data_types import to_dict
from evsys_sdk.files import to_json, whole_file, write_text
from evsys_sdk.format import benchmark_score_text, count, errors_text, inline_markdown, markdown_text
from evsys_sdk.protocols import EvalResult, Rollout, RunContext, RunResult, Score, of_kept_weights
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.lines import LineFile, StepOrder
from evsys_sdk.record.models import eval_summary, in_order, rollout_to_data
from evsys_sdk.registry import register_callback

FOLDERS = {"val": "validation", "test": "test", "eval": "eval"}
"""Split -> folder."""
CONCLUSION_FILE = "conclusion.md"
VERDICT = "## Verdict of the experiment"
"""How the last part of a run's conclusion begins."""


@dataclass(slots=True)
class _Notes:
    """What the logger holds of one run."""

    root: Path
    files: dict[str, LineFile] = field(default_factory=dict)
    orders: dict[str, StepOrder] = field(default_factory=dict)
    evals: dict[tuple[str | None, str, str, int | None], EvalResult] = field(default_factory=dict)
    """By stage, split, name and step, without rollouts."""
    rows: object = None
    """The training rows last written."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, name: str, record: dict[str, Any], *, score: str = "") -> None:
        with self.lock:
            if name not in self.files:
                self.files[name], self.orders[name] = LineFile(self.root / name), StepOrder()
            self.orders[name].note(record["step"], score)
            self.files[name].append(to_json(record))

    def close(self) -> None:
        for name, file in self.files.items():
            file.close()
            self.orders[name].settle(file.path)


@register_callback("local_logger")
class LocalLogger:
    """A per-run `logs/` tree on disk, sorted by concern."""

    only_watches: ClassVar = True

    class Config(Params): ...

    def __init__(self, **params: object):
        self.cfg = self.Config(**params)
        self._runs: dict[str, _Notes] = {}
        self._lock = threading.Lock()
        self._experiment: Any = None

    def on_experiment_start(self, experiment: object) -> None:
        self._experiment = experiment  # it has a conclusion by the time it ends

    def on_run_start(self, ctx: RunContext) -> None:
        hypothesis = getattr(getattr(ctx.config, "metadata", None), "hypothesis", "")
        text = str(hypothesis) or "No hypothesis was given (metadata.hypothesis)."
        write_text(self._notes(ctx).root / "hypothesis.md", markdown_text(text).rstrip() + "\n")
        self._write_rows(ctx)

    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None:
        self._write_rows(ctx)  # a later stage of a chain brings other rows

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        self._notes(ctx).append("training/metrics.jsonl", {"step": step, "ts": time.time(), **metrics})

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        notes = self._notes(ctx)
        folder = FOLDERS.get(result.split, result.split)
        notes.evals[result.stage, result.split, result.name, result.step] = replace(result, rollouts=[])
        for rollout in result.rollouts:
            notes.append(f"{folder}/rollouts.jsonl", rollout_record(result, rollout), score=result.name)
        summary = eval_summary(result)
        line = {
            "step": result.step,
            "ts": time.time(),
            "name": result.name,
            "split": result.split,
            "stage": result.stage,
            **eval_metrics(result),
            **{key: summary[key] for key in ("scores", "breakdown", "error")},
            "seconds": result.seconds,
        }
        notes.append(f"{folder}/metrics.jsonl", line, score=result.name)

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self._end(result)

    def on_experiment_end(self, results: list[RunResult]) -> None:
        for result in results:
            self._end(result)  # a run that broke off did not end by itself
        conclusion = getattr(self._experiment, "conclusion", None)
        if conclusion is not None:
            repeat_verdict(results, self._experiment.config.name, conclusion.text)

    def _end(self, result: RunResult) -> None:
        notes = self._runs.pop(result.run_id, None)
        if notes is None:
            return
        notes.close()
        write_text(notes.root / CONCLUSION_FILE, conclude(result, list(notes.evals.values())))

    def _notes(self, ctx: RunContext) -> _Notes:
        with self._lock:
            if ctx.run_id not in self._runs:
                self._runs[ctx.run_id] = _Notes(ctx.output_dir / "logs")
            return self._runs[ctx.run_id]

    def _write_rows(self, ctx: RunContext) -> None:
        notes, rows = self._notes(ctx), ctx.extras.get("train_rows")
        # By identity: `on_run_start` and the first `on_train_start` bring the same list, a later stage another one.
        if rows is None or rows is notes.rows:
            return
        path = notes.root / "data" / "training_data.jsonl"
        with whole_file(path) as handle:
            if notes.rows is not None:
                with open(path, "rb") as earlier:
                    shutil.copyfileobj(earlier, handle)
            for row in rows:
                line = to_json(row if isinstance(row, dict) else to_dict(row))
                handle.write((line + "\n").encode("utf-8", "backslashreplace"))
        notes.rows = rows


def rollout_record(result: EvalResult, rollout: Rollout) -> dict[str, object]:
    """One line of a `rollouts.jsonl`."""
    place = {"step": result.step, "stage": result.stage, "split": result.split, "eval": result.name}
    return {**place, "completion": rollout.completion, **rollout_to_data(rollout)}


def repeat_verdict(results: Iterable[RunResult], experiment: str, text: str) -> None:
    """Put the result of the experiment at the end of its runs' conclusions, instead of what stood there before."""
    lines = [markdown_text(f"- {line.strip()}") for line in text.splitlines() if line.strip()]
    for result in results:
        file = (result.run_dir or Path()) / "logs" / CONCLUSION_FILE
        if not file.is_file():
            continue
        own = file.read_text().partition(f"\n{VERDICT}")[0]
        write_text(file, "\n".join([own.rstrip("\n"), "", f"{VERDICT} {experiment}", "", *lines]) + "\n")


def conclude(result: RunResult, evals: list[EvalResult]) -> str:
    """What came of a run, in a few lines: its status, its numbers, and how far each score can be believed."""
    kept = of_kept_weights(in_order(evals), result.chosen_steps)
    evals = list({(one.stage, one.split, one.name): one for one in kept}.values())  # the last of each
    lines = [f"# {inline_markdown(result.run_id)}: {result.status}"]
    if result.error:
        lines.append(markdown_text(f"Error: {result.error}"))
    scored = {name for item in evals for name in eval_metrics(item)}
    lines += [f"- {name} = {value:.6g}" for name, value in sorted(result.metrics.items()) if name not in scored]
    lines += [markdown_text(f"- {line}") for item in evals for line in describe_eval(item)]
    if not evals:
        lines.append("It was not evaluated.")
    return lines[0] + "\n\n" + "\n".join(lines[1:]) + "\n"


def describe_eval(result: EvalResult) -> list[str]:
    """`val/tools pass@1 at step 50 = 0.500 [0.300, 0.700], 20 tasks`, a line per score."""
    name = result.split if result.split == result.name else f"{result.split}/{result.name}"
    place = "" if result.step is None else f" at step {result.step}"
    place += f" of stage {result.stage}" if result.stage else ""
    if result.error:
        return [f"{name} could not be scored{place}: {result.error}"]
    lines = []
    for score in result.scores:
        lines.append(f"{name} {_score_line(score, place, result.training_mark)}")
    for key, values in result.breakdown.items():
        lines += [f"{name}, {key} {value}: {_score_line(s)}" for value, scores in values.items() for s in scores]
    return lines


def _score_line(score: Score, place: str = "", mark: str = "") -> str:
    """An invalid score says why it has no value."""
    if score.value is None:
        errors = errors_text(score.n_errors, score.n_rollouts)
        counts = count(score.n_tasks, "task") + (f", {errors}" if errors else "")
        return f"{score.metric}{place} has no value: {score.error or 'invalid'} ({counts})"
    return f"{score.metric}{place} = {benchmark_score_text(score, mark)}"
