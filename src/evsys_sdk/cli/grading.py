"""`evsys verifier test` and `evsys regrade`: can a benchmark be passed without solving it, and what would the scores
be with another verifier?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evsys_sdk.cli.options import (
    POSITIVE,
    WordsOption,
    environment_option,
    group,
    import_option,
    json_option,
    limit_option,
    parse_params,
    quiet_option,
    verb,
)
from evsys_sdk.cli.output import print_json, print_table, prints_to_stderr
from evsys_sdk.cli.suites import SUITE, load_suite
from evsys_sdk.constants import EXIT_BAD_INPUT, EXIT_OK, EXIT_RUN_FAILED
from evsys_sdk.operations.place import import_extensions

if TYPE_CHECKING:
    from evsys_sdk.experiment.regrade import RegradeComparison
    from evsys_sdk.protocols import Score
    from evsys_sdk.verifiers.stress import StressReport

SHOWN = 20
"""Findings that are printed; `--json` gives all."""
SHOWN_CHANGES = 5
"""Changed rollouts that are printed per evaluation; the new record has all."""
WORDS = {"passes": "passes without solving it", "fails": "solves it and fails", "breaks": "breaks the verifier"}


@group("verifier")
def verifier() -> None:
    """Look at verifiers."""


@verifier.command("test")
@click.argument("benchmark", help=SUITE)
@limit_option
@click.option("--concurrency", type=POSITIVE, default=32, metavar="N", help="tasks graded at once (default: 32)")
@environment_option
@import_option
@json_option
def test_verifiers(
    benchmark: str,
    limit: int | None,
    concurrency: int,
    environment: str | None,
    imports: tuple[str, ...],
    as_json: bool,
) -> int:
    """Find tasks that a non-solver passes or the solution fails. Agents that solve nothing (null, empty, echo_prompt,
    long_repeat, answer_list, grader_attack) and an oracle answer every task. Exit code 1 if a non-solver passes, the
    oracle fails, a verifier breaks or a task cannot be read; the other tasks are tried all the same."""
    from evsys_sdk.concurrency import run_async
    from evsys_sdk.experiment.verifier_trials import try_verifiers
    from evsys_sdk.protocols import SANDBOX

    unreadable: dict[str, str] = {}
    with prints_to_stderr():
        import_extensions(imports, environment)
        suite = load_suite(benchmark, on_unreadable=lambda place, exc: unreadable.update({place: str(exc)}))
        tasks = suite.tasks[:limit]
        report = run_async(try_verifiers(tasks, concurrency=concurrency, environment=environment or SANDBOX))
    is_sound = not report.findings and len(report.not_run) < len(tasks) and not unreadable
    n_tasks = len(tasks) + len(unreadable)
    if as_json:
        broken = [{"place": place, "why": why} for place, why in unreadable.items()]
        card = {"benchmark": suite.name, "n_tasks": n_tasks, "ok": is_sound}
        print_json({**card, **asdict(report), "unreadable": broken})
    else:
        print_stress(suite.name, n_tasks, report, unreadable)
    return EXIT_OK if is_sound else EXIT_BAD_INPUT


def print_stress(name: str, n_tasks: int, report: StressReport, unreadable: dict[str, str]) -> None:
    rows = [
        [each.agent, f"{each.passed} of {each.tasks}", "-" if each.mean_reward is None else f"{each.mean_reward:.3f}"]
        for each in report.agents
    ]
    print_table(["agent", "passes", "mean reward"], rows)
    if report.without_solution:
        count = len(report.without_solution)
        where = "`metadata.solution` or solution/solve.sh would tell"
        print(f"no solution is known for {count} of {n_tasks} tasks ({where}), e.g. {report.without_solution[0]}")
    lines = []
    for finding in report.findings:
        seen = finding.error or f"reward {finding.reward:g} for {finding.output!r}"
        lines.append(f"{finding.task_id}: {finding.agent} {WORDS[finding.what]}: {seen}")
    _print_first(lines, "more")
    # One line per reason, with the first task that has it.
    tasks_by_reason: dict[str, list[str]] = {}
    for each in report.not_run:
        tasks_by_reason.setdefault(each.why, []).append(each.task_id)
    lines = [
        f"{ids[0]}: not run here: {why}" + (f" (and {len(ids) - 1} more)" if len(ids) > 1 else "")
        for why, ids in tasks_by_reason.items()
    ]
    _print_first(lines, "more reasons")
    _print_first([f"{place}: cannot be read: {why}" for place, why in unreadable.items()], "more that cannot be read")
    broken = {finding.task_id for finding in report.findings if finding.what == "breaks"}
    weak = {finding.task_id for finding in report.findings} - broken
    tried = n_tasks - len(report.not_run) - len(unreadable)
    if tried == 0:
        print(f"{name}: none of {n_tasks} tasks can run here")
        return
    of = f"{tried} of {n_tasks} tasks tried: " if tried < n_tasks else ""
    more = f", {len(unreadable)} cannot be read" if unreadable else ""
    counts = {"have a weak verifier": len(weak), "have a verifier that could not run": len(broken)}
    said = [f"{count} of {tried} tasks {words}" for words, count in counts.items() if count]
    print(f"{name}: {of}{', '.join(said) or 'nothing found'}{more}")


def _print_first(lines: list[str], more: str) -> None:
    for line in lines[:SHOWN]:
        print(line)
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} {more}; --json gives all")


@verb("regrade")
@click.argument("record", help="a run's or an experiment's directory, or a .jsonl file of rollouts")
@click.option("--benchmark", "--path", metavar="TASKS", help=f"grade by the verifiers of these tasks: {SUITE}")
@click.option("--verifier", metavar="NAME", help="grade by this registered verifier instead of the tasks'")
@click.option(
    "--params", "texts", cls=WordsOption, metavar="KEY=VALUE...", help="its params; or all of them as one JSON object"
)
@click.option("--metrics", cls=WordsOption, metavar="NAME...", help="instead of the record's, e.g. pass@1 mean_reward")
@click.option(
    "--only",
    cls=WordsOption,
    metavar="NAME...",
    help="only these: val, test, eval, train (what was trained on), a benchmark's name, a run's name",
)
@click.option("--config", metavar="FILE", help="the experiment's config, for tasks and imports (default: the record's)")
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="a module of yours that registers verifiers or metrics, where no config names it",
)
@click.option("--out", metavar="DIR", help="where the new record goes (default: beside the old)")
@click.option("--concurrency", type=POSITIVE, default=32, metavar="N", help="rollouts graded at once (default: 32)")
@quiet_option
@json_option
def regrade(
    record: str, benchmark: str | None, verifier: str | None, texts: tuple[str, ...], metrics: tuple[str, ...],
    only: tuple[str, ...], config: str | None, imports: tuple[str, ...], out: str | None, concurrency: int,
    quiet: bool, as_json: bool,
) -> int:  # fmt: skip
    """Grade the rollouts of a record anew, without asking the model again, and compare the scores. Without options the
    tasks of the record's own config are used as they are now; the record itself is not touched. Exit code 2 if an
    evaluation could not be scored."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.experiment.regrade import RegradeRequest, summary
    from evsys_sdk.experiment.regrade import regrade as grade_anew

    if texts and verifier is None:
        raise EvsysError("--params are those of --verifier; name one")
    if len(texts) == 1 and texts[0].lstrip().startswith("{"):
        try:
            params: dict[str, Any] = json.loads(texts[0])
        except ValueError as exc:
            raise EvsysError(f"--params is not valid JSON: {exc}") from exc
    else:
        params = parse_params(
            texts, flag="--params", form="KEY=VALUE or one JSON object", example="partial_credit=true"
        )
    with prints_to_stderr():
        if imports:
            import_extensions(imports)
        request = RegradeRequest(
            target=Path(record),
            benchmark=load_suite(benchmark) if benchmark else None,
            verifier=verifier,
            params=params,
            metrics=list(metrics),
            only=list(only),
            config=config,
            out=Path(out) if out else None,
            concurrency=concurrency,
        )
        report = grade_anew(request)
    if as_json:
        print_json(summary(report, request))
    else:
        for comparison in report.comparisons:
            print_comparison(comparison)
        for note in report.notes:
            print(f"note: {note}")
        print(f"new record: {report.folder} ({report.seconds:.1f} s)")
    return EXIT_OK if all(found.is_valid for found in report.comparisons) else EXIT_RUN_FAILED


