"""`evsys history`, `show`, `report`, `compare`, `judge` and `context`: past experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.options import (
    NAMED,
    POSITIVE,
    HistoryPlace,
    complete_experiments,
    experiment_argument,
    import_option,
    place_options,
    verb,
)
from evsys_sdk.cli.output import print_json, print_table, print_text, prints_to_stderr, short_path
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.history.compare import Compared
    from evsys_sdk.history.digest import ArmDigest, Digest
    from evsys_sdk.history.history import ExperimentEntry


@verb("history")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="only those with this tag; repeatable")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    metavar="STATUS",
    help="only those: completed, partial, failed, cancelled, running, interrupted, invalid, unreadable; repeatable",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME[>=X]",
    help="only those with an arm that has this metric, and within the bound: 'pass@1>=0.5', 'final_loss<0.1'; the mean "
    "over an arm's seeds counts; repeatable",
)
@click.option("--limit", type=POSITIVE, metavar="N", help="at most N")
@place_options
def history(
    tags: tuple[str, ...], statuses: tuple[str, ...], metrics: tuple[str, ...], limit: int | None, place: HistoryPlace,
    as_json: bool,
) -> int:  # fmt: skip
    """List experiments from disk, newest first: those that the workspace's index knows and those in ./outputs.
    Rehearsals (--dry) are not listed."""
    from evsys_sdk.operations.history import list_experiments

    found = list_experiments(place, tags=tags, statuses=statuses, metrics=metrics, limit=limit)
    if as_json:
        print_json(found.plain())
    elif found.entries:
        header = ["when", "name", "status", "runs", "metric", "best", "tags"]
        print_table(header, [_cells(entry) for entry in found.entries])
        if found.left_out:
            print(f"({found.left_out} more; --limit)")
        for one in found.looks:
            if one.n_arms > 1:
                print_text(f"{'warning' if one.is_spent else 'selected on'}: {one}")
    elif found.n_known:
        print(f"none of the {found.n_known} experiments fits")
    else:
        print("no experiment is known here; evsys run makes one, --dir looks through a folder")
    return EXIT_OK


def _cells(entry: ExperimentEntry) -> list[str]:
    from evsys_sdk.format import shown

    digest, top = entry.digest, entry.digest.top
    statuses = [status for arm in digest.arms for status in arm.statuses]
    done = sum(status in ("completed", "pruned") for status in statuses)
    best = "-"
    if entry.state != "running" and digest.scored and not digest.selects:
        best = "(test, not ranked)"  # a score on a test benchmark selects no arm; `evsys show` reports it
    elif entry.state != "running" and digest.scored and top and top.mean is not None:
        named = f" {top.arm}" if len(digest.arms) > 1 else ""
        lost = f"{len(top.scores)} of {len(top.statuses)} seeds" if len(top.scores) < len(top.statuses) else ""
        unproven = "not proven best" if digest.best_arm is None and len(digest.scored) > 1 else ""
        marks = [top.errors if top.has_many_errors else "", top.training_mark, lost, unproven]
        marked = "; ".join(mark for mark in marks if mark)
        best = f"{shown(top.mean, unit=digest.unit)}{named}{f' ({marked})' if marked else ''}"
    elif entry.state != "running" and digest.metric and digest.arms:
        unscored = [arm for arm in digest.arms if arm.why_unscored]
        errors = next((f" ({arm.errors})" for arm in unscored if arm.errors), "")
        best = f"no score{errors}" if unscored else "-"
    runs = f"{done}/{len(statuses)}" if statuses else "-"
    return [entry.date, entry.name, entry.status, runs, digest.metric or "-", best, ", ".join(digest.tags) or "-"]


@verb("show")
@experiment_argument(f"{NAMED} (default: the newest experiment)", required=False)
@place_options
def show(experiment: str | None, place: HistoryPlace, as_json: bool) -> int:
    """Show one experiment. With --json also its whole record, the config included."""
    from evsys_sdk.operations.history import show_experiment

    shown = show_experiment(place, experiment)
    if as_json:
        print_json(shown.plain())
        return EXIT_OK
    print_entry(shown.found.entry, str(shown.record.get("conclusion") or ""))
    for run in shown.progress:
        print(f"  {run.run}: {run.status or 'not ended'}, step {run.step}")
    if shown.deployments:
        print("deployments:")
    for one in shown.deployments:
        print_text(f"{one.time} {one.line}", indent="  ")
    return EXIT_OK


def print_entry(entry: ExperimentEntry, conclusion: str) -> None:
    """An experiment from question to answer."""
    digest, notes = entry.digest, entry.notes
    took = "" if digest.seconds is None else f", {digest.seconds:.1f} s"
    print(f"{entry.name}: {entry.status} ({entry.date}{took})")
    if notes.why_invalid is not None:
        print(f"INVALID: {notes.why_invalid} (the machine says: {entry.state})")
    for label, text in (
        ("hypothesis", digest.hypothesis),
        ("it was", digest.outcome or ""),
        ("tags", ", ".join(digest.tags)),
        ("child of", digest.parent or ""),
        ("cut to", f"{digest.max_steps} steps" if digest.max_steps else ""),
        *digest.setup.items(),
        ("measured", f"{', '.join(digest.measured)} ({digest.mode})" if digest.measured else ""),
        (
            f"before training ({digest.start})" if digest.start else "untrained",
            # Where every rollout errored there is a mark and no score.
            _numbers({**dict.fromkeys(digest.untrained_marks), **digest.untrained}, digest, digest.untrained_marks),
        ),
    ):
        if text:
            print_text(f"{label}: {text}")
    if any(arm.statuses for arm in digest.arms):
        print(f"{len(digest.arms)} arm{'s' if len(digest.arms) > 1 else ''}:")
        for arm in digest.arms:
            print_text(_arm_text(arm, digest), indent="  ")
    texts = [("conclusion:", conclusion)] if conclusion else []
    texts += [(f"conclusion of {note.by or 'someone'}, {note.ts}:", note.text) for note in notes.conclusions]
    for title, text in texts:
        print(title)
        print_text(text, indent="  ")
    if notes.earlier:
        print(f"({notes.earlier} notes on a result that has been replaced since; see the notes file)")
    for warning in digest.warnings:
        print_text(f"warning: {warning}")
    if entry.problem:
        print_text(f"problem: {entry.problem}")
    print(f"record: {short_path(entry.record)}{'' if entry.record.exists() else ' (not yet written)'}")


def _numbers(scores: Mapping[str, float | None], digest: Digest, *marks: Mapping[str, str]) -> str:
    """`val/tools/pass@1 0.050, test/tools/pass@1 0.042 (8 of 60 rollouts errored; on training rows)`."""
    from evsys_sdk.format import shown

    texts = []
    for key, value in sorted(scores.items(), reverse=True):
        marked = "; ".join(mark[key] for mark in marks if key in mark)
        number = "no score" if value is None else shown(value, unit=digest.units.get(key, ""))
        texts.append(f"{key} {number}{f' ({marked})' if marked else ''}")
    return ", ".join(texts)


def _arm_text(arm: ArmDigest, digest: Digest) -> str:
    from evsys_sdk.format import interval_text, number_text

    done, n = arm.statuses.count("completed"), len(arm.statuses)
    state = f"{done} of {n} seeds completed" if n > 1 else "".join(arm.statuses)
    parts = [f"{arm.arm}: {f'{arm.errors}; ' if arm.has_many_errors else ''}{state}"]
    if arm.mean is not None:
        seeds = (
            f" (seeds {', '.join(number_text(one, unit=digest.unit) for one in arm.scores)})"
            if len(arm.scores) > 1
            else ""
        )
        score = interval_text(arm.mean, arm.low, arm.high, unit=digest.unit)
        covers = f" (95 % over {arm.covers})" if arm.covers else ""
        parts.append(f"{digest.metric} {score}{covers}{seeds}")
        parts += [arm.errors] if arm.n_errors and not arm.has_many_errors else []
        parts += [arm.training_mark] if arm.training_mark else []
    others = {key: value for key, value in arm.metrics.items() if "/" in key and key not in digest.measured}
    parts += [_numbers(others, digest, arm.error_marks, arm.training_marks)] if others else []
    parts += [arm.verdict] if arm.verdict else []
    parts += [f"needs {arm.needs}"] if arm.needs else []
    parts += [f"not ranked: {arm.why_unranked}"] if arm.why_unranked else []
    own = f" [{', '.join(f'{key}={value}' for key, value in arm.own.items())}]" if arm.own else ""
    return ", ".join(parts) + own + (f" ({arm.error})" if arm.error else "")


@verb("report")
@experiment_argument(f"{NAMED} (default: the newest experiment)", required=False)
@click.option("--html", metavar="FILE", help="the file to write (default: <experiment>.html beside the record)")
@place_options
def report(experiment: str | None, html: str | None, place: HistoryPlace, as_json: bool) -> int:
    """Write one experiment as a self-contained HTML file: hypothesis, verdict, arms, figures, scores, config and the
    record as data. It needs no server and nothing from elsewhere. A file that is no report is not overwritten."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.record.layout import stem_of
    from evsys_sdk.record.models import ExperimentRecord
    from evsys_sdk.report.html import Remark, ReportFacts, write_report
    from evsys_sdk.report.recorded import recorded_facts

    entry = place.find_or_newest(experiment).entry
    record = ExperimentRecord.load(entry.record)
    if record is None:
        raise EvsysError(f"{entry.name} is {entry.state} and has no record yet; evsys status shows how far it is")
    facts = ReportFacts(
        record=record,
        page=recorded_facts(record, entry.record),
        remarks=[Remark(text=note.text, by=note.by, ts=note.ts) for note in entry.notes.conclusions],
        why_invalid=entry.notes.why_invalid,
    )
    path = write_report(facts, Path(html) if html else entry.record.with_name(f"{stem_of(entry.record)}.html"))
    if as_json:
        print_json({"experiment": entry.name, "record": str(entry.record), "report": str(path.absolute())})
    else:
        print(f"wrote {short_path(path)}")
    return EXIT_OK


