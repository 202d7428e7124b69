from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.files import write_json
from evsys_sdk.protocols import EvalResult, RunResult, Score
from evsys_sdk.record.journal import Journal
from evsys_sdk.report import figures
from evsys_sdk.report.conclusion import ArmSummary, Conclusion, VerdictFindings
from evsys_sdk.report.page import PageFacts, page_text, write_page
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms
from evsys_sdk.stats.verdict import Mode, Verdict

METRIC = "val/tools/pass@1"


def run(name: str, value: float | None = None, *, status: Any = "completed", **fields: Any) -> RunResult:
    metrics = {} if value is None else {METRIC: value}
    return RunResult(run_id=f"exp/{name}", status=status, metrics=metrics, **fields)


def evaluated(value: float, step: int | None = None, **fields: Any) -> EvalResult:
    return EvalResult(name="tools", split="val", step=step, scores=[Score(metric="pass@1", value=value)], **fields)


def judged(**means: float) -> Verdict:
    tasks = range(40)
    arms = [
        ArmScores(arm=arm, seeds={s: {f"t{t}": float(t < mean * 40) for t in tasks} for s in (1, 2)}, failed={})
        for arm, mean in means.items()
    ]
    return judge_arms(arms, metric="val.pass@1", mode="max", baseline_arm=None, untrained=None, also=[])


def facts(folder: Path, **fields: Any) -> PageFacts:
    arms = [
        ArmSummary(arm="base", statuses=["completed"] * 2, scores=[0.2, 0.2]),
        ArmSummary(arm="new|er", statuses=["completed", "failed"], scores=[0.9], errors=["out of\nmemory"]),
    ]
    runs = [
        run("base__s1", 0.2, seed=1),
        run("base__s2", 0.2, seed=2),
        run("new__s1", 0.9, seed=1),
        run("new__s2", status="failed", error="out of\nmemory", seed=2),
    ]
    text = "Hypothesis: it helps\na lot\nBest arm by val.pass@1: new|er.\nModels:\n  gpt: 0.5"
    verdict = judged(**{"base": 0.2, "new|er": 0.9})
    verdict.arms[1] = replace(verdict.arms[1], n_seeds=1)
    conclusion = Conclusion(
        arms=arms,
        best_arm="new|er",
        text=text,
        metric="val.pass@1",
        findings=VerdictFindings(best_arm="new|er", verdict=verdict),
    )
    given = {"conclusion": conclusion, "runs": runs, "seconds": 12.345, "hypothesis": "it helps\na lot", **fields}
    return PageFacts(name="my exp", file_name="my-exp", folder=folder, **given)


def concluded(folder: Path, **findings: Any) -> Conclusion:
    """The conclusion of `facts` with other findings."""
    found = facts(folder).conclusion
    return replace(found, findings=replace(found.findings, **findings))


def page(folder: Path, drawn: figures.Drawn | None = None, **fields: Any) -> list[str]:
    return page_text(facts(folder, **fields), drawn or figures.Drawn()).splitlines()


def test_the_page_tells_it_in_order(tmp_path: Path) -> None:
    lines = page(tmp_path, figures.Drawn(files={"Curves": "my-exp.curves.png"}), description="What it is.")
    assert [line for line in lines if line.startswith("#")] == [
        "# my exp",
        "## Hypothesis",
        "## Verdict",
        "## Arms",
        "## Failed and unscored",
        "## What was chosen on what",
        "## Cost and time",
        "## Figures",
        "## Where the records lie",
    ]
    assert lines[2] == "What it is." and "2 arms, 4 runs: 3 completed, 1 failed." in lines
    assert "![Curves](my-exp.curves.png)" in lines


def test_the_verdict_is_the_conclusion_line_by_line_without_the_hypothesis(tmp_path: Path) -> None:
    lines = page(tmp_path)
    start = lines.index("## Verdict")
    assert lines[start + 2 : start + 5] == ["- Best arm by val.pass@1: new|er.", "- Models:", "  - gpt: 0.5"]


def test_an_arm_is_a_row_with_status_seeds_score_and_interval(tmp_path: Path) -> None:
    rows = [line for line in page(tmp_path) if line.startswith("| ")]
    base = next(row for row in rows if row.startswith("| base"))
    newer = next(row for row in rows if "new" in row)
    assert base.startswith("| base | completed | 2 | 0.200 [0.") and base.endswith("| 40 | the baseline |")
    # A bar in a name is no new column, and the best arm stands out.
    assert (
        newer.startswith("| **new\\|er** | 1 of 2 completed | 1 of 2 | 0.900 [")
        and "| better, +70.0 points [+" in newer
    )


