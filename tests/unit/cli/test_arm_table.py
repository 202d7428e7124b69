"""The table of arms at the end of a sweep."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evsys_sdk.cli.progress import fitting_names
from evsys_sdk.cli.summary import arm_rows, print_summary
from evsys_sdk.protocols import RunResult
from evsys_sdk.report.conclusion import ArmSummary, Conclusion, VerdictFindings
from evsys_sdk.stats.verdict import ArmVerdict, Comparison, Mode, Verdict, Word


def arm(
    name: str, mean: float | None, *, difference: float | None = None, verdict: Word | None = None, **facts: Any
) -> ArmVerdict:
    vs = None
    if difference is not None and verdict is not None:
        vs = Comparison(arm=name, vs="lr_1e-4", verdict=verdict, difference=difference)
    around = {} if mean is None else {"low": mean - 0.1, "high": mean + 0.05}
    counts = {"n_seeds": 0 if mean is None else 2, "n_rollouts": 60}
    return ArmVerdict(arm=name, mean=mean, vs_baseline=vs, verdict=verdict, **{**around, **counts, **facts})


def ended(arms: list[ArmVerdict], *, best: str | None, share: bool = True, mode: Mode = "max", text: str = "") -> Any:
    verdict = Verdict(
        metric="val/tools/pass@1", mode=mode, baseline_arm="lr_1e-4", alpha=0.05, margin=0.02, arms=arms, best_arm=best,
        why_no_best=None, winner=None, share=share,
    )  # fmt: skip
    summaries = [
        ArmSummary(arm=one.arm, statuses=["completed"] * 2 if one.mean is not None else ["failed"] * 2) for one in arms
    ]
    findings = VerdictFindings(best_arm=best, verdict=verdict)
    conclusion = Conclusion(arms=summaries, best_arm=best, metric="pass@1", text=text, findings=findings)
    runs = [
        RunResult(run_id=one.arm, status="completed", run_name=one.arm, warnings=["slow disk"])
        for one in arms
        if one.mean is not None
    ]
    return SimpleNamespace(name="sweep", conclusion=conclusion, runs=runs, output_dir=Path("out"), seconds=1.0)


ARMS = [
    arm("lr_1e-4", 0.667),
    arm("lr_3e-4", 0.9, difference=0.233, verdict="better"),
    arm("lr_9e-4", 0.5, difference=-0.167, verdict="undecided", n_seeds=1, n_errors=20),
    arm("lr_bad", None),
]


def test_arms_that_scored_the_same_on_every_task_are_the_same_and_not_undecided():
    result = ended([arm("lr_1e-4", 1.0), arm("lr_3e-4", 1.0, difference=0.0, verdict="undecided")], best=None)
    verdict = result.conclusion.findings.verdict
    assert [row.verdict for row in arm_rows(result)] == ["", "undecided"]
    findings = replace(result.conclusion.findings, verdict=replace(verdict, constant=1.0))
    result.conclusion = replace(result.conclusion, findings=findings)
    assert [row.verdict for row in arm_rows(result)] == ["", "the same"]


def test_rows_stand_by_score_with_sign_and_unit_and_the_best_arm_is_marked():
    rows = arm_rows(ended(ARMS, best="lr_3e-4"))
    assert [row.cells() for row in rows] == [
        ["*", "lr_3e-4", "0.900 [0.800, 0.950]", "+23.3 points", "better", "2", ""],
        ["", "lr_1e-4", "0.667 [0.567, 0.717]", "baseline", "", "2", ""],
        ["", "lr_9e-4", "0.500 [0.400, 0.550]", "-16.7 points", "undecided", "1 of 2", "20 of 60"],
        ["", "lr_bad", "no score", "", "failed", "0 of 2", ""],
    ]


def test_a_metric_that_is_no_share_keeps_its_own_size_and_less_may_be_better():
    arms = [arm("lr_1e-4", 12.5), arm("b", 3.25, difference=-9.25, verdict="better")]
    rows = arm_rows(ended(arms, best="b", share=False, mode="min"))
    assert [row.cells()[:4] for row in rows] == [
        ["*", "b", "3.250 [3.150, 3.300]", "-9.250"],
        ["", "lr_1e-4", "12.500 [12.400, 12.550]", "baseline"],
    ]


def test_without_a_verdict_or_with_one_arm_there_is_no_table():
    assert arm_rows(ended(ARMS[:1], best=None)) == []
    without = ended(ARMS, best=None)
    without.conclusion = replace(without.conclusion, findings=VerdictFindings())
    assert arm_rows(without) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_table_and_each_thing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    text = "Best arm by pass@1: lr_3e-4.\nlr_1e-4: 0.667, the baseline\nlr_3e-4: 0.9; better\nNote: two seeds."
    print_summary(ended(ARMS, best="lr_3e-4", text=text))
    told = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "+23.3 points" in told and "pass@1" in told and "vs baseline" in told and "* best arm" in told
    assert told.count("slow disk") == 1 and "(all 3 runs)" in told
    assert "Best arm by pass@1" in told and "Note: two seeds." in told and "the baseline\n" not in told
    assert "next: evsys show sweep" in told


@pytest.mark.parametrize("columns", [60, 120])
def test_names_are_shortened_only_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [f"a_sweep_of_learning_rates__rate{n}e-4" for n in (1, 3)]
    arms = [arm(names[0], 0.667), arm(names[1], 0.9, difference=0.233, verdict="better")]
    print_summary(ended(arms, best=names[1]))
    told = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert (f" {names[0]} " in told) == (columns == 120) and (" …1e-4 " in told) == (columns == 60)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_a_conclusion_that_breaks_between_words(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    text = (
        "Undecided: "
        + "no arm is significantly better-than the baseline, " * 6
        + "as shown.\n"
        + "x" * 100
        + " is one word."
    )
    print_summary(ended(ARMS, best=None, text=text))
    printed = sys.stdout.getvalue()  # type: ignore[attr-defined]
    lines = printed[printed.index("Undecided") :].splitlines()
    assert all(len(line) <= columns for line in lines if "x" * 100 not in line)
    assert set(" ".join(lines).split()) >= set(text.split())


def test_a_name_that_does_not_fit_is_cut_to_the_room_that_there_is() -> None:
    names = ["n" * 30 + "-first-" + "m" * 30 + "1", "k" * 30 + "-second-" + "l" * 30 + "2"]
    assert [len(name) for name in fitting_names(names, 40)] == [40, 40]
    assert [len(name) for name in fitting_names(names, 2)] == [9, 9]


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(ended(ARMS, best="lr_3e-4", text="Best arm by pass@1: lr_3e-4.\nlr_1e-4: 0.667, the baseline"))
    told = capsys.readouterr().out
    assert "lr_1e-4: completed" in told and "the baseline" in told and "vs baseline" not in told
