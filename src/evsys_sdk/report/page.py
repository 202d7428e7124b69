"""The page of an experiment: `<name>.experiment.md`, what a person reads first.

In: `PageFacts`. Out: one Markdown file beside the record, and figures where matplotlib is installed. The page is made
from the record and adds no claim; if it cannot be made, the run does not fail. A function per section, in the order of
the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from evsys_sdk import files
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, MODEL_ROLLOUTS_FILE, START, UNTRAINED
from evsys_sdk.errors import FOREIGN, Cancelled, put_on_one_line
from evsys_sdk.format import amount, amount_unit, count, inline_markdown, markdown_text, name_list, score_text, shown
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import EvalResult, RunResult, Score
from evsys_sdk.record.deployments import read_deployments
from evsys_sdk.record.models import RunRecord
from evsys_sdk.registry import lower_is_better
from evsys_sdk.report import figures
from evsys_sdk.report.conclusion import Conclusion, ModelScore, metric_key, score_keys
from evsys_sdk.report.figures import Totals, totals
from evsys_sdk.report.verdict_text import arm_score_text, same_where
from evsys_sdk.score_names import is_test_score, names_metric, suite_label
from evsys_sdk.stats.judge import SAME_EVERYWHERE, SAME_IN_EVERY_RUN
from evsys_sdk.stats.verdict import ArmVerdict, Comparison, Verdict

PAGE_FILE = "experiment.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table of the page, whose texts are not escaped yet: Markdown and HTML do that each in their way."""

    head: list[str]
    rows: list[list[str]]
    note: str = ""
    strong: str | None = None
    """The first cell of the row that stands out: the best arm."""

    def markdown(self) -> list[str]:
        """The lines of the table; none where it has no row."""
        rows = [[f"**{row[0]}**", *row[1:]] if row[0] == self.strong else row for row in self.rows]
        lines = [_line(self.head), _line(["---"] * len(self.head)), *map(_line, rows)] if rows else []
        return [*lines, "", self.note] if lines and self.note else lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(put_on_one_line(str(cell)).replace("|", "\\|") for cell in cells) + " |"


BEFORE = ""
"""The column before the first stage of a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One benchmark and metric along a chain of stages, as means over the seeds that have them. A positive number is
    always good for transfer and bad for forgetting, whether higher or lower scores are better."""

    benchmark: str
    unit: str = ""
    """What the metric is counted in."""
    scores: dict[str, float]
    """Stage (or BEFORE) -> score after it."""
    forgetting: float | None = None
    """The best score after an earlier stage, less the score after the last one."""
    transfer: dict[str, float] = field(default_factory=dict)
    """Stage -> the score after the stage before it, less that of the untrained model (`baseline: true` on the
    benchmark): what the earlier stages gave the benchmark before this stage was trained."""


def stage_names(seeds: Sequence[Sequence[EvalResult]]) -> list[str]:
    """The stages of a chain in their order; none for a run without."""
    names = list(dict.fromkeys(found.stage for evals in seeds for found in evals if found.stage is not None))
    return names if len(names) > 1 else []


