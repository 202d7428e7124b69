"""A score's key is made in one place, and every name that a user may write for it is resolved in one place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evsys_sdk.score_names import (
    AmbiguousName,
    ScoreName,
    metric_named,
    parse_key,
    readings_of,
    resolve,
    resolve_one,
    score_key,
    step_metric,
)

TOOLS, OWN, TEST = "val/tools/pass@1", "val/pass@1", "test/final/pass@1"


@pytest.mark.parametrize(
    "name",
    ["pass@1", "val.pass@1", "val/pass@1", "tools.pass@1", "tools/pass@1", "val.tools.pass@1", "val/tools/pass@1"],
)
def test_every_form_of_a_name_means_the_score(name):
    assert resolve(name, [TOOLS, "val/tools/pass@3", TEST, "final_loss"]) == [TOOLS]


@pytest.mark.parametrize("name", ["pass@1", "val.pass@1", "val/pass@1", "val/val/pass@1", "val.val.pass@1"])
def test_the_benchmark_of_002_that_is_called_like_its_split(name):
    assert score_key("val", "val", "pass@1") == OWN and score_key("test", "test", "pass@1") == "test/pass@1"
    assert resolve(name, [OWN, "test/pass@1"]) == [OWN]


@pytest.mark.parametrize("name", ["pas@1", "test.pass@1", "val.other.pass@1", "ols.pass@1", "pass", "", "."])
def test_a_name_that_means_no_score_resolves_to_none(name):
    assert resolve(name, [TOOLS, "val/tools/pass@3", "final_loss"]) == []


def test_a_metric_on_several_benchmarks_is_ambiguous_unless_their_mean_is_asked_for():
    keys = ["val/a/pass@1", "test/a/pass@1", "val/b/pass@1", "eval/pass@1"]
    for name in ("pass@1", "val.pass@1", "val/pass@1"):
        with pytest.raises(
            AmbiguousName, match=r"it can mean val/a/pass@1, or val/b/pass@1; .* or val/\*/pass@1 for the"
        ):
            resolve(name, keys)
    assert resolve("val/*/pass@1", keys) == resolve("val.*.pass@1", keys) == ["val/a/pass@1", "val/b/pass@1"]
    assert resolve("test/*/pass@1", keys) == ["test/a/pass@1"] and resolve("val/*/pass@3", keys) == []
    assert resolve("b.pass@1", keys) == ["val/b/pass@1"]
    assert resolve("test.pass@1", keys) == ["test/a/pass@1"]
    assert resolve("eval.pass@1", keys) == ["eval/pass@1"]


def test_numbers_of_a_run_are_found_by_their_own_name_and_by_that_of_a_stage():
    assert resolve("final_loss", ["final_loss", "late/final_loss"]) == ["final_loss"]
    assert resolve("final_loss", ["early/final_loss", "late/final_loss"]) == ["early/final_loss", "late/final_loss"]
    assert resolve("accuracy", ["late/accuracy", "val/a/accuracy"]) == ["val/a/accuracy"]
    assert resolve("tokens", ["tokens", "val/a/tokens"]) == ["val/a/tokens"], "who lists a metric means it"
    assert resolve("tokens", ["tokens", "val/a/pass@1"]) == ["tokens"]
    for name in ("train/tokens", "train.tokens"):
        assert resolve(name, ["tokens", "val/a/tokens"]) == ["tokens"]


def test_a_name_that_can_be_read_in_two_ways_is_refused_with_the_candidates():
    for name in ("val.pass@1", "pass@1"):
        with pytest.raises(AmbiguousName, match="it can mean val/pass@1, or val/hard/pass@1; write the whole name"):
            resolve(name, [OWN, "val/hard/pass@1"])
    assert resolve(OWN, [OWN, "val/hard/pass@1"]) == [OWN]
    assert resolve("val/*/pass@1", [OWN, "val/hard/pass@1"]) == [OWN, "val/hard/pass@1"]
    with pytest.raises(
        AmbiguousName, match=r"(test/val/pass@1|val/b/pass@1), or (test/val/pass@1|val/b/pass@1); write"
    ):
        resolve("val.pass@1", ["test/val/pass@1", "val/b/pass@1"])


@pytest.mark.parametrize("name", ["a.pass@1", "a/pass@1"])
def test_a_benchmark_of_two_splits_is_ambiguous_without_the_split(name):
    keys = ["val/a/pass@1", "test/a/pass@1", "val/b/pass@1"]
    with pytest.raises(AmbiguousName, match=r"it can mean val/a/pass@1, or test/a/pass@1; write the whole name of one"):
        resolve(name, keys)
    assert resolve("pass@1", keys[:2]) == resolve("val.a.pass@1", keys) == ["val/a/pass@1"]


@pytest.mark.parametrize("name", ["pass@1", "val.pass@1", "val/*/pass@1", "val.*.pass@1"])
def test_where_a_mean_cannot_be_used_none_is_offered(name):
    with pytest.raises(AmbiguousName) as caught:
        resolve_one(name, ["val/a/pass@1", "val/b/pass@1"])
    assert str(caught.value) == (
        f"{name!r} is ambiguous: it can mean val/a/pass@1, or val/b/pass@1; write the whole name of one score"
    )


def test_what_a_single_curve_decides_is_not_a_mean():
    assert resolve_one("pass@1", [TOOLS]) == TOOLS
    assert resolve_one("nope", [TOOLS]) is None
    with pytest.raises(AmbiguousName, match=r"it can mean val/a/pass@1, or val/b/pass@1; write the whole name"):
        resolve_one("pass@1", ["val/a/pass@1", "val/b/pass@1"])


def test_the_metric_in_a_name_that_no_benchmark_lists_yet():
    assert metric_named("pass_rate", split="test", benchmark="eval_v2") == ["pass_rate"]
    assert "pass_rate" in metric_named("eval_v2.pass_rate", split="test", benchmark="eval_v2")
    assert "pass_rate" in metric_named("test/eval_v2/pass_rate", split="test", benchmark="eval_v2")
    assert "pass_rate" not in metric_named("val.pass_rate", split="test", benchmark="eval_v2")


splits = st.sampled_from(["val", "test", "eval"])
benchmarks = st.text("ab/._@-1 ", min_size=1, max_size=6) | st.sampled_from(["val", "test", "tools", "v1.2", "val.a"])
metrics = st.text("abp@^_.1", min_size=1, max_size=5) | st.sampled_from(["pass@1", "pass^3", "cost_per_task"])
names = st.builds(ScoreName, split=splits, benchmark=benchmarks, metric=metrics)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(names)
def test_a_key_that_was_made_is_read_back(name):
    assert parse_key(name.key) == name


@settings(derandomize=True, max_examples=400, deadline=None)
@given(names, st.sampled_from("./"), st.sampled_from("./"))
def test_every_form_of_any_score_alone_resolves_to_its_key(name, first, second):
    forms = [
        name.key,
        name.metric,
        f"{name.split}{first}{name.metric}",
        f"{name.benchmark}{first}{name.metric}",
        f"{name.split}{first}{name.benchmark}{second}{name.metric}",
    ]
    assert [resolve(form, [name.key, "final_loss"]) for form in forms] == [[name.key]] * len(forms)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.lists(names, max_size=5), names)
def test_among_any_others_a_whole_key_means_itself_and_a_name_only_what_it_can_mean(others, name):
    keys = [one.key for one in [*others, name]]
    assert resolve(name.key, keys) == [name.key]
    for written in (name.metric, f"{name.split}.{name.metric}", f"{name.benchmark}.{name.metric}"):
        try:
            found = resolve(written, keys)
        except AmbiguousName as exc:
            found = exc.keys
        assert found and set(found) <= set(keys)
        assert all(readings_of(written, key) for key in found)


def test_an_ambiguous_name_lists_the_number_of_the_run_too():
    with pytest.raises(AmbiguousName) as caught:
        resolve("tokens", ["tokens", "val/a/tokens", "val/b/tokens"])
    assert caught.value.keys == ["val/a/tokens", "val/b/tokens", "train/tokens"]
    for key in caught.value.keys:
        assert resolve(key, ["tokens", "val/a/tokens", "val/b/tokens"]) == [key.removeprefix("train/")]


@pytest.mark.parametrize("name", ["train/tokens", "train.tokens", "tokens"])
def test_a_number_of_a_step_is_called_with_or_without_train(name):
    assert step_metric(name) == "tokens"
    assert step_metric("training/tokens") == "training/tokens"
