"""Whether more or less of a metric is better is the metric's own, wherever something is ranked, stopped or chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from evsys_sdk import registry
from evsys_sdk.algorithms.base import BaseAlgorithm
from evsys_sdk.checks.metrics import direction_warnings
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.metadata import Hypothesis, Metadata, SuccessMetric
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.experiment.verdict import judge_experiment
from evsys_sdk.history.digest import digest_of
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.callbacks import EarlyStopping
from evsys_sdk.stats.hypothesis import fingerprint


@pytest.mark.parametrize(
    ("name", "better"),
    [("final_loss", "min"), ("late/final_loss", "min"), ("val.pass@1", "max"), ("val/tools/pass^3", "max"),
     ("val.tools.cost", "min"), ("eval/latency", "min"), ("reward/mean", "max"), ("error_rate", "min"),
     ("pass_rate", "max"), ("errors_per_hour", "min"), ("tokens_per_second", "max"), ("val/errors/exact_match", "max"),
     ("latency_p95", "min"), ("grad_norm", "min"), ("mine", "max"), ("val.bench.one_of_ours", "min")],
)  # fmt: skip
def test_a_name_with_split_and_benchmark_has_the_direction_of_its_metric(name, better, monkeypatch):
    class Ours:
        lower_is_better = True

        def compute(self, task_rewards): ...

    entry = registry.Registration(name="one_of_ours", target=Ours, origin="x")
    monkeypatch.setitem(registry.metrics.entries, "one_of_ours", entry)
    assert registry.better_direction(name) == better
    assert registry.better_direction(name, "min") == "min" and registry.better_direction(name, "max") == "max"
    assert SuccessMetric(name=name).direction == better


def test_what_neither_class_nor_name_tells_is_not_known():
    assert registry.own_direction("mine") is None and registry.own_direction("") is None


@pytest.mark.parametrize(("metric", "values"), [("pass@1", [0.1, 0.5, 0.9]), ("cost", [0.9, 0.5, 0.1])])
def test_early_stopping_does_not_stop_what_gets_better(metric, values):
    callback, ctx = EarlyStopping(metric=metric, patience=1), SimpleNamespace(run_id="r0", replaying=False)
    for step, value in enumerate(values, start=1):
        callback.on_step(ctx, step, {metric: value})
        assert callback.stop_reason("r0") is None
    callback.on_step(ctx, 4, {metric: values[0]})
    assert callback.stop_reason("r0") is not None


@pytest.mark.parametrize(("name", "better"), [("val/tools/cost", "min"), ("pass@1", "max"), (None, "max")])
def test_best_by_chooses_by_the_metrics_own_direction(name, better):
    class Nothing(BaseAlgorithm):
        async def build_batch(self, step): ...

    ctx = SimpleNamespace(max_steps=None)
    assert Nothing(best_by=name, max_steps=3)._plan(ctx).best_mode == better
    assert Nothing(best_by=name, best_mode="max", max_steps=3)._plan(ctx).best_mode == "max"


def test_the_lower_loss_is_the_best_arm_and_a_prediction_without_direction_means_the_better_one():
    arms = {"base": _losses(2.0), "low": _losses(0.5)}
    hypothesis = {"claim": "c", "prediction": {"arm": "low", "vs": "base"}}
    found = judge_experiment(arms, Metadata(success_metric="final_loss", hypothesis=hypothesis))
    assert found.as_dict()["verdict"]["mode"] == "min" and found.best_arm == "low"
    result = found.as_dict()["hypothesis_result"]
    assert (
        result["direction"] == "lower"
        and result["outcome"] != "refuted"
        and result["difference"] == pytest.approx(-1.5)
    )


def _losses(loss):
    runs = [(seed, {"final_loss": loss + seed / 100}) for seed in (1, 2, 3)]
    return [RunResult(run_id=f"x/{seed}", status="completed", metrics=metrics, seed=seed) for seed, metrics in runs]


def test_a_record_without_a_mode_is_read_with_the_direction_of_its_verdict_or_metric():
    record = {"experiment": "e", "config": {"metadata": {"success_metric": {"name": "final_loss"}}}}
    assert digest_of(record).mode == "min"
    assert digest_of(record | {"verdict": {"mode": "max"}}).mode == "max"
    assert digest_of({"experiment": "e", "config": {"metadata": {"success_metric": "val.pass@1"}}}).mode == "max"


def test_a_direction_that_was_the_default_before_leaves_the_fingerprint_as_it_was():
    plain = Hypothesis(claim="c", prediction={"arm": "a"})
    assert fingerprint(plain) == fingerprint(Hypothesis(claim="c", prediction={"arm": "a", "direction": "higher"}))
    assert fingerprint(plain) != fingerprint(Hypothesis(claim="c", prediction={"arm": "a", "direction": "lower"}))


def _warnings(tmp_path, *, success="max", stop="max", best="min", objective="min"):
    run = {
        "name": "a", "data": {"path": "rows.jsonl"}, "model": {"name": "m"}, "backend": {"kind": "mock"},
        "algorithm": {"kind": "sft", "params": {"best_by": "val.pass@1", "best_mode": best}},
    }  # fmt: skip
    data = {
        "name": "e",
        "base_run": run,
        "search": {"kind": "grid", "objective": {"name": "pass@1", "mode": objective},
                   "space": {"algorithm.params.lora_rank": [1, 2]}},
        "callbacks": [{"kind": "early_stopping", "params": {"mode": stop}}],
        "metadata": {"success_metric": {"name": "final_loss", "mode": success}},
    }  # fmt: skip
    config = parse_config(Document(label="config", data=data), folder=tmp_path)
    return {problem.path: problem.message for problem in direction_warnings(config)}


def test_a_mode_that_contradicts_its_metric_is_a_warning_with_its_place(tmp_path):
    found = _warnings(tmp_path)
    assert sorted(found) == [
        "base_run.algorithm.params.best_mode", "callbacks[0].params.mode", "metadata.success_metric.mode",
        "search.objective.mode",
    ]  # fmt: skip
    assert "less of final_loss is better" in found["metadata.success_metric.mode"]
    assert "more of val.pass@1 is better" in found["base_run.algorithm.params.best_mode"]
    assert _warnings(tmp_path, success="min", stop="min", best="max", objective="max") == {}
