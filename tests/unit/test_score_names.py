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


def test_a_metric_on_several_benchmarks_is_their_mean_and_a_split_never_the_other():
    keys = ["val/a/pass@1", "test/a/pass@1", "val/b/pass@1", "eval/pass@1"]
    assert resolve("pass@1", keys) == resolve("val.pass@1", keys) == ["val/a/pass@1", "val/b/pass@1"]
    assert resolve("a.pass@1", keys) == ["val/a/pass@1"]
    assert resolve("test.pass@1", keys) == ["test/a/pass@1"]
    assert resolve("eval.pass@1", keys) == ["eval/pass@1"]


def test_numbers_of_a_run_are_found_by_their_own_name_and_by_that_of_a_stage():
    assert resolve("final_loss", ["final_loss", "late/final_loss"]) == ["final_loss"]
    assert resolve("final_loss", ["early/final_loss", "late/final_loss"]) == ["early/final_loss", "late/final_loss"]
    assert resolve("accuracy", ["late/accuracy", "val/a/accuracy"]) == ["val/a/accuracy"]
    assert resolve("tokens", ["tokens", "val/a/tokens"]) == ["val/a/tokens"], "who lists a metric means it"
    assert resolve("tokens", ["tokens", "val/a/pass@1"]) == ["tokens"]


def test_a_name_that_can_be_read_in_two_ways_is_refused_with_the_candidates():
    with pytest.raises(AmbiguousName, match=r"'val.pass@1' is ambiguous: .*val/pass@1.* the mean of .*val/hard/pass@1"):
        resolve("val.pass@1", [OWN, "val/hard/pass@1"])
    assert resolve(OWN, [OWN, "val/hard/pass@1"]) == [OWN]
    assert resolve("pass@1", [OWN, "val/hard/pass@1"]) == [OWN, "val/hard/pass@1"]
    with pytest.raises(AmbiguousName, match="test/val/pass@1, or val/b/pass@1"):
        resolve("val.pass@1", ["test/val/pass@1", "val/b/pass@1"])


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
