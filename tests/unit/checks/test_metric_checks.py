"""A metric that no run will have is told before anything is trained."""

from __future__ import annotations

import pytest

from evsys_sdk.checks.metrics import metric_problems, with_judged_metrics
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document

VAL = {"name": "tools", "path": "bench", "split": "val", "baseline": True}


def problems(tmp_path, metadata, stop_by=None, **run):
    base = {
        "name": "a",
        "data": {"path": "rows.jsonl"},
        "model": {"name": "m"},
        "algorithm": {"kind": "sft"},
        "backend": {"kind": "mock"},
        **run,
    }
    callbacks = [{"kind": "csv_metrics"}, {"kind": "early_stopping", "params": {"metric": stop_by}}] if stop_by else []
    data = {"name": "e", "run": base, "metadata": metadata, "callbacks": callbacks}
    config = parse_config(Document(label="config", data=data), folder=tmp_path)
    return [(problem.path, problem.message) for problem in metric_problems(config)]


def hypothesis(metric):
    return {"claim": "c", "prediction": {"arm": "a", "vs": "untrained", "metric": metric}}


@pytest.mark.parametrize("name", ["pass@1", "val.pass@1", "val/tools/pass@1", "final_loss", "late/final_loss"])
def test_what_will_exist_is_taken(tmp_path, name):
    assert problems(tmp_path, {"benchmark": [VAL], "success_metric": name, "hypothesis": hypothesis(name)}) == []


@pytest.mark.parametrize("name", ["val.pas@1", "test.pass@1", "val/other/pass@1", "nope"])
def test_what_will_not_is_told_with_its_place(tmp_path, name):
    found = problems(tmp_path, {"benchmark": [VAL], "success_metric": name, "hypothesis": hypothesis(name)})
    assert [path for path, _ in found] == ["metadata.success_metric", "metadata.hypothesis.prediction.metric"]
    assert all(repr(name) in message for _, message in found)


def test_an_experiment_that_scores_nothing_may_name_what_it_likes(tmp_path):
    assert problems(tmp_path, {"success_metric": "pass@1"}) == []


def test_what_an_algorithm_of_the_projects_own_says_is_not_known(tmp_path):
    from evsys_sdk.registry import algorithms

    algorithms.names()

    class Own:
        __module__ = "my_project"

        def train(self, ctx): ...

    algorithms.register("own_for_metric_checks")(Own)
    told = {"benchmark": [VAL], "success_metric": "perplexity"}
    assert problems(tmp_path, told, algorithm={"kind": "own_for_metric_checks"}) == []
    assert problems(tmp_path, told) != []
    assert problems(tmp_path, {}, stop_by="exact_match", algorithm={"kind": "own_for_metric_checks"}) == []
    assert problems(tmp_path, {}, stop_by="exact_match") != []
    del algorithms.entries["own_for_metric_checks"]


def test_an_untrained_model_that_nobody_scores_cannot_be_predicted_about(tmp_path):
    entry = {key: value for key, value in VAL.items() if key != "baseline"}
    [(path, message)] = problems(tmp_path, {"benchmark": [entry], "hypothesis": hypothesis("pass@1")})
    assert path == "metadata.hypothesis.prediction.vs" and "baseline: true" in message


LOOP = {**VAL, "run_every": 5}
OF_002 = [
    {"name": "val", "path": "data/val", "run_every": 50, "metrics": ["pass@1"], "split": "val"},
    {"name": "test", "path": "data/test", "run_every": 200, "metrics": ["pass@1"], "split": "test"},
]


@pytest.mark.parametrize("name", ["pass@1", "val.pass@1", "val/pass@1", "val/val/pass@1"])
def test_the_entries_of_002_are_known_by_the_name_in_the_record(tmp_path, name):
    told = {"benchmark": OF_002, "success_metric": name, "hypothesis": {"claim": "c", "prediction": {"arm": "a"}}}
    assert problems(tmp_path, told, stop_by=name) == []


