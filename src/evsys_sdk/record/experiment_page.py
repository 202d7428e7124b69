"""The page of an experiment: `<name>.experiment.md`, what a person reads first.

In: what the experiment came to. Out: one Markdown file beside its record, and figures where matplotlib is installed. It
is made from the record and adds no claim of its own; if it cannot be made, the run does not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk import atomic
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, MANY_ERRORS, MODEL_ROLLOUTS_FILE, UNTRAINED
from evsys_sdk.errors import FOREIGN, Cancelled, EvsysError
from evsys_sdk.logs import get_logger
from evsys_sdk.numbers import amount, shown, span
from evsys_sdk.protocols import RunResult, Score
from evsys_sdk.record import figures
from evsys_sdk.record.conclusion import ArmSummary, Conclusion, ModelScore, metric_key, score_keys
from evsys_sdk.record.run_steps import Totals, totals
from evsys_sdk.record.setup import setup_of
from evsys_sdk.record.stages import BEFORE, StageRow, stage_names, stage_rows
from evsys_sdk.record.stored import run_result
from evsys_sdk.registry import lower_is_better
from evsys_sdk.score_names import is_test_score, names_metric

PAGE_FILE = "experiment.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What there is to tell."""

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
    budget: Mapping[str, Any] | None = None
    warnings: Sequence[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: Any, result: Any, file_name: str, settings: Mapping[str, Any]) -> PageFacts:
        """Of an `ExperimentConfig`, the same as plain `settings`, and an `ExperimentResult`."""
        return cls(
            name=config.name,
            file_name=file_name,
            folder=result.output_dir,
            conclusion=result.conclusion,
            runs=result.runs,
            seconds=result.seconds,
            description=config.description,
            parent=config.parent_experiment_id,
            hypothesis=str(config.metadata.hypothesis or ""),
            setup=setup_of(settings),
            models=result.models,
            budget=result.budget,
            warnings=result.warnings,
        )

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self.conclusion.findings.data.get("verdict")
        return found

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
    try:
        return atomic.write_text(path, page_text(facts, figures.draw(facts.arms, facts.verdict, _place(facts))))
    except Cancelled:
        raise
    except FOREIGN as exc:
        say = "the page %s could not be written (the record is whole): %s: %s"
        get_logger(__name__).warning(say, path, type(exc).__name__, exc)
        return None


def _place(facts: PageFacts) -> figures.Place:
    return figures.Place(folder=facts.folder, file_name=facts.file_name, journal=facts.journal, title=facts.name)


def page_text(facts: PageFacts, drawn: figures.Drawn) -> str:
    """The whole page."""
    parts = [
        [f"# {facts.name}", "", *_paragraph(facts.description), *_descent(facts), _counts(facts)],
        _section("Hypothesis", _hypothesis(facts)),
        _section("Verdict", _verdict_lines(facts)),
        _section("Setup", _table(["what", "value"], [[name, text] for name, text in facts.setup.items()])),
        _section("Arms", _arm_table(facts)),
        _section("Scores", _score_table(facts)),
        _section("Failed and unscored", _troubles(facts)),
        _section("Stages", _stage_tables(facts)),
        _section("What was chosen on what", _selection(facts)),
        _section("Cost and time", _cost(facts)),
        _section("Figures", _figure_lines(drawn)),
        _section("Where the records lie", _records(facts)),
    ]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    text = "\n".join(lines).rstrip()
    return ["", f"## {title}", "", *text.splitlines()] if text else []


def _paragraph(text: str) -> list[str]:
    return [text.strip(), ""] if text.strip() else []


def _descent(facts: PageFacts) -> list[str]:
    return _paragraph(f"A child of the experiment `{facts.parent}`." if facts.parent else "")


def _counts(facts: PageFacts) -> str:
    by_status: dict[str, int] = {}
    for run in facts.runs:
        by_status[run.status] = by_status.get(run.status, 0) + 1
    states = ", ".join(f"{number} {status}" for status, number in by_status.items())
    return f"{_many(len(facts.conclusion.arms), 'arm')}, {_many(len(facts.runs), 'run')}: {states or 'none'}."


def _hypothesis(facts: PageFacts) -> list[str]:
    if not facts.hypothesis:
        return ["None was given (`metadata.hypothesis`)."]
    judged = facts.conclusion.findings.data.get("hypothesis_result")
    outcome = [f"**{judged['outcome']}**: {judged['why']}."] if judged else []
    in_words = facts.conclusion.findings.data.get("hypothesis_in_words")
    return [*_paragraph(facts.hypothesis), *outcome, *([in_words] if in_words else [])]


