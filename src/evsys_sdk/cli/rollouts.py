"""`evsys rollouts`: what the model said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evsys_sdk.cli.options import HistoryPlace, WordsOption, known_entries, place_options, verb
from evsys_sdk.cli.output import LONGEST_TEXT, print_json
from evsys_sdk.constants import EXIT_OK
from evsys_sdk.format import count

if TYPE_CHECKING:
    from evsys_sdk.experiment.rollout_view import Diff, RolloutView

LIMIT = 10
LISTED = 20
"""Names that a message lists; of more only the closest."""


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
    step: str | None, train: bool, diff: tuple[str, ...], limit: int, full: bool, place: HistoryPlace, as_json: bool,
) -> int:  # fmt: skip
    """Show rollouts of an experiment or a run: prompt, turns, answer, expected, reward, status, error. Without options:
    the last evaluation of every run. The experiment's journal has the rollouts of every evaluation; no callback is
    needed."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.experiment.rollout_view import compare_sides, latest, read_rollouts

    def matches(view: RolloutView, *, of_any_arm: bool = False) -> bool:
        is_of_arm = of_any_arm or not arms or view.arm in arms or view.run in arms
        is_of_benchmark = benchmark is None or benchmark in (view.benchmark, view.benchmark.rpartition("/")[2])
        return is_of_arm and is_of_benchmark and (not tasks or view.task_id in tasks)

    sides = [name for name in diff if name]  # `--diff` without names is one empty word
    if diff and (len(sides) > 2 or train or step is not None):
        raise EvsysError("--diff takes at most two arms and compares final evaluations; leave out --train and --step")
    target, run = find_record(place, record)
    found = read_rollouts(target, run=run)
    if diff:
        sides = sides or [name for name in arms if name in found.arms][:2]
        show_diff(compare_sides(found, sides, only=lambda view: matches(view, of_any_arm=True)), target, limit,
                  full=full, as_json=as_json)  # fmt: skip
        return EXIT_OK
    every = views = found.training if train else found.views
    if step is None and not train:
        views = latest(views)
    elif step not in (None, "all") and not train:
        if not str(step).isdigit():
            raise EvsysError(f"--step takes a number or `all`, not {step!r}")
        steps = sorted({view.step for view in views if view.step is not None})
        views = [view for view in views if view.step == int(str(step))]
        if not views:
            raise EvsysError(
                f"--step {step}: no evaluation at this step; there are: {', '.join(map(str, steps)) or 'none'}"
            )
    asked = [view for view in views if matches(view)]
    views = [view for view in asked if view.is_failed or not failed]
    if not views:
        refuse_unknown(every, tasks=tasks, arms=arms, benchmark=benchmark, train=train)
    chosen = views[: limit or None]
    if as_json:
        print_json({"record": str(target), "n_rollouts": len(views), "rollouts": [plain_view(view) for view in chosen]})
        return EXIT_OK
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


def find_record(place: HistoryPlace, ref: str | None) -> tuple[Path, str | None]:
    """The record that is meant, and the run in it where one is named: a path, an experiment, `<experiment>/<run>`, or
    the name of a run or an arm of the newest experiment that has it."""
    from evsys_sdk.constants import RUN_RESULT_FILE
    from evsys_sdk.errors import EvsysError

    if ref is not None and Path(ref).exists():
        path = Path(ref)
        is_record_of_run = path.is_dir() and ((path / RUN_RESULT_FILE).is_file() or (path / "rollouts.jsonl").is_file())
        if is_record_of_run or path.name.endswith((".jsonl", ".jsonl.gz")):
            return path, None
    history, run = place.history(), None
    try:
        entry = place.find_or_newest(ref, history).entry
    except EvsysError:
        for entry in history.entries if ref is not None else []:
            names = {name for arm in entry.digest.arms for name in (arm.arm, *arm.runs)}
            run = str(ref).removeprefix(f"{entry.name}/")
            # An experiment without arms on record yet can confirm no run: `<experiment>/<run>` is enough there.
            if run in names or (run != ref and not names):
                break
        else:
            raise
    return (entry.record if entry.record.is_file() else entry.journal), run


def refuse_unknown(
    views: list[RolloutView], *, tasks: tuple[str, ...], arms: tuple[str, ...], benchmark: str | None, train: bool
) -> None:
    """Say which of the conditions names something that the record does not have."""
    from evsys_sdk.errors import EvsysError, closest, not_known

    if not views:
        what = "training rollouts (algorithms that roll out keep some)" if train else "rollouts of evaluations"
        raise EvsysError(f"the record has no {what}")
    benchmarks = {name for view in views for name in (view.benchmark, view.benchmark.rpartition("/")[2])}
    for flag, words, what, names in (
        ("--task", tasks, "task", {view.task_id for view in views}),
        ("--arm", arms, "arm or run", {name for view in views for name in (view.arm, view.run)}),
        ("--benchmark", [benchmark] if benchmark else [], "benchmark", benchmarks),
    ):
        for word in words:
            if word not in names:
                near = closest(word, names)
                known = [near] if near and len(names) > LISTED else sorted(names)[:LISTED]
                raise EvsysError(f"{flag}: {not_known(word, what, known)}")


def show_diff(diff: Diff, target: Path, limit: int, *, full: bool, as_json: bool) -> None:
    """Two sides, task by task where they differ."""
    chosen = diff.tasks[: limit or None]
    better = sum(task.change > 0 for task in diff.tasks)
    worse = sum(task.change < 0 for task in diff.tasks)
    if as_json:
        counts = {"n_tasks": diff.n_tasks, "n_different": len(diff.tasks), "n_better": better, "n_worse": worse}
        tasks = [
            {
                "benchmark": task.benchmark,
                "task_id": task.task_id,
                "change": task.change,
                "left": [plain_view(view) for view in task.left],
                "right": [plain_view(view) for view in task.right],
            }
            for task in chosen
        ]
        print_json({"record": str(target), "left": diff.left, "right": diff.right, **counts, "tasks": tasks})
        return
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


def plain_view(view: RolloutView) -> dict[str, Any]:
    """A rollout as `--json` prints it."""
    return asdict(view) | {"answer": view.answer, "failed": view.is_failed}


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