def test_two_benchmarks_that_a_run_may_be_stopped_by_are_named(tmp_path):
    entries = [{**LOOP, "name": "a"}, {**LOOP, "name": "b"}]
    found = problems(tmp_path, {"benchmark": entries, "success_metric": "pass@1"}, stop_by="pass@1")
    assert [path for path, _ in found] == ["metadata.success_metric", "callbacks[1].params.metric"]
    assert all("ambiguous: it can mean val/a/pass@1, or val/b/pass@1; write" in message for _, message in found)
    assert problems(tmp_path, {"benchmark": entries, "success_metric": "val/*/pass@1"}, stop_by="val/a/pass@1") == []


def test_a_number_of_the_run_that_a_benchmark_can_measure_too_is_ambiguous(tmp_path):
    [(path, message)] = problems(tmp_path, {"benchmark": [{**VAL, "name": "v"}], "success_metric": "tokens"})
    assert path == "metadata.success_metric"
    assert "'tokens' is ambiguous: it can mean train/tokens, or val/v/tokens; write one of them" in message
    for name in ("train/tokens", "train.tokens", "steps"):
        assert problems(tmp_path, {"benchmark": [{**VAL, "name": "v"}], "success_metric": name}) == []
    listed = {**VAL, "name": "v", "metrics": ["pass@1", "tokens"]}
    assert problems(tmp_path, {"benchmark": [listed], "success_metric": "tokens"}) == []


def test_a_name_of_a_split_and_of_a_benchmark_is_ambiguous(tmp_path):
    entries = [{**VAL, "name": "val"}, {**VAL, "name": "hard"}]
    [(path, message)] = problems(tmp_path, {"benchmark": entries, "success_metric": "val.pass@1"})
    assert path == "metadata.success_metric"
    assert "val/pass@1, or val/hard/pass@1; write the whole name" in message


def completed(tmp_path, metadata):
    run = {"name": "a", "data": {"path": "r.jsonl"}, "model": {"name": "m"}, "algorithm": {"kind": "sft"}}
    data = {"name": "e", "run": run, "metadata": metadata}
    config = parse_config(Document(label="config", data=data), folder=tmp_path)
    return [(entry.label, entry.metrics) for entry in with_judged_metrics(config).metadata.benchmark]


def test_the_success_metric_of_004_is_added_to_the_benchmarks_that_it_can_mean(tmp_path):
    of_004 = {"id": "eval_v2", "breakdown_keys": ["toolkit"]}
    val = {"name": "v", "path": "v", "tags": ["val"]}
    assert completed(tmp_path, {"success_metric": "pass_rate", "benchmark": of_004}) == [
        ("eval_v2", ["pass@1", "pass_rate"])
    ]
    named = {"success_metric": "val.pass_rate", "benchmark": [of_004, val]}
    assert completed(tmp_path, named) == [("eval_v2", ["pass@1"]), ("v", ["pass@1", "pass_rate"])]
    one = {"success_metric": "test/eval_v2/pass^3", "benchmark": [of_004, val]}
    assert completed(tmp_path, one) == [("eval_v2", ["pass@1", "pass^3"]), ("v", ["pass@1"])]


@pytest.mark.parametrize("name", ["pass@1", "val.pass@1", "final_loss", "pas_rate", "other.pass_rate", "steps"])
def test_nothing_is_added_for_what_a_benchmark_lists_or_no_metric_is(tmp_path, name):
    val = {"name": "v", "path": "v", "tags": ["val"]}
    assert completed(tmp_path, {"success_metric": name, "benchmark": val}) == [("v", ["pass@1"])]


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "pass@1",
        "val.pass@1",
        "tools.pass@1",
        "val/tools/pass@1",
        "reward/mean",
        "loss:sum",
        "something_of_the_backend",
    ],
)
def test_a_run_may_be_stopped_by_what_a_step_or_a_score_in_training_may_have(tmp_path, name):
    assert problems(tmp_path, {"benchmark": [LOOP]}, stop_by=name) == []