def _verdict_lines(facts: PageFacts) -> list[str]:
    """The conclusion as a list, but for the hypothesis, which has been told; what is indented belongs to the line
    before."""
    told = facts.conclusion.findings.data.get("hypothesis_in_words")
    lines = facts.conclusion.text.removeprefix(f"Hypothesis: {facts.hypothesis}").splitlines()
    lines = [line for line in lines if line != told]
    return [f"  - {line.strip()}" if line.startswith("  ") else f"- {line}" for line in lines if line.strip()]


def _arm_table(facts: PageFacts) -> list[str]:
    judged = {arm["arm"]: arm for arm in (facts.verdict or {}).get("arms", [])}
    head = ["arm", "status", "seeds", facts.conclusion.metric or "score", "tasks"]
    rows = [_arm_row(arm, judged.get(arm.arm), facts) for arm in facts.conclusion.arms]
    against = {
        "the baseline arm": [_against_baseline(judged.get(arm.arm), facts) for arm in facts.conclusion.arms],
        "the untrained model": [_against(judged.get(arm.arm), "vs_untrained", facts) for arm in facts.conclusion.arms],
    }
    for whom, cells in against.items():
        if any(_tells(cell) for cell in cells):
            head.append(f"against {whom}")
            rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return _table(head, rows)


def _arm_row(arm: ArmSummary, judged: Mapping[str, Any] | None, facts: PageFacts) -> list[str]:
    done, n = arm.statuses.count("completed"), len(arm.statuses)
    status = arm.statuses[0] if len(set(arm.statuses)) == 1 else f"{done} of {n} completed"
    is_best = arm.arm == facts.conclusion.best_arm and len(facts.conclusion.arms) > 1
    name = f"**{arm.arm}**" if is_best else arm.arm
    seeds = str(n) if done == n or n == 1 else f"{done} of {n}"
    if not judged or judged["mean"] is None:
        score = shown(arm.mean) if arm.scores else "not ranked" if arm.why_unranked else "-"
        return [name, status, seeds, score, "-"]
    # Seeds that completed without a score are none of those that the score is over.
    seeds = str(n) if judged["n_seeds"] == n else f"{judged['n_seeds']} of {n}"
    score, errors = _value(judged["mean"], judged["low"], judged["high"]), judged.get("n_errors") or 0
    told = f"{errors:,} of {judged['n_rollouts']:,} rollouts errored" if errors else ""
    many = errors and errors >= MANY_ERRORS * judged["n_rollouts"]
    score = f"{told}; {score}" if many else f"{score}, {told}" if told else score
    return [name, status, seeds, score, str(judged["n_tasks"])]


def _against_baseline(judged: Mapping[str, Any] | None, facts: PageFacts) -> str:
    """Where there is one arm only, it is nobody's baseline."""
    if judged and facts.verdict and len(facts.verdict["arms"]) > 1 and judged["arm"] == facts.verdict["baseline_arm"]:
        return "the baseline"
    return _against(judged, "vs_baseline", facts)


def _against(judged: Mapping[str, Any] | None, whom: str, facts: PageFacts) -> str:
    """`better, +13.3 points [+2.4, +24.2]`."""
    found = judged[whom] if judged else None
    if not found or found["difference"] is None:
        return "-" if not judged or judged["mean"] is None else "not compared"
    if found["difference"] == 0 and (facts.verdict or {}).get("constant") is not None:
        return "the same on every task"
    share = bool((facts.verdict or {}).get("share"))
    ends = [amount(end, share=share, signed=True) for end in (found["low"], found["high"]) if end is not None]
    difference = f"{amount(found['difference'], share=share, signed=True)}{' points' if share else ''}"
    return f"{found['verdict']}, {difference}{f' [{", ".join(ends)}]' if len(ends) == 2 else ''}"


def _tells(cell: str) -> bool:
    return cell not in ("-", "not compared")


def _score_table(facts: PageFacts) -> list[str]:
    """Every benchmark's score of every arm, as means over its completed seeds; the untrained model in the first row."""
    rows: dict[str, dict[str, list[Score]]] = {UNTRAINED: {}}
    for arm, runs in facts.arms.items():
        for run in runs:
            last: dict[str, Score] = {}
            for one in run.extras.get("evals", []):
                for score in one.scores:
                    if one.step == 0:
                        rows[UNTRAINED][metric_key(one, score)] = [score]  # one model, however often it was scored
                    elif run.status == "completed":
                        last[metric_key(one, score)] = score  # that of the final weights comes last
            for key, score in last.items():
                rows.setdefault(arm, {}).setdefault(key, []).append(score)
    rows = {name: found for name, found in rows.items() if found}
    keys = sorted({key for found in rows.values() for key in found}, reverse=True)  # validation before test
    cells = [[name, *(_mean_score(found.get(key, [])) for key in keys)] for name, found in rows.items()]
    note = ["", "Means over the completed seeds, of the final weights. The intervals are in the table of arms."]
    return [*_table(["", *keys], cells), *note] if cells else []


