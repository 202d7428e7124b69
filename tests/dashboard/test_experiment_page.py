"""The page of an experiment: what `evsys show` says, in a browser; and what it says when something went wrong."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("django_ready")

HOSTILE = (
    '<script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover="alert(3) javascript:alert(4) '
    "\x1b[2J '{{ 7*7 }}'"
)


class Page(HTMLParser):
    """What a browser would make of a page: its elements, links and text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def refuse_active_content(self) -> None:
        """No script but ours, no handler, no style attribute, no link that runs code, no picture from elsewhere."""
        for tag, attributes in self.tags:
            if tag == "script":
                assert attributes.get("src", "").startswith("/static/dashboard/"), attributes
            assert tag not in ("iframe", "object", "embed", "img"), tag
            for name, value in attributes.items():
                assert not name.startswith("on"), (tag, name)
                assert name != "style", (tag, value)
                if name in ("href", "src", "action"):
                    assert not value.strip().lower().startswith(("javascript:", "data:", "//", "http")), value


def evsys(folder: Any, *arguments: str) -> Any:
    command = [sys.executable, "-m", "evsys_sdk.cli.main", *arguments, "--json", "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=folder)
    return json.loads(done.stdout)


def page_of(visitor: Any, row: Any, query: str = "") -> str:
    answer = visitor.get(f"/p/{row.project_id}/experiments/{row.pk}{query}")
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_numbers_and_sentences_are_those_of_evsys_show(visitor, sweep, sweep_folder):
    from evsys_sdk.format import shown, span

    told = evsys(sweep_folder, "show", "sweep")
    page = Page(page_of(visitor, sweep["sweep"]))
    assert told["arms"]
    for arm in told["arms"]:
        assert f"{shown(arm['mean'])}{span(arm['low'], arm['high'])}" in page.text
    for key, value in told["untrained"].items():
        assert key in page.text and shown(value) in page.text
    for line in told["record_data"]["conclusion"].splitlines():
        assert line.removeprefix("Hypothesis: ").strip() in page.text
    assert page.text.index("More rows make sweep better.") < page.text.index("Best arm by") < page.text.index("Arms by")


def test_the_plot_marks_the_baseline_and_the_untrained_model_and_has_a_dot_per_seed(visitor, sweep):
    text = page_of(visitor, sweep["sweep"])
    classes = [attributes.get("class", "") for tag, attributes in Page(text).tags if tag == "g"]
    assert classes == ["is-best", "is-baseline", "is-untrained"]
    assert sum(attributes.get("class") == "seed" for _, attributes in Page(text).tags) == 6


def test_integrity_notes_name_the_leakage(visitor, sweep):
    text = Page(page_of(visitor, sweep["sweep"])).text
    assert "18 of 18 val/words tasks appear in 18 of 24 training rows" in text.partition("Integrity")[2]


def test_only_the_settings_that_differ_from_the_parent_are_listed(visitor, sweep):
    page = Page(page_of(visitor, sweep["slow"]))
    differs = page.text.partition("Only what differs from")[2].partition("Whole config")[0]
    assert "algorithm.params.learning_rate 0.0001 0.01" in differs
    assert "data.path data/all.jsonl data/half.jsonl / data/all.jsonl" in differs
    assert "batch_size" not in differs
    assert "A child of the experiment sweep" in page.text


def test_the_settings_can_be_compared_with_any_other_experiment(visitor, sweep):
    page = Page(page_of(visitor, sweep["sweep"], f"?against={sweep['slow'].pk}"))
    assert "algorithm.params.learning_rate 0.01 0.0001" in page.text


@pytest.mark.parametrize(
    ("status", "fields", "words", "command"),
    [
        ("running", {}, "Running: no run has begun yet.", "evsys status"),
        ("interrupted", {}, "To resume, run the command that started it again", "evsys show"),
        ("failed", {}, "Every run failed.", "evsys show"),
        ("cancelled", {}, "Every run was cancelled.", "evsys show"),
        ("unreadable", {"problem": "line 3 is torn"}, "line 3 is torn", "evsys show"),
        ("invalid", {"notes": [{"kind": "invalid", "text": "wrong tasks", "by": "ada", "ts": ""}]}, "wrong tasks",
         "--undo"),
    ],
)  # fmt: skip
def test_an_experiment_without_a_clean_end_says_what_happened_and_the_next_command(
    visitor, project, status, fields, words, command
):
    from evsys_dashboard.models import ExperimentRow

    row = ExperimentRow.objects.create(
        id=f"e-{project.pk}", project=project, name="my exp", status=status, created=1.0, updated=1.0, **fields
    )
    text = Page(page_of(visitor, row)).text
    assert words in text and command in text and "'my exp'" in text


def test_an_experiment_without_a_score_says_why_and_names_the_rollouts(visitor, project):
    from evsys_dashboard.models import ExperimentRow

    record = {
        "experiment": "blank",
        "config": {"metadata": {"success_metric": "pass@1"}},
        "arms": [{"arm": "a", "statuses": ["completed"], "why_unranked": "every rollout errored"}],
        "runs": [{"run_id": "blank/a", "status": "completed"}],
    }
    row = ExperimentRow.objects.create(
        id=f"e-{project.pk}", project=project, name="blank", status="completed", created=1.0, updated=1.0, record=record
    )
    text = Page(page_of(visitor, row)).text
    assert "No arm has a score" in text and "every rollout errored" in text and "evsys rollouts blank --failed" in text


def hostile_rows(project: Any) -> Any:
    """An experiment, a run, an evaluation and a rollout with hostile text wherever someone can write."""
    from evsys_dashboard.models import EvalRow, ExperimentRow, GenerationRow, PredictionRow

    bad = HOSTILE + "\ud800"  # in a JSON column half a surrogate pair comes back as it is
    score = {"metric": bad, "value": 0.5, "low": 0.1, "high": 0.9, "n_tasks": 4}
    evaluation = {"name": bad, "split": "val", "scores": [score], "step": None}
    verdict = {"arms": [{"arm": bad, "mean": 0.5, "why_unranked": bad}], "baseline_arm": bad}
    record = {
        "experiment": bad, "description": bad, "conclusion": f"{bad}\nLeakage: {bad}", "hypothesis": bad,
        "hypothesis_in_words": bad, "hypothesis_result": {"outcome": bad, "why": bad}, "verdict": verdict,
        "arms": [{"arm": bad, "statuses": ["completed"], "scores": [0.5], "errors": [bad]}], "best_arm": bad,
        "runs": [{"run_id": bad, "status": "completed", "metrics": {f"val/{bad}": 0.5}, "evals": [evaluation]}],
        "config": {"name": bad, bad: bad, "runs": [{"name": bad, "model": {"name": bad}}],
                   "metadata": {"success_metric": bad, "tags": [bad]}},
        "warnings": [bad], "unread_settings": [bad], "test_selection": [{"text": bad}], "tags": [bad],
        "looks": {"count": 2, "before": [bad]},
    }  # fmt: skip
    row = ExperimentRow.objects.create(
        id=f"e-{project.pk}", project=project, name=HOSTILE[:300], status="failed", created=1.0, updated=1.0,
        hypothesis=HOSTILE, description=HOSTILE, conclusion=f"{HOSTILE}\n  {HOSTILE}", record=record, config={bad: bad},
        tags=[bad], notes=[{"kind": bad, "text": bad, "by": bad, "ts": bad}],
        figures={HOSTILE: "<svg onload=alert(1)>"},
        source=HOSTILE, problem=HOSTILE, parent_experiment_id=HOSTILE[:300],
    )  # fmt: skip
    run = GenerationRow.objects.create(
        id=f"g-{project.pk}", project=project, experiment=row, name=HOSTILE[:300], arm=HOSTILE[:300], seed=1,
        recipe_kind=HOSTILE[:100], status="failed", run_config={bad: bad}, metrics={bad: bad}, artifacts={bad: bad},
        checkpoints=[{"step": bad, "path": bad}], error=HOSTILE, log_tail=HOSTILE, created=1.0, updated=1.0,
        last_step=3,
        record={"run_id": bad, "traceback": bad, "warnings": [bad], "stopped_early": bad, "status": "failed"},
    )  # fmt: skip
    one = EvalRow.objects.create(
        id=f"v-{project.pk}", project=project, generation=run, name=HOSTILE[:300], split="val", scores=[score],
        stage=HOSTILE[:200], error=HOSTILE, created=1.0, n_rollouts=1, breakdown={bad: {bad: [score]}},
    )  # fmt: skip
    call = {"function": {"name": bad, "arguments": bad}}
    picture = {"type": "image_url", "image_url": {"url": "javascript:alert(5)"}}
    body = {
        "question": {"messages": [{"role": bad, "content": [{"text": bad}, picture]}], "expected": bad},
        "turns": [{"role": bad, "text": bad, "tool_calls": [call]}, bad, {"text": f"<tool_call>{bad}</tool_call>"}],
        "error": bad, "metadata": {bad: bad, "verifier": {bad: bad}},
    }  # fmt: skip
    PredictionRow.objects.create(
        id=f"p-{project.pk}", project=project, generation=run, eval=one, task_id=HOSTILE[:300], reward=0.0,
        status="agent_error", completion=HOSTILE, body=body, created=1.0,
    )  # fmt: skip
    return row


PAGES = [
    "experiments/e-{0}",
    "runs/g-{0}",
    "rollouts?run=g-{0}",
    "compare?e=e-{0}",
    "rollouts?run=g-{0}&q=%3Cscript%3E&key=%22%3E%3Cscript%3E&status=%3Cb%3E",
]


@pytest.mark.parametrize("which", PAGES)
def test_text_of_others_is_text_on_every_page(visitor, project, which):
    hostile_rows(project)
    answer = visitor.get(f"/p/{project.pk}/" + which.format(project.pk))
    assert answer.status_code == 200
    text = answer.content.decode()
    Page(text).refuse_active_content()
    assert "\x1b" not in Page(text).text
    if "q=" not in which:
        assert escape("<script>alert(1)</script>") in text and "\\u001b[2J" in text


def test_a_command_with_the_name_of_an_experiment_is_one_command_in_a_shell(visitor, project):
    from evsys_dashboard.models import ExperimentRow

    row = ExperimentRow.objects.create(
        id=f"e-{project.pk}", project=project, name="x; rm -rf $HOME", status="completed", created=1.0, updated=1.0
    )
    text = html.unescape(page_of(visitor, row))
    assert "evsys conclude 'x; rm -rf $HOME' --text" in text


def test_downloads_are_attachments_that_run_nothing(visitor, project):
    row = hostile_rows(project)
    base = f"/p/{project.pk}/experiments/{row.pk}"
    from urllib.parse import quote

    files = [f"{base}/record.json", f"{base}/scores.csv", f"/p/{project.pk}/rollouts/p-{project.pk}.txt"]
    for url in files:
        answer = visitor.get(url)
        assert answer.status_code == 200, url
        assert answer["Content-Disposition"].startswith('attachment; filename="')
        assert "sandbox" in answer["Content-Security-Policy"]
        assert answer["X-Content-Type-Options"] == "nosniff"
    row.figures = {"arms": "<svg onload=alert(1)>"}
    row.save()
    answer = visitor.get(f"{base}/figures/{quote('arms')}.svg")
    assert answer["Content-Disposition"].startswith("attachment") and "sandbox" in answer["Content-Security-Policy"]
    assert visitor.get(f"{base}/figures/none.svg").status_code == 404


def test_the_csv_has_every_score_and_no_formula(visitor, sweep):
    from evsys_dashboard.pages.experiment import csv_cell

    answer = visitor.get(f"/p/{sweep['sweep'].project_id}/experiments/{sweep['sweep'].pk}/scores.csv")
    rows = list(csv.DictReader(io.StringIO(answer.content.decode())))
    assert len(rows) == 6 * 5
    last = [row for row in rows if row["run"] == "half__s42" and row["step"] == "30"]
    assert [(row["metric"], row["n_tasks"]) for row in last] == [("pass@1", "18")]
    assert float(last[0]["value"]) == pytest.approx(10 / 18)
    assert csv_cell("=HYPERLINK(1)") == "'=HYPERLINK(1)" and csv_cell(-0.5) == -0.5


def test_an_experiment_of_another_project_is_not_found(visitor, sweep, django_ready):
    from evsys_dashboard.models import Project

    other = Project.objects.create(id="other-project", name="Other", created=1.0)
    try:
        for part in (f"experiments/{sweep['sweep'].pk}", f"runs/{sweep['sweep'].generations.first().pk}"):
            assert visitor.get(f"/p/{other.pk}/{part}").status_code == 404
    finally:
        other.delete()


def test_a_stranger_is_sent_to_the_login_page(sweep):
    from django.test import Client

    for url in ("experiments/" + sweep["sweep"].pk, "compare", "rollouts", "runs/x"):
        answer = Client().get(f"/p/{sweep['sweep'].project_id}/{url}")
        assert answer.status_code == 302 and answer["Location"].startswith("/login?next=")


def test_every_score_of_a_trained_arm_has_its_interval(visitor, sweep):
    from evsys_sdk.format import shown, span
    from evsys_sdk.record.models import ExperimentRecord

    scores = Page(page_of(visitor, sweep["sweep"])).text.partition("All scores")[2].partition("Means over")[0]
    record = ExperimentRecord.model_validate(sweep["sweep"].record)
    for arm, runs in record.runs_of():
        judged = next(one for one in record.verdict.arms if one.arm == arm.arm)
        assert span(judged.low, judged.high).strip() in scores, arm.arm  # the success metric
        found = [run.last_score("test/held_out/pass@1") for run in runs]
        mean = sum(one.value for one in found) / len(found)
        low, high = sum(one.low for one in found) / len(found), sum(one.high for one in found) / len(found)
        assert f"{shown(mean)}{span(low, high)}" in scores, arm.arm


def test_numbers_of_a_stage_are_no_scores():
    from evsys_dashboard.pages.experiment import score_table
    from evsys_sdk.history.digest import digest_of
    from evsys_sdk.record.models import ExperimentRecord

    score = {"metric": "pass@1", "value": 0.5}
    run = {"run_id": "e/a", "status": "completed", "metrics": {"val/tools/pass@1": 0.5, "first/tokens": 7.0}}
    data = {"experiment": "e", "config": {"name": "e"}, "arms": [{"arm": "a", "statuses": ["completed"]}]}
    for evals, keys in ([{"name": "tools", "split": "val", "scores": [score]}], ["val/tools/pass@1"]), (
        [], ["val/tools/pass@1", "first/tokens"],
    ):  # fmt: skip
        plain = data | {"runs": [run | {"evals": evals}]}
        assert score_table(digest_of(plain), ExperimentRecord.model_validate(plain)).keys == keys


def test_a_running_experiment_shows_its_success_metric_first_and_no_time_of_runs(visitor, project, fill):
    from evsys_dashboard.models import EvalRow, ExperimentRow

    _, run = fill(project)
    config = {"name": "lr", "metadata": {"success_metric": "pass@1"}}
    EvalRow.objects.filter(generation_id=run).update(split="val", step=1)
    ExperimentRow.objects.filter(project=project).update(config=config, metric="pass@1")
    text = page_of(visitor, project.experiments.get())
    assert "metric=loss&amp;metric=val%2Ftools%2Fpass%401" in text
    assert "time, all runs together" not in text


def test_the_reason_of_an_arm_without_a_score_stands_with_its_status(visitor, project):
    from evsys_dashboard.models import ExperimentRow

    record = {
        "experiment": "half",
        "config": {"metadata": {"success_metric": "pass@1"}},
        "arms": [{"arm": "a", "statuses": ["failed"], "errors": ["CUDA out of memory"]}],
        "runs": [{"run_id": "half/a", "status": "failed"}],
    }
    row = ExperimentRow.objects.create(
        id=f"e-{project.pk}", project=project, name="half", status="failed", created=1.0, updated=1.0, record=record
    )
    cells = re.findall(r'<td[^>]*data-label="(status|score)">(.*?)</td>', page_of(visitor, row))
    assert [(label, Page(cell).text.split()) for label, cell in cells] == [
        ("status", ["failed", "CUDA", "out", "of", "memory"]),
        ("score", ["-"]),
    ]


def test_an_interrupted_experiment_of_a_folder_names_the_command_that_resumes_it(visitor, project, tmp_path):
    from evsys_dashboard.models import ExperimentRow
    from evsys_sdk.record.processes import ExperimentProcess, write_launch

    source = tmp_path / "my exp" / "experiment_result.json"
    source.parent.mkdir()
    command = ["evsys", "run", "lr sweep.yaml", "--fresh"]
    write_launch(
        ExperimentProcess(
            experiment="my exp", pid=1, host="h", born=None, command=command, cwd="/work/here", config="lr sweep.yaml",
            output_dir=str(tmp_path), record=str(source), log=None, started="2026-11-18T10:00:00+00:00",
        )
    )  # fmt: skip
    row = ExperimentRow.objects.create(
        id=f"e-{project.pk}", project=project, name="my exp", status="interrupted", created=1.0, updated=1.0,
        source=str(source),
    )  # fmt: skip
    assert "cd /work/here && evsys run 'lr sweep.yaml'" in Page(page_of(visitor, row)).text
