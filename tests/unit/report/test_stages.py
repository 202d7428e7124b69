from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evsys_sdk.protocols import EvalResult, RunResult, Score
from evsys_sdk.report.conclusion import ArmSummary, Conclusion
from evsys_sdk.report.page import BEFORE, PageFacts, stage_names, stage_rows, stage_tables


def after(stage: str | None, value: float | None, *, step: int | None = None, name: str = "a") -> EvalResult:
    return EvalResult(name=name, split="val", step=step, stage=stage, scores=[Score(metric="pass@1", value=value)])


CHAIN = [after(None, 0.1, step=0), after("one", 0.6), after("two", 0.9), after("three", 0.4)]


def test_forgetting_is_the_best_earlier_score_less_the_last() -> None:
    (row,) = stage_rows([CHAIN])
    assert row.forgetting == pytest.approx(0.5)
    assert row.scores == {BEFORE: 0.1, "one": 0.6, "two": 0.9, "three": 0.4}


def test_transfer_is_what_earlier_stages_gave_before_a_stage_was_trained() -> None:
    (row,) = stage_rows([CHAIN])
    assert row.transfer == {"two": pytest.approx(0.5), "three": pytest.approx(0.8)}


def test_where_lower_is_better_both_are_turned_round() -> None:
    (row,) = stage_rows([CHAIN], lower=lambda metric: metric == "pass@1")
    assert row.forgetting == pytest.approx(-0.2)  # its lowest, 0.6, has become 0.4: nothing was forgotten
    assert row.transfer["two"] == pytest.approx(-0.5)


@pytest.mark.parametrize("metric", ["tokens", "latency", "cost", "eval_loss", "seconds"])
def test_of_what_costs_something_less_is_better(metric: str) -> None:
    chain = [replace(one, scores=[replace(one.scores[0], metric=metric)]) for one in CHAIN]
    (row,) = stage_rows([chain])
    assert row.forgetting == pytest.approx(-0.2) and row.transfer["two"] == pytest.approx(-0.5)


def test_getting_better_to_the_end_is_negative_forgetting() -> None:
    (row,) = stage_rows([[after("one", 0.2), after("two", 0.5)]])
    assert (row.forgetting, row.transfer) == (pytest.approx(-0.3), {})


def test_the_score_of_the_weights_that_a_stage_ended_with_counts() -> None:
    (row,) = stage_rows([[after("one", 0.9, step=5), after("one", 0.3), after("two", 0.3)]])
    assert row.scores["one"] == 0.3


def test_seeds_are_averaged_and_broken_scores_left_out() -> None:
    (row,) = stage_rows([[after("one", 0.2), after("two", 0.4)], [after("one", None), after("two", 0.8)]])
    assert row.scores == {"one": 0.2, "two": pytest.approx(0.6)}


def test_a_run_without_stages_has_no_rows() -> None:
    assert (stage_names([[after(None, 0.5)]]), stage_rows([[after(None, 0.5)]])) == ([], [])


def test_scores_after_a_stage_have_their_unit_on_the_page(tmp_path: Path) -> None:
    latency = Score(metric="latency", value=1.25, unit="s")
    evals = [
        EvalResult(name="val", split="val", stage=stage, scores=[replace(latency, value=value)])
        for stage, value in (("one", 1.25), ("two", 1.5))
    ]
    facts = PageFacts(
        name="chain",
        file_name="chain",
        folder=tmp_path,
        conclusion=Conclusion(text="", best_arm=None, metric=None, arms=[ArmSummary(arm="a", statuses=["completed"])]),
        runs=[RunResult(run_id="chain/a", run_name="a", status="completed", evals=evals)],
        seconds=1.0,
    )
    [table] = stage_tables(facts).values()
    assert table.rows == [["val latency", "1.250 s", "1.500 s", "+0.250 s"]]