@verb("compare")
@click.argument(
    "experiments",
    nargs=-1,
    required=True,
    metavar="EXPERIMENT...",
    shell_complete=complete_experiments,
    help="a name, the beginning of one, or a path; name:arm for one arm of it",
)
@click.option("--metric", metavar="NAME", help="judge by this metric (default: the success metric)")
@import_option
@place_options
def compare(
    experiments: tuple[str, ...], metric: str | None, imports: tuple[str, ...], place: HistoryPlace, as_json: bool
) -> int:
    """What differs in the settings, the scores side by side, and a verdict on the tasks that they share: paired task by
    task, corrected for the number of comparisons, the first one named as the baseline. Of an experiment its best arm is
    taken, or all arms where none is best."""
    from evsys_sdk.operations.history import compare_experiments, plain_compared

    with prints_to_stderr():
        found = compare_experiments(place, experiments, metric=metric, imports=imports)
    if as_json:
        print_json(plain_compared(found))
    else:
        print_compared(found)
    return EXIT_OK


def print_compared(found: Compared) -> None:
    """Settings that differ, scores and verdicts, side by side."""
    from evsys_sdk.errors import shorten
    from evsys_sdk.report.verdict_text import verdict_lines

    labels = [side.label for side in found.sides]
    print("settings that differ:" if found.settings else "the settings are the same")
    if found.settings:
        rows = [
            [place, *("(not set)" if value is None else shorten(str(value), 40) for value in values)]
            for place, values in found.settings.items()
        ]
        print_table(["", *labels], rows)
    if found.scores:
        print("\nscores (means over seeds):")
        rows = [[key, *found.score_texts(key)] for key in found.scores]
        print_table(["", *labels], rows)
    for judged in found.verdicts:
        lower = ", lower is better" if judged.verdict.mode == "min" else ""
        baseline = next((a for a in judged.verdict.arms if a.arm == judged.verdict.baseline_arm), None)
        marked = f" ({baseline.training_mark})" if baseline and baseline.training_mark else ""
        print(f"\n{judged.label} on shared tasks, against {judged.verdict.baseline_arm}{marked}{lower}:")
        for line in verdict_lines(judged.verdict):
            print_text(line, indent="  ")
    if found.notes:
        print()
    for note in found.notes:
        print_text(f"note: {note}")


