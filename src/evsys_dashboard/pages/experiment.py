"""The page of one experiment: hypothesis, verdict and conclusion first, then what they rest on.

In: an `Experiment` row with its runs. Out: the page and its downloads. Numbers and sentences are those of the record
and of `evsys show`; before there is a record, what the runs have logged.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import yaml
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.utils.safestring import SafeString, mark_safe
from django.views.decorators.http import require_GET
from pydantic import ValidationError

from evsys_dashboard import auth
from evsys_dashboard.api.read import find_experiment
from evsys_dashboard.changes import current_cursor
from evsys_dashboard.curves import FIRST, first_curves_url, metric_names
from evsys_dashboard.follow import ensure_experiment_loaded, find_resume_command
from evsys_dashboard.models import ExperimentRow, GenerationRow, Project
from evsys_sdk.constants import START, UNTRAINED
from evsys_sdk.format import score_text
from evsys_sdk.history.digest import LEAKAGE, ArmDigest, Digest, digest_of, flatten, split_settings
from evsys_sdk.protocols import Score
from evsys_sdk.record.models import ExperimentRecord
from evsys_sdk.report.page import interval_over_seeds
from evsys_sdk.report.recorded import hypothesis_words, recorded_verdict
from evsys_sdk.report.setup import setup_of
from evsys_sdk.report.svg import forest_svg, plan_forest
from evsys_sdk.report.verdict_text import effect
from evsys_sdk.score_names import AmbiguousName, resolve, score_key
from evsys_sdk.stats.verdict import ArmVerdict, Comparison, Verdict

MOST_OTHERS = 300
"""Experiments that are offered to compare the config with."""
NOT_SETTINGS = ("name", "description", "output_dir", "run", "runs", "matrix", "base_run", "version")
FIRST_METRICS = 4
MOST_ARMS_DRAWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTableRow:
    """One arm in the table below the plot."""

    arm: ArmDigest
    score: str
    """Empty for an arm without one."""
    seeds: str
    status: str
    why_unscored: str = ""
    mark: str = ""
    against_baseline: str = ""
    against_untrained: str = ""
    runs: Sequence[GenerationRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    """Every benchmark's scores: a column per score, a row per arm, the untrained model first."""

    keys: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusText:
    """What happened to an experiment without a clean end, and the next command."""

    kind: str
    text: str
    command: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityNote:
    what: str
    text: str
    is_warning: bool = True


def read_record(row: ExperimentRow) -> ExperimentRecord | None:
    """The record of a row; None where there is none or where it is of no known form."""
    try:
        return ExperimentRecord.model_validate(row.record) if row.record else None
    except ValidationError:
        return None


def read_digest(row: ExperimentRow) -> Digest:
    """What `evsys show` says of an experiment; for one without a record, what its row has."""
    if row.record:
        try:
            return digest_of(row.record)
        except (ValueError, TypeError, KeyError, AttributeError):
            pass  # a record of another program may say anything; the page then shows the row
    config = row.config if isinstance(row.config, dict) else {}
    return Digest(name=row.name, hypothesis=row.hypothesis, setup=setup_of(config), tags=[str(tag) for tag in row.tags])


def conclusion_lines(row: ExperimentRow, hypothesis: str) -> list[tuple[str, bool]]:
    """The conclusion line by line, without the hypothesis, which stands above it; and whether a line belongs to the
    one before it."""
    text = row.conclusion.removeprefix(f"Hypothesis: {hypothesis}")
    return [(line.strip(), line.startswith("  ")) for line in text.splitlines() if line.strip()]


def untrained_scores(record: ExperimentRecord | None) -> dict[str, Score]:
    """Score key -> the untrained model's score. It is one model, however often it was scored."""
    return {
        score_key(one.split, one.name, score.metric): score
        for run in (record.runs if record else ())
        for one in run.evals
        for score in one.scores
        if one.step == 0
    }