@pytest.mark.parametrize(
    ("entry", "name", "told"),
    [
        (LOOP, "val/tool/pass@1", "closest: val/tools/pass@1"),
        (LOOP, "pass@4", "known: accuracy"),
        (LOOP, "final_loss", "known: accuracy"),
        (VAL, "val/tools/pass@1", "with `split: val` and `run_every`"),
        (VAL, "pass@1", "with `split: val` and `run_every`"),
    ],
)
def test_a_run_cannot_be_stopped_by_what_never_comes_while_it_trains(tmp_path, entry, name, told):
    [(path, message)] = problems(tmp_path, {"benchmark": [entry]}, stop_by=name)
    assert path == "callbacks[1].params.metric" and message.startswith(repr(name)) and told in message


def test_nor_by_a_score_where_nothing_is_scored(tmp_path):
    [(path, _)] = problems(tmp_path, {}, stop_by="val/tools/pass@1")
    assert path == "callbacks[1].params.metric"


@pytest.mark.parametrize(
    ("metric", "at_least", "meant"),
    [
        ("pass@1", 5, "0.05 is 5 points"),
        ("val.pass@1", 1, "0.01 is 1 point"),
        (None, 250, "0.05 is 5 points"),
        ("pass_rate", 20, "0.2 is 20 points"),
        ("pass@1", 0.05, None),
        ("tokens", 5, None),
        ("mean_reward", 5, None),
        ("final_loss", 5, None),
    ],
)
def test_a_difference_that_no_two_shares_have_is_refused_with_what_was_meant(tmp_path, metric, at_least, meant):
    entry = VAL | {"metrics": ["pass@1", "pass_rate", "tokens", "mean_reward"]}
    told = hypothesis(metric)
    told["prediction"]["at_least"] = at_least
    found = problems(tmp_path, {"benchmark": [entry], "success_metric": "val.pass@1", "hypothesis": told})
    assert [path for path, _ in found] == (["metadata.hypothesis.prediction.at_least"] if meant else [])
    assert not meant or found[0][1].endswith(f"lies between 0 and 1, so no difference is larger than 1; {meant}")


@pytest.mark.parametrize(
    "name", ["other.pass@1", "other/pass@1", "tools.pas@1", "tools.mean_reward", "other/exact_match"]
)
def test_a_name_like_that_of_a_score_which_never_comes_stops_no_run(tmp_path, name):
    [(path, message)] = problems(tmp_path, {"benchmark": [LOOP]}, stop_by=name)
    assert path == "callbacks[1].params.metric" and repr(name) in message


@pytest.mark.parametrize("name", ["warmup/tokens", "v1.0/loss", "reward/chosen", "tools.pass@1", "val/tools.pass@1"])
def test_numbers_of_phases_and_scores_by_any_name_stop_a_run(tmp_path, name):
    assert problems(tmp_path, {"benchmark": [LOOP]}, stop_by=name) == []


def test_a_metric_that_a_benchmark_lists_comes_before_the_number_of_a_step(tmp_path):
    entries = [{**LOOP, "name": name, "metrics": ["pass@1", "tokens"]} for name in ("a", "b")]
    [(path, message)] = problems(tmp_path, {"benchmark": entries}, stop_by="tokens")
    assert path == "callbacks[1].params.metric"
    assert "it can mean val/a/tokens, or val/b/tokens, or train/tokens; write one of them" in message
    for name in ("val/a/tokens", "b.tokens", "train/tokens", "train.tokens"):
        assert problems(tmp_path, {"benchmark": entries}, stop_by=name) == []
    assert problems(tmp_path, {"benchmark": entries[:1]}, stop_by="tokens") == []
    assert problems(tmp_path, {"benchmark": [LOOP]}, stop_by="tokens") == [], "no benchmark lists it"
    [(path, message)] = problems(tmp_path, {"benchmark": entries}, stop_by="train/exact_match")
    assert path == "callbacks[1].params.metric", "no step of our own algorithms has it"
    [(path, message)] = problems(tmp_path, {"benchmark": entries, "success_metric": "tokens"})
    assert "it can mean val/a/tokens, or val/b/tokens, or train/tokens; write one of them" in message