def stage_rows(
    seeds: Sequence[Sequence[EvalResult]], *, lower: Callable[[str], bool] = lower_is_better
) -> list[StageRow]:
    """A row per benchmark and metric; metrics that `lower` holds of are turned round for forgetting and transfer."""
    stages = stage_names(seeds)
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    units: dict[str, str] = {}
    for evals in seeds:
        # Of several scores after one stage the last is that of the weights that the stage ended with.
        last: dict[tuple[str, str, str], float] = {}
        for result in evals:
            stage = BEFORE if result.step == 0 else result.stage
            for score in result.scores:
                if stage is not None and score.value is not None:
                    last[suite_label(result.split, result.name), score.metric, stage] = score.value
                    units[score.metric] = score.unit or units.get(score.metric, "")
        for (name, metric, stage), value in last.items():
            values.setdefault((name, metric), {}).setdefault(stage, []).append(value)
    rows = []
    for (name, metric), cells in values.items() if stages else ():
        sign = -1 if lower(metric) else 1
        scores = {stage: fmean(found) for stage, found in cells.items()}
        earlier = [sign * scores[stage] for stage in stages[:-1] if stage in scores]
        final, untrained = scores.get(stages[-1]), scores.get(BEFORE)
        transfer = {
            stage: sign * (scores[before] - untrained)
            for before, stage in pairwise(stages)
            if untrained is not None and before in scores
        }
        forgetting = max(earlier) - sign * final if earlier and final is not None else None
        rows.append(
            StageRow(
                benchmark=f"{name} {metric}",
                unit=units[metric],
                scores=scores,
                forgetting=forgetting,
                transfer=transfer,
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What the page is made from."""

    name: str
    file_name: str
    """The experiment's name as its files have it."""
    folder: Path
    conclusion: Conclusion
    runs: Sequence[RunResult]
    """In the order of the conclusion's arms, their seeds one after the other."""
    seconds: float
    description: str = ""
    parent: str | None = None
    """The experiment that this one was forked from."""
    hypothesis: str = ""
    setup: Mapping[str, str] = field(default_factory=dict)
    """Model, backend, data, algorithm and params in words."""
    models: Sequence[ModelScore] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    """Of the budget, by name."""
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict | None:
        return self.conclusion.findings.verdict

    def judged(self, arm: str) -> ArmVerdict | None:
        """The arm in the verdict."""
        return next((found for found in self.verdict.arms if found.arm == arm), None) if self.verdict else None

    @property
    def before(self) -> str:
        """What the arms were before training."""
        start = self.verdict.start if self.verdict else UNTRAINED
        return "the untrained model" if start == UNTRAINED else start

    @property
    def arms(self) -> dict[str, list[RunResult]]:
        left = iter(self.runs)
        return {arm.arm: [next(left) for _ in arm.statuses] for arm in self.conclusion.arms}

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.file_name}.{JOURNAL_FILE}"


def write_page(facts: PageFacts) -> Path | None:
    """Write the page and its figures; what goes wrong is logged, and None comes back."""
    path = facts.folder / f"{facts.file_name}.{PAGE_FILE}"
    place = figures.Place(folder=facts.folder, file_name=facts.file_name, journal=facts.journal, title=facts.name)
    try:
        return files.write_text(path, page_text(facts, figures.draw(facts.arms, facts.verdict, place)))
    except Cancelled:
        raise
    except FOREIGN as exc:
        say = "the page %s could not be written (the record is whole): %s: %s"
        get_logger(__name__).warning(say, path, type(exc).__name__, exc)
        return None


def page_text(facts: PageFacts, drawn: figures.Drawn) -> str:
    """The whole page."""
    pictures = [f"![{what}]({file})" for what, file in drawn.files.items()]
    sections = {
        "Hypothesis": hypothesis_section(facts),
        "Verdict": verdict_section(facts),
        "Setup": setup_table(facts).markdown(),
        "Arms": arms_table(facts).markdown(),
        "Scores": scores_table(facts).markdown(),
        "Failed and unscored": [f"- {text}" for text in failure_texts(facts)],
        "Stages": stages_section(facts),
        "What was chosen on what": "\n\n".join(selection_texts(facts)).splitlines(),
        "Deployments": [f"- {markdown_text(text)}" for text in deployment_texts(facts)],
        "Cost and time": cost_table(facts).markdown(),
        "Figures": [*(line for picture in pictures for line in (picture, "")), drawn.note],
        "Where the records lie": records_section(facts),
    }
    lines = [f"# {facts.name}", ""]
    if facts.description.strip():
        lines += [markdown_text(facts.description).strip(), ""]
    if facts.parent:
        lines += [f"A child of the experiment `{facts.parent}`.", ""]
    statuses = Counter(run.status for run in facts.runs)
    states = ", ".join(f"{number} {status}" for status, number in statuses.items())
    lines.append(f"{count(len(facts.conclusion.arms), 'arm')}, {count(len(facts.runs), 'run')}: {states or 'none'}.")
    for title, section in sections.items():
        if text := "\n".join(section).rstrip():
            lines += ["", f"## {title}", "", *text.splitlines()]
    # Of images and links only those of the figures are ours.
    return "\n".join(line if line in pictures else inline_markdown(line) for line in lines).rstrip() + "\n"


def hypothesis_section(facts: PageFacts) -> list[str]:
    if not facts.hypothesis:
        return ["None was given (`metadata.hypothesis`)."]
    lines = [markdown_text(facts.hypothesis).strip(), ""]
    if judged := facts.conclusion.findings.hypothesis_result:
        lines.append(f"**{judged.outcome}**: {judged.why}.")
    return [*lines, facts.conclusion.findings.hypothesis_in_words]


def verdict_section(facts: PageFacts) -> list[str]:
    lines = verdict_texts(facts)
    return [markdown_text(f"  - {line.strip()}" if line.startswith("  ") else f"- {line}") for line in lines]


def verdict_texts(facts: PageFacts) -> list[str]:
    """The conclusion line by line, without the hypothesis, which has a section; an indented line belongs to the one
    before."""
    lines = facts.conclusion.text.removeprefix(f"Hypothesis: {facts.hypothesis}").splitlines()
    return [line for line in lines if line.strip() and line != facts.conclusion.findings.hypothesis_in_words]


def setup_table(facts: PageFacts) -> PageTable:
    return PageTable(head=["what", "value"], rows=[[name, text] for name, text in facts.setup.items()])


def arms_table(facts: PageFacts) -> PageTable:
    """A row per arm; the comparisons with the baseline arm and with the untrained model where there are some."""
    verdict, arms = facts.verdict, facts.conclusion.arms
    head = ["arm", "status", "seeds", facts.conclusion.metric or "score", "tasks"]
    rows = []
    for arm in arms:
        judged = facts.judged(arm.arm)
        done, n = arm.statuses.count("completed"), len(arm.statuses)
        status = arm.statuses[0] if len(set(arm.statuses)) == 1 else f"{done} of {n} completed"
        seeds = str(n) if done == n or n == 1 else f"{done} of {n}"
        if verdict and judged and judged.mean is not None:
            # Seeds that completed without a score are none of those that the score is over.
            seeds = str(n) if judged.n_seeds == n else f"{judged.n_seeds} of {n}"
            score = arm_score_text(judged, verdict, with_counts=False)
            tasks = "-" if verdict.per_run else str(judged.n_tasks)
        else:
            score = shown(arm.mean) if arm.scores else "not ranked" if arm.why_unranked else "-"
            tasks = "-"
        rows.append([arm.arm, status, seeds, score, tasks])
    best = facts.conclusion.best_arm if len(arms) > 1 else None
    if verdict is None:
        return PageTable(head=head, rows=rows, strong=best)
    to_baseline, to_untrained = [], []
    for judged in (facts.judged(arm.arm) for arm in arms):
        # A single arm is no baseline.
        is_baseline = judged and len(verdict.arms) > 1 and judged.arm == verdict.baseline_arm
        found = judged.vs_baseline if judged else None
        to_baseline.append("the baseline" if is_baseline else _difference_cell(judged, found, verdict))
        to_untrained.append(_difference_cell(judged, judged.vs_untrained if judged else None, verdict))
    for whom, cells in (("the baseline arm", to_baseline), (facts.before, to_untrained)):
        if set(cells) - {"-", "not compared"}:
            head.append(f"against {whom}")
            rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return PageTable(head=head, rows=rows, strong=best)


def _difference_cell(judged: ArmVerdict | None, found: Comparison | None, verdict: Verdict) -> str:
    """`better, +13.3 points [+2.4, +24.2]`."""
    if not found or found.difference is None:
        return "-" if not judged or judged.mean is None else "not compared"
    if found.why in (SAME_EVERYWHERE, SAME_IN_EVERY_RUN):
        return f"the same{same_where(per_run=verdict.per_run, n_seeds=max(found.n_seeds))}"
    text = f"{found.verdict}, {amount(found.difference, share=verdict.share, unit=verdict.unit, signed=True)}"
    text += amount_unit(share=verdict.share, unit=verdict.unit)
    if found.low is None or found.high is None:
        return text
    low, high = (amount(end, share=verdict.share, unit=verdict.unit, signed=True) for end in (found.low, found.high))
    return f"{text} [{low}, {high}]"


def scores_table(facts: PageFacts) -> PageTable:
    """Every benchmark's score of every arm, as means over its completed seeds; the untrained model in the first row."""
    rows: dict[str, dict[str, list[Score]]] = {UNTRAINED: {}}
    marks: dict[tuple[str, str], str] = {}
    for arm, runs in facts.arms.items():
        for run in runs:
            last: dict[str, Score] = {}
            for one in run.final_evals:
                for score in one.scores:
                    if one.step == 0:
                        rows[UNTRAINED][metric_key(one, score)] = [score]  # one model, however often it was scored
                    elif run.status == "completed":
                        last[metric_key(one, score)] = score  # that of the final weights comes last
                        marks[arm, metric_key(one, score)] = one.training_mark
            for key, score in last.items():
                rows.setdefault(arm, {}).setdefault(key, []).append(score)
    rows = {name: found for name, found in rows.items() if found}
    keys = sorted({key for found in rows.values() for key in found}, reverse=True)  # validation before test
    judged_by = score_keys(facts.arms, facts.conclusion.metric) if facts.conclusion.metric else []
    table = []
    for name, found in rows.items():
        cells = [START if name == UNTRAINED and facts.before == START else name]
        judged = facts.judged(name)
        for key in keys:
            scores = found.get(key, [])
            values = [score.value for score in scores if score.value is not None]
            mean = fmean(values) if values else None
            low, high = interval_over_seeds(scores)
            if judged and key in judged_by and judged.mean is not None and mean is not None:
                # Over tasks and seeds. A mean that differs is over other seeds, and the interval is not its own.
                low, high = (judged.low, judged.high) if shown(judged.mean) == shown(mean) else (low, high)
            text = score_text(
                mean,
                low,
                high,
                unit=next((score.unit for score in scores), ""),
                marks=[marks.get((name, key), "")],
                n_errors=sum(score.n_errors for score in scores),  # of all seeds
                n_rollouts=sum(score.n_rollouts for score in scores),
            )
            cells.append(text if scores else "-")
        table.append(cells)
    note = (
        "Means over the completed seeds, of the final weights, with 95 % intervals: over tasks and seeds for the "
        "metric that arms are judged by, over tasks alone for the others."
    )
    return PageTable(head=["", *keys], rows=table, note=note)


def interval_over_seeds(scores: Sequence[Score]) -> tuple[float | None, float | None]:
    """The mean of the seeds' intervals over tasks, which is as wide as one seed's: all seeds answered the same tasks.
    None where a seed has no interval."""
    ends = [(score.low, score.high) for score in scores if score.low is not None and score.high is not None]
    if not ends or len(ends) < len(scores):
        return None, None
    return fmean(low for low, _ in ends), fmean(high for _, high in ends)


def failure_texts(facts: PageFacts) -> list[str]:
    """Arms and seeds that have no score, and evaluations that broke, each with its reason."""
    lines = []
    for arm in facts.conclusion.arms:
        reasons: dict[str, list[RunResult]] = {}
        for run in facts.arms[arm.arm]:
            if run.status not in ("completed", "pruned"):
                reasons.setdefault(f"{run.status}{_reason(run.error)}", []).append(run)
            for one in run.evals:
                if one.error:
                    when = " before training" if one.step == 0 else ""
                    what = f"{one.split}/{one.name} was not scored{when}{_reason(one.error)}"
                    reasons.setdefault(what, []).append(run)
        for what, runs in reasons.items():  # `lr3, seeds 42, 43`; the arm alone where it has one seed
            seeds = list(dict.fromkeys(str(run.seed) for run in runs if run.seed is not None))
            named = (
                f", seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}" if len(arm.statuses) > 1 and seeds else ""
            )
            lines.append(f"{arm.arm}{named}: {what}")
        if arm.why_unranked and not reasons:
            lines.append(f"{arm.arm}: {' '.join(arm.why_unranked.split())}")
    return lines


def _reason(error: str | None) -> str:
    return f" ({' '.join(error.split())})" if error else ""


def stages_section(facts: PageFacts) -> list[str]:
    """The matrix of each chain, and how to read it."""
    lines = [line for arm, table in stage_tables(facts).items() for line in (f"### {arm}", "", *table.markdown(), "")]
    return [*lines, *STAGES_NOTE] if lines else []


STAGES_NOTE = (
    "Means over seeds. Forgetting: the best score after an earlier stage, less that after the last.",
    "Transfer before a stage: the score after the stage before it, less that of the untrained model.",
    "Both are turned round where lower is better: positive forgetting is bad, positive transfer good.",
)


def stage_tables(facts: PageFacts) -> dict[str, PageTable]:
    """Arm -> scores after each stage of its chain, forgetting and transfer."""
    mode, success = facts.verdict.mode if facts.verdict else None, str(facts.conclusion.metric or "")

    def lower(metric: str) -> bool:
        """Whether less of a metric is better; of the success metric, as the config says."""
        return mode == "min" if mode and names_metric(success, metric) else lower_is_better(metric)

    def cell(value: float | None, row: StageRow, *, signed: bool = False) -> str:
        return "-" if value is None else shown(value, unit=row.unit, signed=signed)

    tables: dict[str, PageTable] = {}
    for arm, runs in facts.arms.items():
        seeds = [run.final_evals for run in runs if run.status == "completed"]
        if not (stages := stage_names(seeds)):
            continue
        rows = stage_rows(seeds, lower=lower)
        known = any(BEFORE in row.scores for row in rows)
        columns, later = ([BEFORE, *stages], stages[1:]) if known else (stages, [])
        head = ["benchmark", *("untrained" if stage == BEFORE else f"after {stage}" for stage in columns), "forgetting"]
        head += [f"transfer before {stage}" for stage in later]
        cells = [
            [row.benchmark]
            + [cell(row.scores.get(stage), row) for stage in columns]
            + [cell(row.forgetting, row, signed=True)]
            + [cell(row.transfer.get(stage), row, signed=True) for stage in later]
            for row in rows
        ]
        tables[arm] = PageTable(head=head, rows=cells)
    return tables


def selection_texts(facts: PageFacts) -> list[str]:
    """On which scores an arm was, or could be, chosen, and what has to be admitted of that."""
    metric, admitted, verdict = facts.conclusion.metric, facts.conclusion.admitted, facts.verdict
    nothing = "No arm was chosen" if admitted else "Nothing was chosen"
    keys = sorted(score_keys(facts.arms, metric)) if metric else []
    n_arms = sum(bool(arm.scores) for arm in facts.conclusion.arms)
    if metric is None:
        text = f"{nothing}: no `success_metric` is named."
    elif not keys:
        text = f"{nothing}: no run has a score for {metric}."
    elif len(facts.conclusion.arms) == 1:
        text = f"{nothing}: there is one arm, measured by {', '.join(keys)}."
    else:
        text = f"Arms are compared by {', '.join(keys)}."
        tested = sorted({key for run in facts.runs for key in run.metrics if is_test_score(key)} - set(keys))
        by_test = all(map(is_test_score, keys))
        may_select = verdict is not None and verdict.winner is not None and n_arms > 1
        if by_test:
            admit = (
                f"would have to admit that the test set was looked at {count(n_arms, 'time')} to choose one arm, that "
                "the chosen arm's score there flatters it, and that only tasks not looked at before can say how good "
                "it is"
            )
            cited = "That is a test benchmark (`allow_test_selection`): a report of this choice"
            unused = "That is a test benchmark, and it selects nothing. A choice by it"
            text += f" {cited if may_select else unused} {admit}."
        elif tested and not admitted:
            text += f" The test scores ({', '.join(tested)}) took no part in it."
        if verdict and (may_select or not by_test):
            text += _expected_score(verdict, n_arms)
    return [text, *admitted]


def _expected_score(verdict: Verdict, n_arms: int) -> str:
    """What to expect of the arm on top; nothing where no arm is, or where its tasks were memorised."""
    winner = verdict.winner
    if winner is None or n_arms < 2 or winner.expected is None or verdict.constant is not None:
        return ""
    if any(arm.training_mark for arm in verdict.arms if arm.arm == winner.arm):
        return ""
    # With an arm above it that is not proven better, the best arm is not the top.
    place = f"The {'lowest' if verdict.mode == 'min' else 'highest'} of {n_arms} scored arms"
    place = "The best arm" if winner.above else "The arm" if winner.ties else place
    tied = f", tied with {name_list(winner.ties)}" if winner.ties else ""
    expected = score_text(winner.expected, winner.low, winner.high, unit=verdict.unit)
    top = f"{place}, {winner.arm}, scored {shown(winner.observed, unit=verdict.unit)}{tied}"
    return f" {top}; {expected} is expected on new tasks (corrected for selection)."


def deployment_texts(facts: PageFacts) -> list[str]:
    """Where the weights were deployed, one sentence each."""
    record = facts.folder / f"{facts.file_name}.{EXPERIMENT_RESULT_FILE}"
    return [f"{one.time}: {one.line}" for one in read_deployments(record)]


def cost_table(facts: PageFacts) -> PageTable:
    records = {run.run_id: found for run in facts.runs if run.run_dir and (found := RunRecord.find(run.run_dir))}
    own = [run for run in facts.runs if run.run_id not in records or not records[run.run_id].reused_from]
    took = totals(facts.journal, {run.run_id for run in own}) if facts.journal.exists() else Totals()
    in_runs = sum(records[run.run_id].seconds for run in own if run.run_id in records)
    unknown = f", the price of {took.unpriced:,} rollouts is not known" if took.unpriced else ""
    rows = [
        ["training steps", f"{took.steps:,}"],
        ["training tokens", f"{took.tokens:,}" if took.tokens else "not counted"],
        ["money for rollouts", f"{took.usd:.4f} USD{unknown}"],
    ]
    for model in facts.models:
        usd = "not known" if model.cost_usd is None else f"{model.cost_usd:.4f} USD"
        rows.append([f"money for {model.model}", usd])
    rows.append(["time, start to end", f"{facts.seconds:.1f} s"])
    rows.append(["time, all runs together", f"{in_runs:.1f} s"])
    rows += [[f"budget: {name}", f"{limit:g}"] for name, limit in facts.limits.items()]
    taken = len(facts.runs) - len(own)
    note = f"Not counted: {count(taken, 'run')} taken over from other experiments." if taken else ""
    return PageTable(head=["what", "how much"], rows=rows, note=note)


def records_section(facts: PageFacts) -> list[str]:
    name = facts.file_name
    lines = [f"- `{name}.{EXPERIMENT_RESULT_FILE}`: all numbers, the conclusion, the config"]
    lines.append(f"- `{name}.{JOURNAL_FILE}`: every event and every rollout of evaluations")
    if facts.models:
        lines.append(f"- `{name}.{MODEL_ROLLOUTS_FILE}`: what API models answered")
    for run in facts.runs:
        if run.run_dir:
            lines.append(f"- `{Path(run.run_dir).name}/`: {run.run_id.rpartition('/')[2]}, {run.status}")
    return lines + [f"- warning: {' '.join(warning.split())}" for warning in facts.warnings]