def draw_forest(verdict: Verdict | None, digest: Digest, record: ExperimentRecord | None) -> SafeString:
    """The arms with their intervals, the best first unless none may be picked; the untrained model last."""
    if verdict is None:
        return SafeString("")
    before = untrained_scores(record)
    found = [before[key] for key in digest.measured if key in before]
    label = f"Arms by {digest.metric or 'score'} with 95 % intervals"
    # Safe: `forest_svg` escapes every text in it.
    return mark_safe(forest_svg(verdict, label=label, untrained=found[0] if len(found) == 1 else None))


def arm_rows(digest: Digest, verdict: Verdict | None, runs: Sequence[GenerationRow]) -> list[ArmTableRow]:
    """A row per arm in the order of the plot, those without a score after it."""
    judged = {arm.arm: arm for arm in verdict.arms} if verdict else {}
    baseline = verdict.baseline_arm if verdict and len(verdict.arms) > 1 else None
    best = digest.best_arm if len(digest.arms) > 1 else None
    unscored = [arm for arm in digest.arms if not arm.scores]
    rows = []
    for arm in [*digest.scored, *unscored]:
        own = judged.get(arm.arm) or ArmVerdict(arm=arm.arm)
        done, n = arm.statuses.count("completed"), len(arm.statuses)
        counts = [f"{own.n_tasks} tasks"] if own.n_tasks and verdict and not verdict.per_run else []
        rows.append(
            ArmTableRow(
                arm=arm,
                score=score_text(
                    arm.mean,
                    arm.low,
                    arm.high,
                    counts=counts,
                    marks=[arm.training_mark],
                    n_errors=arm.n_errors,
                    n_rollouts=arm.n_rollouts,
                )
                if arm.mean is not None
                else "",
                seeds=str(n) if len(arm.scores) == n else f"{len(arm.scores)} of {n}",
                why_unscored=arm.why_unscored,
                status=arm.statuses[0] if len(set(arm.statuses)) == 1 else f"{done} of {n} completed",
                mark="baseline" if arm.arm == baseline else "best" if arm.arm == best else "",
                against_baseline=_against(own.vs_baseline, verdict),
                against_untrained=_against(own.vs_untrained, verdict),
                runs=[run for run in runs if run.arm == arm.arm],
            )
        )
    return rows  # fmt: skip


def _against(found: Comparison | None, verdict: Verdict | None) -> str:
    return effect(found, verdict) if found and verdict else ""


def score_table(digest: Digest, record: ExperimentRecord | None) -> ScoreTable:
    """All scores of all arms as means over their completed seeds, as `evsys show` has them, with intervals."""
    before = untrained_scores(record)
    evals = [one for run in (record.runs if record else ()) for one in run.evals]
    scored = {score_key(one.split, one.name, score.metric) for one in evals for score in one.scores}
    # Numbers of a stage (`first/tokens`) are called like scores. Where evaluations are recorded, they say what is one.
    named = {key for arm in digest.arms for key in arm.metrics if key in scored or (not scored and "/" in key)}
    keys = sorted(named | set(before), reverse=True)
    rows = []
    if before:
        cells = []
        for key in keys:
            found = before.get(key)
            text = (
                score_text(found.value, found.low, found.high, n_errors=found.n_errors, n_rollouts=found.n_rollouts)
                if found
                else "-"
            )
            cells.append(text)
        rows.append((START if digest.start else UNTRAINED, cells))
    runs_of = {arm.arm: runs for arm, runs in record.runs_of()} if record else {}
    for arm in digest.arms:
        completed = [run for run in runs_of.get(arm.arm, ()) if run.status == "completed"]
        cells = []
        for key in keys:
            if key not in arm.metrics:
                cells.append("-")
                continue
            marks = [mark for table in (arm.error_marks, arm.training_marks) if (mark := table.get(key))]
            low, high = arm.low, arm.high
            if key not in digest.measured:
                # The record judges arms by the success metric alone. Of other scores it has each seed's interval.
                low, high = interval_over_seeds([one for run in completed if (one := run.last_score(key)) is not None])
            cells.append(score_text(arm.metrics[key], low, high, marks=marks))
        rows.append((arm.arm, cells))
    return ScoreTable(keys=keys, rows=rows if keys else [])