def test_a_failed_seed_and_a_broken_evaluation_have_their_reasons(tmp_path: Path) -> None:
    broken = EvalResult(name="big", split="test", scores=[], error="no such file")
    runs = [*facts(tmp_path).runs[:2], run("new__s1", 0.9, seed=1, evals=[broken]), facts(tmp_path).runs[3]]
    lines = page(tmp_path, runs=runs)
    assert "- new|er, seed 2: failed (out of memory)" in lines
    assert "- new|er, seed 1: test/big was not scored (no such file)" in lines


def test_seeds_with_the_same_reason_share_a_line_and_a_pruned_arm_says_when_and_why(tmp_path: Path) -> None:
    arms = [
        ArmSummary(arm="a", statuses=["failed", "failed"], why_unranked="no run completed"),
        ArmSummary(arm="b", statuses=["pruned"], why_unranked="pruned at step 10 with val.pass@1 0.412"),
        ArmSummary(arm="c", statuses=["completed"], why_unranked="no score for val.pass@1"),
    ]
    runs = [
        *(run(f"a__s{seed}", status="failed", error="boom", seed=seed) for seed in (1, 2)),
        run("b", status="pruned", seed=1), run("c", seed=1),
    ]  # fmt: skip
    lines = page(tmp_path, runs=runs, conclusion=Conclusion(arms=arms, best_arm=None, text="", metric="val.pass@1"))
    start = lines.index("## Failed and unscored")
    assert lines[start + 2 : start + 5] == [
        "- a, seeds 1, 2: failed (boom)",
        "- b: pruned at step 10 with val.pass@1 0.412",
        "- c: no score for val.pass@1",
    ]
    assert "| b | pruned | 1 | not ranked | - |" in lines


def test_one_arm_is_no_baseline_and_nothing_was_chosen(tmp_path: Path) -> None:
    arms = [ArmSummary(arm="only", statuses=["completed"] * 2, scores=[0.5, 0.5])]
    findings = VerdictFindings(verdict=judged(only=0.5))
    conclusion = Conclusion(arms=arms, best_arm="only", text="only: 0.500", metric="val.pass@1", findings=findings)
    text = "\n".join(page(tmp_path, runs=[run("s1", 0.5), run("s2", 0.5)], conclusion=conclusion))
    assert "baseline" not in text and "Nothing was chosen: there is one arm, measured by val/tools/pass@1." in text


def test_a_search_without_a_baseline_is_compared_with_the_untrained_model(tmp_path: Path) -> None:
    values = {f"t{t}": float(t < 20) for t in range(40)}
    arms = [ArmScores(arm=arm, seeds={1: values}) for arm in ("base", "new|er")]
    verdict = judge_arms(arms, metric="val.pass@1", untrained=dict.fromkeys(values, 0.0), searched=True)
    found = facts(tmp_path).conclusion
    conclusion = Conclusion(
        arms=found.arms,
        best_arm="base",
        text="",
        metric="val.pass@1",
        findings=VerdictFindings(verdict=verdict),
    )
    text = "\n".join(page(tmp_path, conclusion=conclusion))
    assert "| tasks | against the untrained model |" in text and "the baseline" not in text
    assert "| better, +50.0 points [+" in text


def test_a_choice_on_validation_says_that_test_scores_took_no_part(tmp_path: Path) -> None:
    runs = facts(tmp_path).runs
    runs[0].metrics["test/tools/pass@1"] = 0.1
    text = "\n".join(page(tmp_path, runs=runs))
    assert "Arms are compared by val/tools/pass@1. The test scores (test/tools/pass@1) took no part in it." in text
    assert "The highest of 2 scored arms, new|er, scored 0.900; 0." in text
    assert "is expected on new tasks (corrected for selection)." in text


def test_a_best_arm_that_is_not_on_top_is_not_called_the_top(tmp_path: Path) -> None:
    verdict = judged(**{"base": 0.2, "new|er": 0.9})
    assert verdict.winner is not None
    conclusion = concluded(tmp_path, verdict=replace(verdict, winner=replace(verdict.winner, above=["wild"])))
    assert "The best arm, new|er, scored 0.900" in "\n".join(page(tmp_path, conclusion=conclusion))


def test_what_was_admitted_stands_on_the_page_instead(tmp_path: Path) -> None:
    found = facts(tmp_path)
    found.runs[0].metrics["test/tools/pass@1"] = 0.1
    for metric in ("val.pass@1", "val.pass@9", None):
        conclusion = replace(found.conclusion, metric=metric, admitted=["Trials were chosen by test scores."])
        text = "\n".join(page(tmp_path, runs=found.runs, conclusion=conclusion))
        assert "took no part" not in text and "Nothing was chosen" not in text
        assert "\n\nTrials were chosen by test scores.\n" in text