@verb("judge")
@experiment_argument()
@click.option(
    "--baseline-arm", required=True, metavar="ARM", help="the arm that the others are compared with; it needs a score"
)
@import_option
@place_options
def judge(experiment: str, baseline_arm: str, imports: tuple[str, ...], place: HistoryPlace, as_json: bool) -> int:
    """Compare the arms of a finished experiment with another baseline arm, from the recorded rollouts and without
    training. Rewrites the record, the page and the runs' conclusions; the conclusion says that the baseline was chosen
    after the results were known."""
    from evsys_sdk.experiment.rejudge import rejudge
    from evsys_sdk.history.history import read_record
    from evsys_sdk.operations.place import import_metrics

    entry = place.find(experiment).entry
    with prints_to_stderr():
        # The experiment's metrics may be those of modules that its config imported.
        recorded = [str(name) for name in (read_record(entry).get("config") or {}).get("imports") or []]
        import_metrics(imports, recorded)
        found = rejudge(entry, baseline_arm)
    if as_json:
        about = {
            "experiment": found.entry.name,
            "record": str(found.entry.record),
            "baseline_arm": found.baseline_arm,
            "baseline_arm_before": found.before,
            "best_arm": found.conclusion.best_arm,
            "conclusion": found.conclusion.text,
        }
        print_json({**about, **found.conclusion.findings.as_dict()})
    else:
        print_text(found.conclusion.text)
        print(f"record: {short_path(found.entry.record)}")
    return EXIT_OK


@verb(
    "context",
    epilog="Tokens are estimated on the high side, the same for every model: one for every 5 letters begun of a word, "
    "one for every digit, any other sign and the end of a line.",
)
@click.option("--tokens", type=POSITIVE, default=4000, metavar="N", help="at most N tokens (default: 4000)")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="only experiments with this tag")
@place_options
def context(tokens: int, tags: tuple[str, ...], place: HistoryPlace, as_json: bool) -> int:
    """Print what was tried, the leaderboard of kept results, dead ends, the noise floor and open questions, within a
    number of tokens. Invalid experiments are named and not built on."""
    from evsys_sdk.history.context import context_text, make_context
    from evsys_sdk.operations.history import tagged_history

    known = tagged_history(place, tags)
    if as_json:
        print_json(make_context(known, tokens))
    else:
        print(context_text(known, tokens), end="")
    return EXIT_OK