def integrity_notes(row: ExperimentRow, record: ExperimentRecord | None, digest: Digest) -> list[IntegrityNote]:
    """What a reader must know before trusting the scores."""
    notes = []
    for line, _ in conclusion_lines(row, digest.hypothesis):
        if line.startswith((LEAKAGE, "Not counted as leakage:", "Scored on training rows:")):
            what = line.partition(":")[0]
            notes.append(IntegrityNote(what=what, text=line.partition(":")[2].strip(), is_warning="Not" not in what))
    if record is None:
        return notes
    notes += [IntegrityNote(what="Test selection", text=str(one.get("text") or one)) for one in record.test_selection]
    notes += [IntegrityNote(what="Errors", text=f"{arm.arm}: {arm.errors}") for arm in digest.arms if arm.n_errors]
    looks = record.looks
    if looks.count > 1 or looks.set_aside:
        before = f"; before: {', '.join(looks.before)}" if looks.before else ""
        aside = (
            f"; {looks.set_aside} attempts set aside by --fresh, {looks.rerolls} with other seeds or scores"
            if looks.set_aside
            else ""
        )
        notes.append(IntegrityNote(what="Looks", text=f"this question was asked {looks.count} times{before}{aside}"))
    if record.judged_again:
        text = f"the baseline arm {record.judged_again.baseline_arm} was chosen after the results were known"
        notes.append(IntegrityNote(what="Judged again", text=text))
    notes += [IntegrityNote(what="Unread setting", text=path) for path in record.unread_settings]
    notes += [IntegrityNote(what="Warning", text=text) for text in record.warnings]
    return notes


def status_text(row: ExperimentRow, digest: Digest, runs: Sequence[GenerationRow]) -> StatusText | None:
    """For an experiment that did not end cleanly, or that has no score: what happened, and what to do."""
    name = shlex.quote(row.name)
    failed = next((run for run in runs if run.error), None)
    detail = failed.error if failed else ""
    ended = sum(run.status != "running" for run in runs)
    if row.status == "running":
        text = f"Running: {ended} of {len(runs)} runs have ended." if runs else "Running: no run has begun yet."
        return StatusText(kind="running", text=text, command=f"evsys status {name}")
    if row.status == "unreadable":
        problem = row.problem or "The record is torn, or no record of an experiment."
        return StatusText(kind="error", text="The record cannot be read, so nothing of it counts.", detail=problem,
                          command=f"evsys show {name}")  # fmt: skip
    unfinished = {
        "interrupted": "Interrupted: it began, no process runs it now, and it left no result.",
        "failed": "Every run failed.",
        "cancelled": "Every run was cancelled.",
        "partial": "Some runs did not complete.",
    }
    if row.status in unfinished:
        resume = find_resume_command(row)
        kind = "warn" if row.status in ("interrupted", "partial") else "error"
        how = (
            "To resume:" if resume else "To resume, run the command that started it again, on the machine that ran it."
        )
        text = f"{unfinished[row.status]} {how}"
        return StatusText(kind=kind, text=text, command=resume or f"evsys show {name}", detail=detail)
    if row.status == "invalid":
        why = next((str(note.get("text")) for note in reversed(row.notes) if note.get("kind") == "invalid"), "")
        return StatusText(kind="warn", text="Marked as invalid: it does not count.", detail=why,
                          command=f"evsys invalidate {name} --undo")  # fmt: skip
    if digest.arms and not digest.scored:
        why = next((arm.why_unscored for arm in digest.arms if arm.why_unscored), "")
        return StatusText(kind="warn", text="No arm has a score by the success metric yet.", detail=why,
                          command=f"evsys rollouts {name} --failed")  # fmt: skip
    return None


def measured_so_far(metric: str, names: Sequence[str]) -> list[str]:
    """The scores that the success metric means, of an experiment that has no record yet."""
    try:
        return resolve(metric, names) if metric else []
    except AmbiguousName as exc:
        return exc.keys


