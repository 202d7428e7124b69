from __future__ import annotations

import csv
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from evsys_sdk.errors import Cancelled, EvsysError
from evsys_sdk.protocols import EvalResult, RunContext, RunResult, Score
from evsys_sdk.record.callbacks import HOOKS, CallbackList, CsvMetrics, EarlyStopping, PrintProgress, eval_metrics

MakeCtx = Callable[..., RunContext]


def scored(value: float | None, *, split: str = "val", name: str = "tools", step: int | None = 5) -> EvalResult:
    return EvalResult(name=name, split=split, step=step, scores=[Score(metric="pass@1", value=value)])


class Recorder:
    """Notes every hook with its name in a shared list."""

    def __init__(self, label: str, notes: list[str]):
        for hook in HOOKS:
            setattr(self, hook, lambda *args, hook=hook: notes.append(f"{label}.{hook}"))


def tell_all(callbacks: Any, ctx: RunContext) -> None:
    callbacks.on_experiment_start(None)
    callbacks.on_run_start(ctx)
    callbacks.on_train_start(ctx, 1)
    callbacks.on_step(ctx, 1, {"loss": 1.0})
    callbacks.on_checkpoint(ctx, 1, "path")
    callbacks.on_eval(ctx, scored(0.5))
    callbacks.on_train_end(ctx, {})
    callbacks.on_run_end(ctx, RunResult(run_id=ctx.run_id, status="completed"))
    callbacks.on_experiment_end([])


def test_every_hook_reaches_every_callback_in_the_order_of_the_list(make_ctx: MakeCtx) -> None:
    notes: list[str] = []
    tell_all(CallbackList([("a", Recorder("a", notes)), ("b", Recorder("b", notes))]), make_ctx())
    assert notes == [f"{label}.{hook}" for hook in HOOKS for label in "ab"]


def test_a_callback_with_one_hook_is_a_callback(make_ctx: MakeCtx) -> None:
    class OnlySteps:
        seen = 0

        def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
            self.seen += 1

    callback = OnlySteps()
    callbacks = CallbackList([("only", callback)])
    tell_all(callbacks, make_ctx())
    assert (callback.seen, callbacks.errors) == (1, [])


class Broken:
    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        raise ValueError(f"no good at {step}")


def test_a_raising_hook_is_reported_once_counted_and_the_others_go_on(
    make_ctx: MakeCtx, log_lines: list[logging.LogRecord]
) -> None:
    notes: list[str] = []
    callbacks = CallbackList([("broken", Broken()), ("b", Recorder("b", notes))])
    for step in (1, 2, 3):
        callbacks.on_step(make_ctx("r0"), step, {})
    callbacks.on_step(make_ctx("r1"), 9, {})
    assert notes == ["b.on_step"] * 4
    assert callbacks.errors == [
        "callback broken.on_step (run r0, 3 times): ValueError: no good at 1",
        "callback broken.on_step (run r1): ValueError: no good at 9",
    ]
    assert callbacks.errors_of("r1") == callbacks.errors[1:]
    assert len(log_lines) == 2


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Cancelled])
def test_a_wish_to_stop_passes_through(make_ctx: MakeCtx, stop: type[BaseException]) -> None:
    class Stopper:
        def on_step(self, *args: Any) -> None:
            raise stop

    with pytest.raises(stop):
        CallbackList([("stopper", Stopper())]).on_step(make_ctx(), 1, {})


def test_a_misspelt_hook_is_pointed_out(log_lines: list[logging.LogRecord]) -> None:
    class Typo:
        def on_setp(self, *args: Any) -> None: ...

    CallbackList([("typo", Typo())])
    assert [r.getMessage() for r in log_lines] == ["callback typo: nothing calls 'on_setp'; closest hook: on_step"]


def test_an_attribute_stops_every_run_and_a_method_one(make_ctx: MakeCtx) -> None:
    class All:
        stop_reason: str | None = None

    class One:
        def stop_reason(self, run_id: str) -> str | None:
            return "enough" if run_id == "r1" else None

    everything = All()
    callbacks = CallbackList([("all", everything), ("one", One())])
    assert (callbacks.stop_reason("r0"), callbacks.stop_reason("r1")) == (None, "one: enough")
    everything.stop_reason = "budget spent"
    assert callbacks.stop_reason("r0") == "all: budget spent"


def test_scores_have_the_names_they_have_in_the_logs() -> None:
    result = EvalResult(
        name="tools", split="val", scores=[Score(metric="pass@1", value=0.5), Score(metric="broken", value=None)]
    )
    assert eval_metrics(result) == {"val/tools/pass@1": 0.5}


def test_early_stopping_waits_for_patience_and_counts_from_the_best(make_ctx: MakeCtx) -> None:
    callback, ctx = EarlyStopping(metric="loss", patience=2, min_delta=0.1), make_ctx()
    reasons = []
    for step, loss in enumerate([1.0, 0.95, 0.5, 0.45, float("nan")], start=1):
        callback.on_step(ctx, step, {"loss": loss})
        reasons.append(callback.stop_reason("r0"))
    assert reasons == [None] * 4 + ["loss did not improve in 2 observations (best 0.5 at step 3)"]