def _mean_score(scores: Sequence[Score]) -> str:
    """`0.906`, `0.450 (20 of 60 rollouts errored)`; errors are those of all seeds."""
    values = [score.value for score in scores if score.value is not None]
    if not values:
        return "not valid" if scores else "-"
    errors, rollouts = sum(score.n_errors for score in scores), sum(score.n_rollouts for score in scores)
    told = f" ({errors:,} of {rollouts:,} rollouts errored)" if errors else ""
    return f"{shown(sum(values) / len(values))}{told}"


def _troubles(facts: PageFacts) -> list[str]:
    """Arms and seeds that have no score, and evaluations that broke, each with its reason."""
    lines = []
    for arm in facts.conclusion.arms:
        seeds: dict[str, list[RunResult]] = {}
        for run in facts.arms[arm.arm]:
            if run.status not in ("completed", "pruned"):
                seeds.setdefault(f"{run.status}{_why(run.error)}", []).append(run)
            for one in run.extras.get("evals", []):
                if one.error:
                    seeds.setdefault(f"{one.split}/{one.name} was not scored{_why(one.error)}", []).append(run)
        lines += [f"- {_seed_names(arm, runs)}: {what}" for what, runs in seeds.items()]
        lines += [f"- {arm.arm}: {' '.join(arm.why_unranked.split())}"] if arm.why_unranked and not seeds else []
    return lines


def _seed_names(arm: ArmSummary, runs: Sequence[RunResult]) -> str:
    """`lr3, seeds 42, 43`; the arm alone where it has one seed."""
    seeds = list(dict.fromkeys(str(run.extras["seed"]) for run in runs if "seed" in run.extras))
    if len(arm.statuses) < 2 or not seeds:
        return arm.arm
    return f"{arm.arm}, seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}"


def _why(error: str | None) -> str:
    return f" ({' '.join(error.split())})" if error else ""


def _stage_tables(facts: PageFacts) -> list[str]:
    lines: list[str] = []
    for arm, runs in facts.arms.items():
        seeds = [run.extras.get("evals", []) for run in runs if run.status == "completed"]
        stages = stage_names(seeds)
        if stages:
            lines += [f"### {arm}", "", *_stage_table(stage_rows(seeds, lower=_lower(facts)), stages), ""]
    if lines:
        lines.append("Means over seeds. Forgetting: the best score after an earlier stage, less that after the last.")
        lines.append("Transfer before a stage: the score after the stage before it, less that of the untrained model.")
        lines.append("Both are turned round where lower is better: positive forgetting is bad, positive transfer good.")
    return lines


def _lower(facts: PageFacts) -> Callable[[str], bool]:
    """Whether less of a metric is better; of the success metric, what the config says."""
    success = str(facts.conclusion.metric or "")
    mode = (facts.verdict or {}).get("mode")
    return lambda metric: mode == "min" if mode and names_metric(success, metric) else lower_is_better(metric)


def _stage_table(rows: Sequence[StageRow], stages: list[str]) -> list[str]:
    known = any(BEFORE in row.scores for row in rows)
    columns = [BEFORE, *stages] if known else stages
    head = ["benchmark", *("untrained" if stage == BEFORE else f"after {stage}" for stage in columns), "forgetting"]
    later = stages[1:] if known else []
    cells = [
        [row.benchmark]
        + [_number(row.scores.get(stage)) for stage in columns]
        + [_number(row.forgetting, signed=True)]
        + [_number(row.transfer.get(stage), signed=True) for stage in later]
        for row in rows
    ]
    return _table([*head, *(f"transfer before {stage}" for stage in later)], cells)


def _selection(facts: PageFacts) -> list[str]:
    """On which scores an arm was, or could be, chosen, and what has to be admitted of that."""
    admitted = facts.conclusion.admitted
    return [_chosen_by(facts), *(line for text in admitted for line in ("", text))]