def config_of(row: ExperimentRow, record: ExperimentRecord | None) -> dict[str, Any]:
    return dict(record.config if record and record.config else row.config or {})


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted place -> value; where arms differ, their values side by side."""
    found = {key: _value(value) for key, value in flatten({k: v for k, v in config.items() if k not in NOT_SETTINGS})}
    common, own = split_settings(config)
    found |= {key: _value(value) for key, value in common.items()}
    for key in dict.fromkeys(key for arm in own.values() for key in arm):
        found[key] = " / ".join(dict.fromkeys(_value(arm[key]) if key in arm else "(not set)" for arm in own.values()))
    if "runs" not in config and "matrix" in config:  # a sweep that has not been expanded into runs
        found |= {key: _value(value) for key, value in flatten({"matrix": config["matrix"]})}
    return found


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def settings_that_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Place, value of the one, value of the other; `(not set)` where one does not have it."""
    left, right = settings_of(one), settings_of(other)
    keys = dict.fromkeys([*left, *right])
    rows = [(key, left.get(key, "(not set)"), right.get(key, "(not set)")) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def yaml_text(config: Mapping[str, Any]) -> str:
    """The config as YAML; half a surrogate pair, which YAML cannot write, is shown as its escape."""
    text = yaml.safe_dump(json.loads(json.dumps(config, default=str)), sort_keys=False, allow_unicode=False, width=100)
    return str(text)


def find_parent(row: ExperimentRow) -> ExperimentRow | None:
    """By id, else the newest of that name that began before."""
    given = row.parent_experiment_id
    if not given:
        return None
    others = ExperimentRow.objects.filter(project_id=row.project_id).exclude(pk=row.pk)
    return others.filter(pk=given).first() or others.filter(name=given).order_by("-created").first()


@auth.page
@require_GET
def experiment_page(request: HttpRequest, project_id: str, experiment_id: str) -> HttpResponse:
    project = auth.project_for(request, project_id)
    since = current_cursor(project)
    row = find_experiment(project, experiment_id)
    ensure_experiment_loaded(row)
    context = experiment_context(project, row, request.GET.get("against", "")) | {"since": since}
    return render(request, "dashboard/experiment.html", context)


def experiment_context(project: Project, row: ExperimentRow, against: str = "") -> dict[str, Any]:
    record, digest = read_record(row), read_digest(row)
    runs = list(row.generations.defer("log_tail", "record").order_by("created", "name"))
    verdict = recorded_verdict(record) if record else None
    hypothesis = hypothesis_words(record) if record else row.hypothesis
    parent = find_parent(row)
    others = ExperimentRow.objects.filter(project=project).exclude(pk=row.pk).order_by("-created")
    chosen = others.filter(pk=against).first() if against else parent
    config = config_of(row, record)
    metrics = metric_names([run.pk for run in runs])
    measured = digest.measured or measured_so_far(row.metric, metrics)
    first = [name for name in metrics if name in FIRST or name in measured] or metrics
    hypothesis_result = record.hypothesis_result if record else {}
    curves_url = f"/api/v1/projects/{quote(project.pk, safe='')}/experiments/{quote(row.pk, safe='')}/curves"
    return {
        "project": project,
        "section": "lab",
        "experiment": row,
        "record": record,
        "digest": digest,
        "hypothesis": hypothesis,
        "hypothesis_result": hypothesis_result,
        "hypothesis_in_words": record.hypothesis_in_words if record else "",
        "conclusion": conclusion_lines(row, hypothesis),
        "status_text": status_text(row, digest, runs),
        "conclude_command": f'evsys conclude {shlex.quote(row.name)} --text "..."',
        "verdict": verdict,
        "forest": draw_forest(verdict, digest, record),
        "forest_notes": "; ".join(plan_forest(verdict).notes) if verdict else "",
        "arms": arm_rows(digest, verdict, runs),
        "has_baseline": bool(verdict and any(arm.vs_baseline for arm in verdict.arms)),
        "has_untrained": bool(verdict and any(arm.vs_untrained for arm in verdict.arms)),
        "scores": score_table(digest, record),
        "setup": digest.setup,
        "integrity": integrity_notes(row, record, digest),
        "runs": runs,
        "run_lines": [(run, None if run.ended is None else run.ended - run.created) for run in runs],
        "run_seconds": sum((run.ended or 0) - run.created for run in runs if run.ended),
        "steps": sum(run.last_step or 0 for run in runs),
        "config_yaml": yaml_text(config) if config else "",
        "parent": parent,
        "against": chosen,
        "others": list(others.only("id", "name", "created")[:MOST_OTHERS]),
        "differences": settings_that_differ(config, config_of(chosen, read_record(chosen))) if chosen else [],
        "curves_url": curves_url,
        "first_curves": first_curves_url(curves_url, first[:FIRST_METRICS]),
        "metrics": metrics,
        "first_metrics": first[:FIRST_METRICS],
        "most_arms": MOST_ARMS_DRAWN,
        "is_live": row.status == "running",
    }  # fmt: skip


def attachment(body: bytes | str, content_type: str, file_name: str) -> HttpResponse:
    """A download. It is never shown in the page's origin, since others may have written it."""
    answer = HttpResponse(body, content_type=content_type)
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in file_name)[:150]
    answer["Content-Disposition"] = f'attachment; filename="{safe}"'
    answer["Content-Security-Policy"] = "default-src 'none'; sandbox"
    answer["X-Content-Type-Options"] = "nosniff"
    return answer


