"""The page of a run: how it ended, evaluations with intervals, checkpoints, error, log."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("django_ready")


def page_of(visitor: Any, run: Any) -> str:
    answer = visitor.get(f"/p/{run.project_id}/runs/{run.pk}")
    assert answer.status_code == 200
    return answer.content.decode()


def test_a_finished_run_shows_scores_with_intervals_over_steps_checkpoints_and_warnings(visitor, sweep):
    run = sweep["sweep"].generations.get(name="all__s42")
    text = page_of(visitor, run)
    for words in ("untrained", "step 10", "step 20", "pass@1 1.000 [0.824, 1.000], 18 tasks", "final weights",
                  "leakage: 18 of 18 val/words tasks", 'class="chart scores"', "weights/step-000030", "max_steps: 30",
                  "step 30: 1.000 [0.824, 1.000]"):  # fmt: skip
        assert words in text, words
    assert text.count('class="whisker"') == 4


def test_a_failed_run_shows_its_error_traceback_and_log(visitor, project):
    from evsys_dashboard.models import ExperimentRow, GenerationRow

    row = ExperimentRow.objects.create(id=f"e-{project.pk}", project=project, name="exp", created=1.0, updated=1.0)
    record = {"run_id": "exp/a", "status": "failed", "error": "out of memory", "traceback": "line 12, in step",
              "stopped_at": {"step": 5, "total_steps": 9, "checkpoint_step": 4}}  # fmt: skip
    run = GenerationRow.objects.create(
        id=f"g-{project.pk}", project=project, experiment=row, name="a", status="failed", error="out of memory",
        log_tail="first line\nlast line", record=record, created=1.0, updated=1.0,
    )  # fmt: skip
    text = page_of(visitor, run)
    for words in (
        "out of memory",
        "line 12, in step",
        "last line",
        "Stopped at step 5 of 9",
        "checkpoint is of step 4",
    ):
        assert words in text, words


def test_at_most_ten_curves_are_drawn_at_first_and_the_machines_numbers_by_choice(visitor, project):
    from evsys_dashboard.models import ExperimentRow, GenerationRow
    from evsys_dashboard.points import write_points

    row = ExperimentRow.objects.create(id=f"e-{project.pk}", project=project, name="exp", created=1.0, updated=1.0)
    run = GenerationRow.objects.create(
        id=f"g-{project.pk}", project=project, experiment=row, name="a", created=1.0, updated=1.0
    )
    names = [f"m{number:02}" for number in range(15)] + ["loss", "system/gpu"]
    write_points({(run.pk, name): {1: (0.5, 1), 2: (0.25, 1)} for name in names})
    text = page_of(visitor, run)
    assert text.count("data-metric") == 17 and text.count(" checked") == 10
    assert 'value="loss" checked' in text and 'value="system/gpu" checked' not in text


def test_a_record_of_no_known_form_leaves_the_page_standing(visitor, project):
    from evsys_dashboard.models import ExperimentRow, GenerationRow

    row = ExperimentRow.objects.create(
        id=f"e-{project.pk}", project=project, name="exp", created=1.0, updated=1.0, record={"runs": 7, "experiment": 3}
    )
    run = GenerationRow.objects.create(
        id=f"g-{project.pk}", project=project, experiment=row, name="a", created=1.0, updated=1.0, record={"evals": 5}
    )
    assert "No numbers have been logged yet" in page_of(visitor, run)
    assert visitor.get(f"/p/{project.pk}/experiments/{row.pk}").status_code == 200