def print_comparison(found: RegradeComparison) -> None:
    """One evaluation: the scores before and after, and what changed."""
    from evsys_sdk.errors import shorten
    from evsys_sdk.eval.scoring import is_errored
    from evsys_sdk.experiment.regrade import answer_of
    from evsys_sdk.format import count, shown, span

    stored, changed = found.eval, found.changed
    when = "" if stored.step is None else f" at step {stored.step}"
    stage = f" of stage {stored.stage}" if stored.stage else ""
    counts = f"{count(found.new[0].n_tasks, 'task')}, {count(len(found.pairs), 'rollout')}"
    print(f"{stored.run}  {stored.label}{when}{stage}: {counts}, graded by {', '.join(found.graded_by)}")
    width = max(len(score.metric) for score in found.new)
    for old, new, change in zip(found.old, found.new, found.changes, strict=True):
        difference = ""
        if change.value is not None:
            interval = span(change.low, change.high, unit=new.unit, signed=True)
            difference = f"   change {shown(change.value, unit=new.unit, signed=True)}{interval}"
        scores = _value(new) if old == new and new.value is None else f"{_value(old)} -> {_value(new)}"
        print(f"  {new.metric:<{width}}  {scores}{difference}")
    before, after = (sum(map(is_errored, side)) for side in zip(*((p.old, p.new) for p in found.pairs), strict=True))
    if before or after:
        print(f"  errors: {before} -> {after}")
    if found.without_task:
        print(f"  {count(found.without_task, 'rollout')} left out on both sides: the task is not known")
    up = sum((pair.new.reward or 0.0) > (pair.old.reward or 0.0) for pair in changed)
    down = sum((pair.new.reward or 0.0) < (pair.old.reward or 0.0) for pair in changed)
    print(f"  changed: {len(changed)} of {len(found.pairs)}" + (f" ({up} up, {down} down)" if changed else ""))
    for pair in changed[:SHOWN_CHANGES]:
        sample = pair.old.metadata.get("sample")
        name = pair.old.task_id if sample is None else f"{pair.old.task_id} #{sample}"
        answer = pair.new.error if pair.new.reward is None else shorten(repr(answer_of(pair.new)), 80)
        old_reward, new_reward = ("error" if r is None else f"{r:g}" for r in (pair.old.reward, pair.new.reward))
        print(f"    {name}  {old_reward} -> {new_reward}  {answer}")
    if len(changed) > SHOWN_CHANGES:
        print(f"    ... and {len(changed) - SHOWN_CHANGES} more")


def _value(score: Score) -> str:
    from evsys_sdk.format import score_text

    return (
        f"not valid ({score.error})"
        if score.value is None
        else score_text(score.value, score.low, score.high, unit=score.unit)
    )