@auth.page
@require_GET
def record_file(request: HttpRequest, project_id: str, experiment_id: str) -> HttpResponse:
    row = find_experiment(auth.project_for(request, project_id), experiment_id)
    if not row.record:
        raise Http404("this experiment has no record yet")
    text = json.dumps(row.record, indent=1)
    return attachment(text, "application/json", f"{row.name}.experiment_result.json")


@auth.page
@require_GET
def scores_file(request: HttpRequest, project_id: str, experiment_id: str) -> HttpResponse:
    """Every score of every evaluation, a line each."""
    row = find_experiment(auth.project_for(request, project_id), experiment_id)
    names = ("arm", "run", "seed", "status", "split", "benchmark", "stage", "step", "metric", "value", "low", "high",
             "n_tasks", "n_rollouts", "n_errors", "error")  # fmt: skip
    out = io.StringIO()
    table = csv.writer(out)
    table.writerow(names)
    for run in row.generations.defer("log_tail", "record").order_by("created", "name"):
        for one in run.evals.order_by("created", "step", "name"):
            head = [run.arm, run.name, run.seed, run.status, one.split, one.name, one.stage, one.step]
            scores = one.scores or [{"metric": key, "value": value} for key, value in one.metrics.items()]
            for score in scores:
                cells = [*head, *(score.get(name) for name in names[8:15]), score.get("error") or one.error]
                table.writerow([csv_cell(cell) for cell in cells])
    return attachment(out.getvalue().encode(errors="backslashreplace"), "text/csv; charset=utf-8",
                      f"{row.name}.scores.csv")  # fmt: skip


def csv_cell(value: object) -> object:
    """A spreadsheet takes a text that begins with one of these for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


@auth.page
@require_GET
def figure_file(request: HttpRequest, project_id: str, experiment_id: str, name: str) -> HttpResponse:
    row = find_experiment(auth.project_for(request, project_id), experiment_id)
    text = row.figures.get(name) if isinstance(row.figures, dict) else None
    if not isinstance(text, str):
        raise Http404("this experiment has no such figure")
    return attachment(text.encode(errors="backslashreplace"), "image/svg+xml", f"{row.name}.{name}.svg")


PAGE = "p/<str:project_id>/experiments/<str:experiment_id>"
urlpatterns: list[URLPattern] = [
    path(PAGE, experiment_page),
    path(f"{PAGE}/record.json", record_file),
    path(f"{PAGE}/scores.csv", scores_file),
    path(f"{PAGE}/figures/<str:name>.svg", figure_file),
]
