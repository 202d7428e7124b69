"""`evsys rollouts`: what the model said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from evsys_sdk.cli.options import HistoryPlace, WordsOption, known_entries, place_options, verb
from evsys_sdk.cli.output import LONGEST_TEXT, print_json
from evsys_sdk.constants import EXIT_OK
from evsys_sdk.format import count

if TYPE_CHECKING:
    from evsys_sdk.experiment.rollout_view import RolloutView
    from evsys_sdk.operations.rollouts import FoundDiff

LIMIT = 10


def complete_records(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    entries = known_entries()
    runs = [f"{entry.name}/{arm.arm}" for entry in entries for arm in entry.digest.arms]
    return [name for name in [*(entry.name for entry in entries), *runs] if name.startswith(incomplete)]


@verb("rollouts")
@click.argument(
    "record",
    required=False,
    shell_complete=complete_records,
    help="an experiment's name, <experiment>/<run>, a run's name, or the path of a record, a run directory or a .jsonl "
    "file of rollouts (default: the newest experiment)",
)
@click.option("--failed", is_flag=True, help="only rollouts with an error or a reward below 1")
@click.option("--task", "tasks", multiple=True, metavar="ID", help="only this task; repeatable")
@click.option("--arm", "arms", multiple=True, metavar="NAME", help="only this arm or run; repeatable")
@click.option("--benchmark", metavar="NAME", help="only this benchmark: val/tools, or tools")
@click.option(
    "--step", metavar="N", help="the evaluation at this step; 0 is the untrained model, `all` shows every evaluation"
)
@click.option("--train", is_flag=True, help="rollouts that the run was trained on, not evaluations")
@click.option(
    "--no-test", is_flag=True, help="leave out what any experiment here tests on, as if the record did not have it"
)
@click.option(
    "--diff",
    cls=WordsOption,
    may_be_empty=True,
    metavar="[ARM...]",
    help="compare two arms on the tasks where they differ; `untrained` is the model before training (default: the "
    "baseline arm and the best arm; with one arm, untrained and trained)",
)
@click.option(
    "--limit", type=click.IntRange(min=0), default=LIMIT, metavar="N", help=f"how many (default: {LIMIT}; 0: all)"
)
@click.option("--full", is_flag=True, help=f"do not shorten texts above {LONGEST_TEXT} characters")
@place_options
def rollouts(
    record: str | None, failed: bool, tasks: tuple[str, ...], arms: tuple[str, ...], benchmark: str | None,
    step: str | None, train: bool, no_test: bool, diff: tuple[str, ...], limit: int, full: bool, place: HistoryPlace,
    as_json: bool,
) -> int:  # fmt: skip
    """Show rollouts of an experiment or a run: prompt, turns, answer, expected, reward, status, error. Without options:
    the last evaluation of every run. The experiment's journal has the rollouts of every evaluation; no callback is
    needed."""
    from evsys_sdk.operations.rollouts import WantedRollouts, diff_rollouts, find_rollouts

    wanted = WantedRollouts(
        failed=failed, tasks=tasks, arms=arms, benchmark=benchmark, step=step, train=train, without_test=no_test
    )
    if diff:
        sides = [name for name in diff if name]  # `--diff` without names is one empty word
        found_diff = diff_rollouts(place, record, sides, wanted, limit=limit)
        if as_json:
            print_json(found_diff.plain())
        else:
            print_diff(found_diff, full=full)
        return EXIT_OK
    found = find_rollouts(place, record, wanted, limit=limit)
    if as_json:
        print_json(found.plain())
        return EXIT_OK
    asked, views, chosen = found.asked, found.views, found.chosen
    for view in chosen:
        when = "" if view.step is None else " untrained" if view.step == 0 else f" step {view.step}"
        stage = f" stage {view.stage}" if view.stage else ""
        sample = f" #{view.sample}" if view.sample else ""
        print(f"== {view.benchmark} {view.task_id}{sample}  {view.run}{when}{stage}  {_outcome(view)}")
        _print_question(view, full=full)
        _print_answer(view, full=full)
        print()
    more = "" if len(chosen) == len(views) else f", {len(chosen)} shown (--limit 0 shows all)"
    print(f"{count(len(asked), 'rollout')}, {sum(view.is_failed for view in asked)} failed{more}")
    return EXIT_OK


def print_diff(found: FoundDiff, *, full: bool) -> None:
    """Two sides, task by task where they differ."""
    diff, better, worse = found.diff, found.n_better, found.n_worse
    chosen = diff.tasks[: found.limit or None]
    for task in chosen:
        print(f"== {task.benchmark} {task.task_id}  change {task.change:+g}")
        _print_question(task.left[0], full=full)
        # Of several tries the ones that make the difference: the worst of the worse side, the best of the better.
        pick: tuple[Callable[..., Any], ...] = (min, max) if task.change > 0 else (max, min)
        for name, views, choose in ((diff.left, task.left, pick[0]), (diff.right, task.right, pick[1])):
            view = choose(views, key=lambda view: view.reward or 0.0)
            passed = sum(not one.is_failed for one in views)
            of = f", {passed} of {len(views)} passed" if len(views) > 1 else ""
            print(f"-- {name}: {_outcome(view)}{of}")
            _print_answer(view, full=full)
        print()
    more = "" if len(chosen) == len(diff.tasks) else f"; {len(chosen)} shown (--limit 0 shows all)"
    print(
        f"{diff.right} against {diff.left}: {len(diff.tasks)} of {diff.n_tasks} tasks differ, "
        f"{better} better, {worse} worse{more}"
    )


def _outcome(view: RolloutView) -> str:
    reward = "no reward" if view.reward is None else f"reward {view.reward:g}"
    return reward if view.status == "ok" else f"{reward}, {view.status}"


def _print_question(view: RolloutView, *, full: bool) -> None:
    for message in view.messages:
        _print_text("prompt" if message["role"] == "user" else message["role"], message["text"], full=full)
    if view.expected is not None:
        wanted = view.expected if isinstance(view.expected, str) else json.dumps(view.expected, default=str)
        _print_text("expected", wanted, full=full)


def _print_answer(view: RolloutView, *, full: bool) -> None:
    for number, text in enumerate(view.turns[:-1], 1):
        _print_text(f"turn {number}", text, full=full)
    if view.turns:
        _print_text("answer", view.answer, full=full)
    if view.error:
        _print_text("error", view.error, full=full)


def _print_text(label: str, text: str, *, full: bool) -> None:
    if len(text) > LONGEST_TEXT and not full:
        text = f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters; --full shows all)"
    first, *rest = text.splitlines() or [""]
    print(f"{label + ':':<10} {first}")
    for line in rest:
        print(f"{'':<10} {line}")
