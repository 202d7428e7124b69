"""`evsys show`: one experiment, from question to answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.experiments import NAMED, add_place_flags, find_or_newest, plain_entry, short
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.record.digest import ArmDigest, Digest
    from evsys_sdk.record.history import Entry


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "show",
        help="one experiment: hypothesis, arms, scores, conclusions",
        description="Show one experiment. With --json also its whole record, the config included.",
    )
    parser.add_argument("experiment", nargs="?", help=f"{NAMED} (default: the newest experiment)")
    add_place_flags(parser)
    parser.set_defaults(run=show_experiment)


def show_experiment(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from evsys_sdk.record.history import read_record
    from evsys_sdk.record.progress import progress_in

    found = find_or_newest(args, args.experiment)
    entry = found.entry
    progress = progress_in(entry.journal) if entry.state in ("running", "interrupted") else []
    if args.json:
        from evsys_sdk.cli.data import print_json

        told = plain_entry(entry) | {"note": found.note, "progress": [asdict(run) for run in progress]}
        print_json(told | {"record_data": read_record(entry)})
        return EXIT_OK
    for line in _lines(entry, str(read_record(entry).get("conclusion") or "")):
        print(line)
    for run in progress:
        print(f"  {run.run}: {run.status or 'not ended'}, step {run.step}")
    return EXIT_OK


def _lines(entry: Entry, conclusion: str) -> Iterator[str]:
    digest, notes = entry.digest, entry.notes
    took = "" if digest.seconds is None else f", {digest.seconds:.1f} s"
    yield f"{entry.name}: {entry.status} ({entry.date}{took})"
    if notes.why_invalid is not None:
        yield f"INVALID: {notes.why_invalid} (the machine says: {entry.state})"
    for label, text in (
        ("hypothesis", digest.hypothesis),
        ("it was", digest.outcome or ""),
        ("tags", ", ".join(digest.tags)),
        ("child of", digest.parent or ""),
        ("cut to", f"{digest.max_steps} steps" if digest.max_steps else ""),
        *digest.setup.items(),
        ("measured", f"{', '.join(digest.measured)} ({digest.mode})" if digest.measured else ""),
        ("untrained", _numbers(digest.untrained)),
    ):
        if text:
            yield f"{label}: {text}"
    yield from _arm_lines(entry)
    yield from _conclusion_lines(entry, conclusion)
    if notes.earlier:
        yield f"({notes.earlier} notes on a result that has been replaced since; see the notes file)"
    for warning in digest.warnings:
        yield f"warning: {warning}"
    if entry.problem:
        yield f"problem: {entry.problem}"
    yield f"record: {short(entry.record)}{'' if entry.record.exists() else ' (not yet written)'}"


def _arm_lines(entry: Entry) -> Iterator[str]:
    arms = entry.digest.arms
    if arms and any(arm.statuses for arm in arms):
        yield f"{len(arms)} arm{'s' if len(arms) > 1 else ''}:"
        yield from (f"  {_arm_text(arm, entry.digest)}" for arm in arms)


def _numbers(scores: Mapping[str, float]) -> str:
    """`val/tools/pass@1 0.050, test/tools/pass@1 0.042`."""
    from evsys_sdk.numbers import shown

    return ", ".join(f"{key} {shown(value)}" for key, value in sorted(scores.items(), reverse=True))


def _arm_text(arm: ArmDigest, digest: Digest) -> str:
    from evsys_sdk.numbers import shown, span

    done, n, metric = arm.statuses.count("completed"), len(arm.statuses), digest.metric
    first = f"{arm.errors}; " if arm.has_many_errors else ""
    state = f"{done} of {n} seeds completed" if n > 1 else "".join(arm.statuses)
    text = f"{arm.arm}: {first}{state}"
    if arm.mean is not None:
        seeds = f" (seeds {', '.join(f'{score:.3f}' for score in arm.scores)})" if len(arm.scores) > 1 else ""
        interval = f"{span(arm.low, arm.high)} (95 % over {arm.covers})" if arm.covers else ""
        text += f", {metric} {shown(arm.mean)}{interval}{seeds}"
        text += f", {arm.errors}" if arm.n_errors and not arm.has_many_errors else ""
    others = {key: value for key, value in arm.metrics.items() if "/" in key and key not in digest.measured}
    text += f", {_numbers(others)}" if others else ""
    text += f", {arm.verdict}" if arm.verdict else ""
    text += f", needs {arm.needs}" if arm.needs else ""
    text += f", not ranked: {arm.why_unranked}" if arm.why_unranked else ""
    text += f" [{', '.join(f'{key}={value}' for key, value in arm.own.items())}]" if arm.own else ""
    return text + (f" ({arm.error})" if arm.error else "")


def _conclusion_lines(entry: Entry, conclusion: str) -> Iterator[str]:
    if conclusion:
        yield "conclusion:"
        yield from (f"  {line}" for line in conclusion.splitlines())
    for note in entry.notes.conclusions:
        yield f"conclusion of {note.by or 'someone'}, {note.ts}:"
        yield from (f"  {line}" for line in note.text.splitlines())