def test_early_stopping_follows_a_validation_score_upwards(make_ctx: MakeCtx) -> None:
    callback, ctx = EarlyStopping(metric="val/tools/pass@1", mode="max", patience=1), make_ctx()
    for step, value in ((5, 0.2), (10, None), (15, 0.4)):
        callback.on_eval(ctx, scored(value, step=step))
        callback.on_step(ctx, step, {"loss": 1.0})
        assert callback.stop_reason("r0") is None
    callback.on_eval(ctx, scored(0.4, step=20))
    assert callback.stop_reason("r0") == "val/tools/pass@1 did not improve in 1 observations (best 0.4 at step 15)"


@pytest.mark.parametrize(("metric", "in_loop", "watched"), [
    ("tokens", ["val/tools/pass@1"], "steps"),
    ("train/tokens", ["val/tools/tokens"], "steps"),
    ("train.tokens", ["val/tools/tokens"], "steps"),
    ("tokens", ["val/tools/tokens"], "scores"),
    ("val/tools/tokens", ["val/tools/tokens"], "scores"),
])  # fmt: skip
def test_early_stopping_watches_a_listed_score_before_the_number_of_a_step(
    make_ctx: MakeCtx, metric: str, in_loop: list[str], watched: str
) -> None:
    callback, ctx = EarlyStopping(metric=metric, patience=1), make_ctx()
    metadata = SimpleNamespace(in_loop_scores=in_loop)
    callback.on_experiment_start(SimpleNamespace(config=SimpleNamespace(metadata=metadata)))
    for step, tokens in ((5, 10.0), (10, 20.0)):  # a step's get worse, a benchmark's better
        callback.on_step(ctx, step, {"tokens": tokens})
        score = Score(metric="tokens", value=-tokens)
        callback.on_eval(ctx, EvalResult(name="tools", split="val", step=step, scores=[score]))
    assert (callback.stop_reason("r0") is not None) == (watched == "steps")


def test_early_stopping_keeps_runs_apart(make_ctx: MakeCtx) -> None:
    callback = EarlyStopping(patience=1)
    for loss in (1.0, 2.0):
        callback.on_step(make_ctx("bad"), 1, {"loss": loss})
        callback.on_step(make_ctx("good"), 1, {"loss": -loss})
    assert callback.stop_reason("bad") and callback.stop_reason("good") is None


def test_early_stopping_refuses_a_test_score() -> None:
    with pytest.raises(ValidationError, match="must not decide when training stops"):
        EarlyStopping(metric="test/final/pass@1")


def test_early_stopping_on_a_metric_that_never_came_says_what_did(make_ctx: MakeCtx) -> None:
    callback, ctx = EarlyStopping(metric="los"), make_ctx()
    callback.on_train_start(ctx, 1)
    callback.on_step(ctx, 1, {"loss": 1.0})
    with pytest.raises(EvsysError, match="'los', which never appeared; seen: loss"):
        callback.on_train_end(ctx, {})


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_csv_grows_columns_and_keeps_old_rows(make_ctx: MakeCtx) -> None:
    callback, ctx = CsvMetrics(), make_ctx()
    callback.on_step(ctx, 1, {"loss": 1.0})
    callback.on_step(ctx, 2, {"loss": 0.5, 'a "b", c': 3.0})
    callback.on_eval(ctx, scored(0.25, step=2))
    CsvMetrics().on_step(ctx, 3, {"loss": 0.25})  # another process goes on with the file
    path = ctx.output_dir / "logs" / "metrics.csv"
    assert read_csv(path) == [
        {"step": "1", "loss": "1.0", 'a "b", c': "", "val/tools/pass@1": ""},
        {"step": "2", "loss": "0.5", 'a "b", c': "3.0", "val/tools/pass@1": ""},
        {"step": "2", "loss": "", 'a "b", c': "", "val/tools/pass@1": "0.25"},
        {"step": "3", "loss": "0.25", 'a "b", c': "", "val/tools/pass@1": ""},
    ]


def test_csv_keeps_runs_apart(make_ctx: MakeCtx) -> None:
    callback = CsvMetrics(file_name="m.csv")
    callback.on_step(make_ctx("r0"), 1, {"loss": 1.0})
    callback.on_step(make_ctx("r1"), 1, {"reward": 2.0})
    assert read_csv(make_ctx("r0").output_dir / "logs" / "m.csv") == [{"step": "1", "loss": "1.0"}]
    assert read_csv(make_ctx("r1").output_dir / "logs" / "m.csv") == [{"step": "1", "reward": "2.0"}]


def test_progress_is_a_line_on_stderr_every_so_many_steps(
    make_ctx: MakeCtx, capsys: pytest.CaptureFixture[str]
) -> None:
    callback, ctx = PrintProgress(every=2), make_ctx()
    callback.on_train_start(ctx, 5)
    for step in range(1, 6):
        callback.on_step(ctx, step, {"loss": 1 / 3, "lr": 1e-5})
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"r0  step {n}/5  loss 0.3333  lr 1e-05" for n in (2, 4, 5)]
    assert captured.out == ""
    ctx.replaying = True
    callback.on_step(ctx, 2, {"loss": 1.0})
    assert capsys.readouterr().err == "", "what an earlier attempt printed is not printed again"