def _chosen_by(facts: PageFacts) -> str:
    metric, admitted = facts.conclusion.metric, facts.conclusion.admitted
    nothing = "No arm was chosen" if admitted else "Nothing was chosen"
    if metric is None:
        return f"{nothing}: no `success_metric` is named."
    keys = sorted(score_keys(facts.arms, metric))
    n_arms = sum(bool(arm.scores) for arm in facts.conclusion.arms)
    if not keys:
        return f"{nothing}: no run has a score for {metric}."
    if len(facts.conclusion.arms) == 1:
        return f"{nothing}: there is one arm, measured by {', '.join(keys)}."
    where = f"Arms are compared by {', '.join(keys)}."
    tested = sorted({key for run in facts.runs for key in run.metrics if is_test_score(key)} - set(keys))
    if not all(map(is_test_score, keys)):
        aside = f" The test scores ({', '.join(tested)}) took no part in it." if tested and not admitted else ""
        return where + aside + _picked(facts.verdict, n_arms)
    admit = (
        f"would have to admit that the test set was looked at {_many(n_arms, 'time')} to choose one arm, that the "
        "chosen arm's score there flatters it, and that only tasks nobody has looked at can say how good it is"
    )
    if not facts.verdict or facts.verdict["winner"] is None or n_arms < 2:
        return f"{where} That is a test benchmark, and it selects nothing. A choice by it {admit}."
    by_test = f"{where} That is a test benchmark (`allow_test_selection`): whoever cites this choice {admit}."
    return by_test + _picked(facts.verdict, n_arms)


def _picked(verdict: Mapping[str, Any] | None, n_arms: int) -> str:
    winner = (verdict or {}).get("winner")
    if not verdict or not winner or n_arms < 2 or winner["expected"] is None or verdict.get("constant") is not None:
        return ""
    expected = _value(winner["expected"], winner["low"], winner["high"])
    # With an arm above it that is not proven better, the best arm is not the top.
    place = "The best arm" if winner["above"] else f"The highest of {n_arms} scored arms"
    top = f"{place}, {winner['arm']}, scored {shown(winner['observed'])}"
    return f" {top}; {expected} is expected on new tasks (corrected for selection)."


def _cost(facts: PageFacts) -> list[str]:
    own = [run for run in facts.runs if not _record(run).get("reused_from")]
    took = totals(facts.journal, {run.run_id for run in own}) if facts.journal.exists() else Totals()
    in_runs = sum(float(_record(run).get("seconds") or 0.0) for run in own)
    rows = [
        ["training steps", f"{took.steps:,}"],
        ["training tokens", f"{took.tokens:,}" if took.tokens else "not counted"],
        ["money for rollouts", _usd(took)],
        *([f"money for {model.model}", _model_usd(model)] for model in facts.models),
        ["time, start to end", f"{facts.seconds:.1f} s"],
        ["time, all runs together", f"{in_runs:.1f} s"],
    ]
    rows += [[f"budget: {name}", f"{limit:g}"] for name, limit in ((facts.budget or {}).get("limits") or {}).items()]
    lines = _table(["what", "how much"], rows)
    taken = len(facts.runs) - len(own)
    return lines + (["", f"Not counted: {_many(taken, 'run')} taken over from other experiments."] if taken else [])


def _record(run: RunResult) -> dict[str, Any]:
    folder = run.extras.get("run_dir")
    try:
        return run_result(Path(folder)) if folder else {}
    except EvsysError:
        return {}


def _usd(took: Totals) -> str:
    unknown = f", the price of {took.unpriced:,} rollouts is not known" if took.unpriced else ""
    return f"{took.usd:.4f} USD{unknown}"


def _model_usd(model: ModelScore) -> str:
    return "not known" if model.cost_usd is None else f"{model.cost_usd:.4f} USD"


def _figure_lines(drawn: figures.Drawn) -> list[str]:
    pictures = [f"![{what}]({file})" for what, file in drawn.files.items()]
    return [line for picture in pictures for line in (picture, "")][:-1] + ([drawn.note] if drawn.note else [])


def _records(facts: PageFacts) -> list[str]:
    name = facts.file_name
    lines = [f"- `{name}.{EXPERIMENT_RESULT_FILE}`: all numbers, the conclusion, the config"]
    lines.append(f"- `{name}.{JOURNAL_FILE}`: every event and every rollout of evaluations")
    if facts.models:
        lines.append(f"- `{name}.{MODEL_ROLLOUTS_FILE}`: what API models answered")
    for run in facts.runs:
        folder = run.extras.get("run_dir")
        if folder:
            lines.append(f"- `{Path(folder).name}/`: {run.run_id.rpartition('/')[2]}, {run.status}")
    return lines + [f"- warning: {' '.join(warning.split())}" for warning in facts.warnings]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)] if rows else []


def _value(mean: float, low: float | None, high: float | None) -> str:
    return shown(mean) + span(low, high)


def _number(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else shown(value, signed=signed)


def _many(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
