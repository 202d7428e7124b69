"""An experiment as one HTML file, for people who have no server: figures, tables, config and the record inside.

In: an `ExperimentRecord` with its `PageFacts`, and what people noted. Out: a page that needs nothing from elsewhere and
opens from disk. Its sentences are those of the Markdown page (`page`); it adds the figures as SVG, every evaluation,
the config and the record as data to download. Every text in it is escaped, and its content security policy lets no
script run but the one below, known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from evsys_sdk.contamination.audit import leakage_lines
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import to_json, write_text
from evsys_sdk.format import benchmark_score_text, count, visible
from evsys_sdk.record.models import ExperimentRecord
from evsys_sdk.report.figures import curves_of, score_units
from evsys_sdk.report.page import (
    STAGES_NOTE,
    PageFacts,
    PageTable,
    arms_table,
    cost_table,
    deployment_texts,
    failure_texts,
    scores_table,
    selection_texts,
    setup_table,
    stage_tables,
    verdict_texts,
)
from evsys_sdk.report.svg import colour_order, curve_svg, forest_svg, legend_svg, plan_forest

GENERATOR = '<meta name="generator" content="evsys report">'
"""In the head of every report; a file without it is not overwritten."""
HEAD_BYTES = 2000
"""The generator stands within these."""

SCRIPT = """
for (const link of document.querySelectorAll("a[data-from]")) {
  const text = document.getElementById(link.dataset.from).textContent;
  link.href = URL.createObjectURL(new Blob([text], {type: link.type}));
  link.hidden = false;
}
"""

STYLE = """
:root { color-scheme: light dark; --text: #1d2129; --muted: #5d6673; --ground: #ffffff; --raised: #f5f6f8;
  --grid: #d9dce1; --accent: #3264a8; --better: #26734a; --worse: #b03a2e; --equivalent: #3264a8; --undecided: #6b7280;
  --series-7: #555555; --series-rest: #b8b8b8; }
@media screen and (prefers-color-scheme: dark) { :root { --text: #e4e7ec; --muted: #a3acb9; --ground: #15181d;
  --raised: #1f242b; --grid: #39404a; --accent: #7fa9e6; --better: #62c08d; --worse: #ef8b7f; --equivalent: #7fa9e6;
  --undecided: #a3acb9; --series-0: #7fa9e6; --series-1: #ec9a5f; --series-2: #6fc083; --series-3: #dd86ab;
  --series-4: #a99be6; --series-5: #c6a877; --series-6: #69c5d2; --series-7: #b5b5b5; --series-rest: #5d6570; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 0 auto;
  max-width: 1000px; padding: 24px 20px 60px; overflow-wrap: break-word; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 10px; }
h3 { font-size: 15px; margin: 18px 0 6px; }
.quiet { color: var(--muted); } p { margin: 6px 0; } .lines { white-space: pre-wrap; }
.badge { display: inline-block; border: 1px solid currentColor; border-radius: 4px; padding: 1px 8px;
  font-weight: 600; }
.supported { color: var(--better); } .refuted, .invalid { color: var(--worse); } .undecided { color: var(--undecided); }
.wide { overflow-x: auto; } svg { max-width: none; color: var(--text); display: block; }
.panels { display: flex; flex-wrap: wrap; gap: 8px 16px; }
table { border-collapse: collapse; font-size: 14px; } td, th { text-align: left; padding: 4px 14px 4px 0;
  vertical-align: top; border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums; }
th { font-weight: 600; } tr.strong td { font-weight: 600; } ul { padding-left: 20px; margin: 6px 0; }
pre { background: var(--raised); padding: 12px; overflow-x: auto; font-size: 13px; } a { color: var(--accent); }
summary { cursor: pointer; }
@media print { body { max-width: none; padding: 0; } .wide, pre { overflow: visible; } pre { white-space: pre-wrap; }
  svg { max-width: 100%; height: auto; } h2, h3 { break-after: avoid; } tr, svg { break-inside: avoid; }
  a[data-from] { display: none; } :root { color-scheme: light; } }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What a person said of the experiment."""

    text: str
    by: str = ""
    ts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """What a report is made from."""

    record: ExperimentRecord
    page: PageFacts
    remarks: Sequence[Remark] = ()
    why_invalid: str | None = None


def write_report(facts: ReportFacts, path: Path) -> Path:
    """Write the report; a file there that is no report is not overwritten."""
    if path.is_dir():
        raise EvsysError(f"{path} is a folder; give the name of a file, such as {path / 'report.html'}")
    if path.exists():
        with open(path, "rb") as handle:
            # The head is enough to know our own file; what else lies there may be of any size.
            if GENERATOR.encode() not in handle.read(HEAD_BYTES):
                raise EvsysError(f"{path} exists and is no report of evsys; choose another name or move it away")
    try:
        return write_text(path, report_html(facts))
    except OSError as exc:
        raise EvsysError(f"{path} cannot be written: {exc.strerror}; choose another place with --html") from exc


def report_html(facts: ReportFacts) -> str:
    """The whole page."""
    page, record = facts.page, facts.record
    verdict = page.verdict
    sections = {
        "Hypothesis": _hypothesis(page),
        "Conclusion": _conclusion(facts),
        "Arms": [_figure(forest_svg(verdict), plan_forest(verdict).notes) if verdict else "", _table(arms_table(page))],
        "Learning curves": _curves(page),
        "Benchmark scores": [_table(scores_table(page))],
        "Failed and unscored": [_list(failure_texts(page))],
        "Stages": _stages(page),
        "Integrity": [_list(integrity_texts(facts)), *(_paragraph(text) for text in selection_texts(page))],
        "Setup": [_table(setup_table(page))],
        "Deployments": [_list(deployment_texts(page))],
        "Cost and time": [_table(cost_table(page))],
        "Every evaluation": _fold("evaluations", _table(evaluations_table(page))),
        "Config": _fold("the config as it was run", f"<pre>{_text(to_json(record.config, indent=2))}</pre>"),
    }
    statuses = Counter(run.status for run in page.runs)
    states = ", ".join(f"{number} {status}" for status, number in statuses.items()) or "none"
    when = f", {record.ts[:16].replace('T', ' ')} UTC" if record.ts else ""
    body = [f"<h1>{_text(page.name)}</h1>"]
    counts = f"{count(len(page.conclusion.arms), 'arm')}, {count(len(page.runs), 'run')}: {states}{when}"
    body.append(f'<p class="quiet">{_text(counts)}</p>')
    body += [_paragraph(page.description)] if page.description.strip() else []
    body += [_paragraph(f"A child of the experiment {page.parent}.")] if page.parent else []
    if facts.why_invalid is not None:
        body.append(f'<p><span class="badge invalid">invalid</span> {_text(facts.why_invalid)}</p>')
    for title, parts in sections.items():
        if inside := "".join(parts):
            body.append(f"<section><h2>{title}</h2>{inside}</section>")
    body.append(
        f'<p><a hidden data-from="record" type="application/json" download="{_text(page.file_name)}.json">'
        "Download the record as JSON</a></p>"
    )
    # Only our own script runs, and nothing is fetched: records hold texts of models, and a report is sent around.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(page.name)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + f'\n<script type="application/json" id="record">{_data(record)}</script>\n<script>{SCRIPT}</script>\n'
        "</body></html>\n"
    )


def _data(record: ExperimentRecord) -> str:
    """The record as JSON that cannot end its element: `<` and `>` are escapes, which JSON reads back."""
    text = to_json(record.as_dict(), indent=1)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(text: str) -> str:
    return escape(visible(str(text)), quote=True)


def _paragraph(text: str) -> str:
    return f'<p class="lines">{_text(text.strip())}</p>'


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _table(table: PageTable) -> str:
    if not table.rows:
        return ""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.head)
    rows = []
    for row in table.rows:
        strong = ' class="strong"' if row[0] == table.strong else ""
        rows.append(f"<tr{strong}>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>")
    note = f'<p class="quiet">{_text(table.note)}</p>' if table.note else ""
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table>{body}</table></div>{note}'


def _figure(svg: str, notes: Iterable[str]) -> str:
    return f'<div class="wide">{svg}</div><p class="quiet">{_text("; ".join(notes))}</p>' if svg else ""


def _fold(what: str, inside: str) -> list[str]:
    return [f"<details><summary>Show {what}</summary>{inside}</details>"] if inside else []


def _hypothesis(page: PageFacts) -> list[str]:
    if not page.hypothesis:
        return [_paragraph("None was given (metadata.hypothesis).")]
    parts = [_paragraph(page.hypothesis)]
    if judged := page.conclusion.findings.hypothesis_result:
        badge = f'<span class="badge {_text(judged.outcome)}">{_text(judged.outcome)}</span>'
        parts.append(f"<p>{badge} {_text(judged.why)}.</p>")
    words = page.conclusion.findings.hypothesis_in_words
    return [*parts, _paragraph(words)] if words else parts


def _conclusion(facts: ReportFacts) -> list[str]:
    """The machine's lines, an indented one below the line before it; then what people added."""
    items: list[str] = []
    for line in verdict_texts(facts.page):
        if line.startswith("  ") and items:
            items[-1] += f"<br><span class='quiet'>{_text(line.strip())}</span>"
        else:
            items.append(_text(line.strip()))
    parts = [f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"] if items else []
    for remark in facts.remarks:
        who = f"{remark.by or 'someone'}, {remark.ts}" if remark.ts else remark.by or "someone"
        parts.append(f"<h3>Conclusion of {_text(who)}</h3>{_paragraph(remark.text)}")
    return parts


def _curves(page: PageFacts) -> list[str]:
    panels = curves_of(page.arms, page.journal)
    order = colour_order(list(page.arms), page.verdict)
    failed = [arm for arm, runs in page.arms.items() if all(run.status == "failed" for run in runs)]
    units = score_units(page.arms)
    drawn = [
        curve_svg(name, arms, order=order, failed=failed, unit=units.get(name, "")) for name, arms in panels.items()
    ]
    if not any(drawn):
        return []
    seeds = max(len(curves) for arms in panels.values() for curves in arms.values())
    how = f"lines: means of up to {seeds} seeds; shaded: lowest to highest seed" if seeds > 1 else "one seed per arm"
    legend = f'<div class="wide">{legend_svg(order, failed)}</div>' if len(order) > 1 else ""
    return [f'<div class="panels">{"".join(drawn)}</div>', legend, f'<p class="quiet">{_text(how)}</p>']


def _stages(page: PageFacts) -> list[str]:
    tables = stage_tables(page)
    parts = [f"<h3>{_text(arm)}</h3>{_table(table)}" for arm, table in tables.items()]
    return [*parts, _paragraph(" ".join(STAGES_NOTE))] if parts else []


def integrity_texts(facts: ReportFacts) -> list[str]:
    """What limits the trust in the scores: overlap of rows and tasks, selection on test tasks, warnings."""
    record, texts = facts.record, leakage_lines(facts.page.arms)
    texts += [str(one["text"]) for one in record.test_selection if one.get("text")]
    texts += [" ".join(warning.split()) for warning in record.warnings]
    texts += [f"unread setting: {path}" for path in record.unread_settings if f"unread setting: {path}" not in texts]
    if record.judged_again and record.judged_again.first:
        first = record.judged_again.first.baseline_arm or "none"
        texts.append(f"Judged again on {record.judged_again.ts[:10]}: the baseline arm was {first} before.")
    errors = sum(score.n_errors for run in facts.page.runs for one in run.evals for score in one.scores[:1])
    texts += [f"{count(errors, 'rollout')} of the evaluations errored; they count as failures."] if errors else []
    return list(dict.fromkeys(texts)) or ["No overlap, test selection, warning or errored rollout is recorded."]


def evaluations_table(page: PageFacts) -> PageTable:
    """A row per run, evaluation and metric; hosted models last."""
    rows = []
    for arm, runs in page.arms.items():
        for run in runs:
            for one in run.evals:
                step = "final" if one.step is None else str(one.step)
                name = run.run_id.rpartition("/")[2]
                where = f"{one.split}/{one.name}"
                cells = [arm, name, where, step]
                rows += [[*cells, score.metric, benchmark_score_text(score, one.training_mark)] for score in one.scores]
                rows += [[*cells, "-", f"not scored ({' '.join(one.error.split())})"]] if one.error else []
    for model in page.models:
        where = f"{model.result.split}/{model.result.name}"
        rows += [[model.model, "-", where, "-", s.metric, benchmark_score_text(s)] for s in model.result.scores]
    return PageTable(head=["arm", "run", "benchmark", "step", "metric", "score"], rows=rows)