def test_a_test_benchmark_says_what_a_choice_by_it_would_have_to_admit(tmp_path: Path) -> None:
    runs = facts(tmp_path).runs
    for result in runs:
        result.metrics = {key.replace("val/", "test/"): value for key, value in result.metrics.items()}
    found = facts(tmp_path)
    conclusion = Conclusion(arms=found.conclusion.arms, best_arm=None, text="", metric="test.pass@1")
    text = "\n".join(page(tmp_path, runs=runs, conclusion=conclusion))
    assert "it selects nothing. A choice by it would have to admit that the test set was looked at 2 times" in text


def test_where_it_may_select_the_page_does_not_say_that_it_selects_nothing(tmp_path: Path) -> None:
    found = facts(tmp_path)
    for result in found.runs:
        result.metrics = {key.replace("val/", "test/"): value for key, value in result.metrics.items()}
    conclusion = replace(found.conclusion, best_arm=None, metric="test.pass@1")
    text = "\n".join(page(tmp_path, runs=found.runs, conclusion=conclusion))
    assert "selects nothing" not in text and "That is a test benchmark (`allow_test_selection`)" in text


def test_a_chain_has_its_matrix_with_forgetting_and_transfer(tmp_path: Path) -> None:
    chain = [evaluated(0.1, 0), evaluated(0.8, stage="one"), evaluated(0.5, stage="two")]
    conclusion = Conclusion(arms=[ArmSummary(arm="chain", statuses=["completed"])], best_arm=None, text="")
    lines = page(tmp_path, runs=[run("chain", evals=chain)], conclusion=conclusion)
    assert "| benchmark | untrained | after one | after two | forgetting | transfer before two |" in lines
    assert "| val/tools pass@1 | 0.100 | 0.800 | 0.500 | +0.300 | +0.700 |" in lines


@pytest.mark.parametrize("mode", ["max", "min"])
def test_in_the_matrix_positive_transfer_is_good_whatever_the_metric(tmp_path: Path, mode: Mode) -> None:
    def after(stage: str | None, passed: float, tokens: float) -> EvalResult:
        scores = [Score(metric="pass@1", value=passed), Score(metric="tokens", value=tokens)]
        return EvalResult(name="tools", split="val", step=None if stage else 0, stage=stage, scores=scores)

    chain = [after(None, 0.1, 90.0), after("one", 0.8, 50.0), after("two", 0.5, 60.0)]
    arms = [ArmSummary(arm="chain", statuses=["completed"])]
    findings = VerdictFindings(verdict=replace(judged(chain=0.5), mode=mode))
    conclusion = Conclusion(arms=arms, best_arm=None, text="", metric="val.pass@1", findings=findings)
    lines = page(tmp_path, runs=[run("chain", evals=chain)], conclusion=conclusion)
    assert "| val/tools tokens | 90.000 | 50.000 | 60.000 | +10.000 | +40.000 |" in lines
    turned = "-0.300 | -0.700" if mode == "min" else "+0.300 | +0.700"
    assert f"| val/tools pass@1 | 0.100 | 0.800 | 0.500 | {turned} |" in lines, "the config has the last word"


def test_cost_counts_each_step_once_and_no_run_that_was_taken_over(tmp_path: Path) -> None:
    taken = tmp_path / "new__s1"
    write_json(taken / "run_result.json", {"seconds": 5.0, "reused_from": "/elsewhere"})
    with closing(Journal(tmp_path / "my-exp.journal.sqlite")) as journal:
        for name in ("base__s1", "new__s1"):
            line = journal.begin(f"exp/{name}", "f")
            for step in (1, 2, 3):
                line.add("step", {"metrics": {"loss": float("nan"), "tokens": 10}}, at=step)
            line.supersede(after=2)
            line.add("step", {"metrics": {"loss": 1.0, "tokens": 10}}, at=3)
            line.add("rollout", {"cost_usd": 0.25, "metadata": {"unpriced": name == "base__s1"}}, at=3, key="t")
    runs = facts(tmp_path).runs
    runs[2].run_dir = taken
    lines = page(tmp_path, runs=runs)
    assert "| training steps | 3 |" in lines and "| training tokens | 30 |" in lines
    assert "| money for rollouts | 0.2500 USD, the price of 1 rollouts is not known |" in lines
    assert "| time, start to end | 12.3 s |" in lines
    assert "Not counted: 1 run taken over from other experiments." in lines


def test_without_matplotlib_a_line_says_how_to_get_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    path = write_page(facts(tmp_path))
    assert path == tmp_path / "my-exp.experiment.md"
    assert figures.HOW_TO_GET in path.read_text() and "evsys-sdk[plot]" in figures.HOW_TO_GET
    assert [found.name for found in tmp_path.iterdir()] == ["my-exp.experiment.md"]


