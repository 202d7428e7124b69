"""The table of arms at the end of a sweep."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evsys_sdk.cli.arm_table import arm_rows
from evsys_sdk.cli.summary import print_summary


def arm(
    name: str, mean: float | None, *, difference: float | None = None, verdict: str | None = None, **facts: Any
) -> dict:
    around = {"low": None, "high": None} if mean is None else {"low": mean - 0.1, "high": mean + 0.05}
    vs = None if difference is None else {"difference": difference}
    counts = {"n_seeds": 0 if mean is None else 2, "n_errors": 0, "n_rollouts": 60}
    return {"arm": name, "mean": mean, **around, "vs_baseline": vs, "verdict": verdict, **counts, **facts}


def ended(arms: list[dict], *, best: str | None, share: bool = True, mode: str = "max", text: str = "") -> Any:
    data = {"arms": arms, "share": share, "mode": mode, "metric": "val/tools/pass@1", "baseline_arm": "lr_1e-4"}
    summaries = [
        SimpleNamespace(arm=one["arm"], statuses=["completed"] * 2 if one["mean"] is not None else ["failed"] * 2)
        for one in arms
    ]
    conclusion = SimpleNamespace(
        arms=summaries, best_arm=best, metric="pass@1", text=text, findings=SimpleNamespace(data={"verdict": data})
    )
    runs = [
        SimpleNamespace(run_id=one["arm"], status="completed", metrics={}, error=None,
                        extras={"run_name": one["arm"], "warnings": ["slow disk"]})
        for one in arms if one["mean"] is not None
    ]  # fmt: skip
    return SimpleNamespace(name="sweep", conclusion=conclusion, runs=runs, output_dir=Path("out"), seconds=1.0)


ARMS = [
    arm("lr_1e-4", 0.667),
    arm("lr_3e-4", 0.9, difference=0.233, verdict="better"),
    arm("lr_9e-4", 0.5, difference=-0.167, verdict="undecided", n_seeds=1, n_errors=20),
    arm("lr_bad", None),
]


def test_rows_stand_by_score_with_sign_and_unit_and_the_best_arm_is_marked():
    rows = arm_rows(ended(ARMS, best="lr_3e-4"))
    assert [row.cells() for row in rows] == [
        ["*", "…3e-4", "90.0 %", "80.0 to 95.0", "+23.3 points", "better", "2", ""],
        ["", "…1e-4", "66.7 %", "56.7 to 71.7", "baseline", "", "2", ""],
        ["", "…9e-4", "50.0 %", "40.0 to 55.0", "-16.7 points", "undecided", "1 of 2", "20 of 60"],
        ["", "…bad", "no score", "", "", "failed", "0 of 2", ""],
    ]


def test_a_metric_that_is_no_share_keeps_its_own_size_and_less_may_be_better():
    arms = [arm("lr_1e-4", 12.5), arm("b", 3.25, difference=-9.25, verdict="better")]
    rows = arm_rows(ended(arms, best="b", share=False, mode="min"))
    assert [row.cells()[:5] for row in rows] == [
        ["*", "b", "3.250", "3.150 to 3.300", "-9.250"],
        ["", "lr_1e-4", "12.500", "12.400 to 12.550", "baseline"],
    ]


def test_without_a_verdict_or_with_one_arm_there_is_no_table():
    assert arm_rows(ended(ARMS[:1], best=None)) == []
    without = ended(ARMS, best=None)
    without.conclusion.findings.data.clear()
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


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(ended(ARMS, best="lr_3e-4", text="Best arm by pass@1: lr_3e-4.\nlr_1e-4: 0.667, the baseline"))
    told = capsys.readouterr().out
    assert "lr_1e-4: completed" in told and "the baseline" in told and "vs baseline" not in told