def test_a_figure_that_fails_is_a_line_and_the_page_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # installed, and broken
    path = write_page(facts(tmp_path))
    assert path is not None and "No figures: drawing failed (" in path.read_text()


def test_a_page_that_cannot_be_written_is_a_warning_and_no_error(tmp_path: Path, log_lines: list[Any]) -> None:
    (tmp_path / "my-exp.experiment.md").mkdir()
    assert write_page(facts(tmp_path)) is None
    assert "the record is whole" in log_lines[-1].getMessage()


def test_the_page_names_what_the_experiment_was_made_of(tmp_path: Path) -> None:
    lines = page(tmp_path, setup={"model": "tiny", "data": "train.jsonl (dedupe)", "params": "lr=0.1 / 0.2"})
    start = lines.index("## Setup")
    assert lines[start + 4 : start + 7] == [
        "| model | tiny |",
        "| data | train.jsonl (dedupe) |",
        "| params | lr=0.1 / 0.2 |",
    ]


def test_the_page_shows_test_and_untrained_scores_with_their_errors(tmp_path: Path) -> None:
    def scored(value: float | None, split: str, step: int | None = None, errors: int = 0) -> EvalResult:
        low, high = (None, None) if value is None else (value - 0.1, value + 0.1)
        score = Score(
            metric="pass@1", value=value, low=low, high=high, n_tasks=20, n_rollouts=20, n_errors=errors
        )  # fmt: skip
        return EvalResult(name="tools", split=split, step=step, scores=[score])

    first = [scored(0.1, "val", 0), scored(0.5, "val", 5), scored(0.2, "val"), scored(0.3, "test")]
    runs = [
        run("base__s1", 0.2, seed=1, evals=first),
        run("base__s2", 0.2, seed=2, evals=[scored(0.4, "val", errors=3), scored(None, "test")]),
        run("new__s1", 0.9, seed=1, evals=[scored(0.9, "val")]),
        run("new__s2", status="failed", seed=2, evals=[scored(0.7, "val", 5)]),
    ]
    lines = page(tmp_path, runs=runs)
    start = lines.index("## Scores")
    assert lines[start + 2 : start + 7] == [
        "|  | val/tools/pass@1 | test/tools/pass@1 |",
        "| --- | --- | --- |",
        "| untrained | 0.100 [0.000, 0.200] | - |",
        "| base | 0.300 [0.200, 0.400], 3 of 40 rollouts errored | 0.300 |",  # a seed has no test score
        "| new\\|er | 0.900 [0.767, 0.961] | - |",
    ]


def test_errors_stand_beside_the_score_and_many_of_them_before_it(tmp_path: Path) -> None:
    verdict = judged(**{"base": 0.2, "new|er": 0.9})
    base, newer = verdict.arms
    arms = [replace(base, n_rollouts=80, n_errors=2), replace(newer, n_seeds=1, n_rollouts=60, n_errors=20)]
    conclusion = concluded(tmp_path, verdict=replace(verdict, arms=arms))
    text = "\n".join(page(tmp_path, conclusion=conclusion))
    assert "| base | completed | 2 | 0.200 [" in text and "], 2 of 80 rollouts errored | 40 |" in text
    assert "| 1 of 2 | 20 of 60 rollouts errored; 0.900 [" in text


def test_a_hypothesis_in_words_is_answered_with_the_numbers(tmp_path: Path) -> None:
    conclusion = concluded(tmp_path, hypothesis_in_words="It is in words; measured: 3 points.")
    lines = page(tmp_path, conclusion=conclusion)
    start = lines.index("## Hypothesis")
    assert lines[start + 2 : start + 6] == ["it helps", "a lot", "", "It is in words; measured: 3 points."]


def test_arms_that_score_the_same_everywhere_have_no_highest(tmp_path: Path) -> None:
    conclusion = concluded(tmp_path, verdict=judged(**{"base": 0.0, "new|er": 0.0}))
    text = "\n".join(page(tmp_path, conclusion=conclusion))
    assert "The highest of" not in text and "| 40 | the same on every task |" in text


def test_arms_with_the_same_values_on_every_task_have_no_difference_of_0(tmp_path: Path) -> None:
    """The verdict said `the same as base on every task`, and the page `undecided, +0.0`."""
    arms = [ArmScores(arm=name, seeds={0: {"t0": 3.0, "t1": 5.0, "t2": 8.0}}) for name in ("base", "new|er")]
    conclusion = concluded(tmp_path, verdict=judge_arms(arms, metric="tokens", share=False))
    text = "\n".join(page(tmp_path, conclusion=conclusion))
    assert "| 3 | the same on every task |" in text and "+0.0" not in text
