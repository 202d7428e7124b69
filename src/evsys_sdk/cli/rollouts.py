"""`evsys rollouts`: what the model said."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.experiments import add_place_flags, open_history
from evsys_sdk.cli.flags import zero_or_more
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.record.history import History
    from evsys_sdk.running.rollout_view import Diff, RolloutView, TaskDiff

LIMIT = 10
LISTED = 20
LONGEST = 2000
"""Characters of one text that are printed without `--full`."""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "rollouts",
        help="what the model said, task by task",
        description="Show rollouts of an experiment or a run: prompt, turns, answer, expected, reward, status, error. "
        "Without options: the last evaluation of every run. The experiment's journal has the rollouts of every "
        "evaluation; no callback is needed.",
    )
    parser.add_argument(
        "record",
        nargs="?",
        help="an experiment's name, <experiment>/<run>, a run's name, or the path of a record, a run directory or a "
        ".jsonl file of rollouts (default: the newest experiment)",
    )
    parser.add_argument("--failed", action="store_true", help="only rollouts with an error or a reward below 1")
    parser.add_argument("--task", action="append", default=[], metavar="ID", help="only this task; repeatable")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME", help="only this arm or run; repeatable")
    parser.add_argument("--benchmark", metavar="NAME", help="only this benchmark: val/tools, or tools")
    parser.add_argument(
        "--step",
        metavar="N",
        help="the evaluation at this step; 0 is the untrained model, `all` shows every evaluation",
    )
    parser.add_argument("--train", action="store_true", help="rollouts that the run was trained on, not evaluations")
    parser.add_argument(
        "--diff",
        nargs="*",
        metavar="ARM",
        help="compare two arms on the tasks where they differ; `untrained` is the model before training (default: the "
        "baseline arm and the best arm; with one arm, untrained and trained)",
    )
    parser.add_argument(
        "--limit", type=zero_or_more, default=LIMIT, metavar="N", help=f"how many (default: {LIMIT}; 0: all)"
    )
    parser.add_argument("--full", action="store_true", help=f"do not shorten texts above {LONGEST} characters")
    add_place_flags(parser)
    parser.set_defaults(run=show_rollouts)


def show_rollouts(args: argparse.Namespace) -> int:
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.running.rollout_view import compare_sides, read_rollouts

    if args.diff is not None and (len(args.diff) > 2 or args.train or args.step is not None):
        raise EvsysError("--diff takes at most two arms and compares final evaluations; leave out --train and --step")
    target, run = _target(args)
    record = read_rollouts(target, run=run)
    if args.diff is not None:
        names = args.diff or [name for name in args.arm if name in record.arms][:2]
        _show_diff(compare_sides(record, names, only=lambda view: _matches(view, args, arms=False)), args, target)
        return EXIT_OK
    views = [view for view in _of_step(record.training if args.train else record.views, args) if _matches(view, args)]
    if args.failed:
        views = [view for view in views if view.is_failed]
    if not views:
        _refuse_unknown(record.training if args.train else record.views, args)
    _show(views, args, target)
    return EXIT_OK


def _target(args: argparse.Namespace) -> tuple[Path, str | None]:
    """The record that is meant, and the run in it where one is named."""
    from evsys_sdk.cli.experiments import find_or_newest
    from evsys_sdk.constants import RUN_RESULT_FILE
    from evsys_sdk.errors import EvsysError

    ref = args.record
    if ref is not None and Path(ref).exists():
        path = Path(ref)
        is_record_of_run = path.is_dir() and ((path / RUN_RESULT_FILE).is_file() or (path / "rollouts.jsonl").is_file())
        if is_record_of_run or path.name.endswith((".jsonl", ".jsonl.gz")):
            return path, None
    history = open_history(args)
    try:
        entry = find_or_newest(args, ref, history).entry
    except EvsysError:
        found = _run_in(history, str(ref))
        if found is None:
            raise
        return found
    return (entry.record if entry.record.is_file() else entry.journal), None


def _run_in(history: History, ref: str) -> tuple[Path, str] | None:
    """`<experiment>/<run>`, or the name of a run or an arm of the newest experiment that has it."""
    for entry in history.entries:
        names = {name for arm in entry.digest.arms for name in (arm.arm, *arm.runs)}
        run = ref.removeprefix(f"{entry.name}/")
        if run in names or (run != ref and not names):
            return (entry.record if entry.record.is_file() else entry.journal), run
    return None


def _of_step(views: list[RolloutView], args: argparse.Namespace) -> list[RolloutView]:
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.running.rollout_view import latest

    if args.train or args.step == "all":
        return views
    if args.step is None:
        return latest(views)
    if not args.step.isdigit():
        raise EvsysError(f"--step takes a number or `all`, not {args.step!r}")
    found = [view for view in views if view.step == int(args.step)]
    if not found:
        steps = sorted({view.step for view in views if view.step is not None})
        raise EvsysError(
            f"--step {args.step}: no evaluation at this step; there are: {', '.join(map(str, steps)) or 'none'}"
        )
    return found


def _matches(view: RolloutView, args: argparse.Namespace, *, arms: bool = True) -> bool:
    if args.task and view.task_id not in args.task:
        return False
    if arms and args.arm and view.arm not in args.arm and view.run not in args.arm:
        return False
    return args.benchmark is None or args.benchmark in (view.benchmark, view.benchmark.rpartition("/")[2])


def _refuse_unknown(views: list[RolloutView], args: argparse.Namespace) -> None:
    """Say which of the conditions names something that the record does not have."""
    from evsys_sdk.errors import EvsysError, closest, not_known

    if not views:
        what = "training rollouts (algorithms that roll out keep some)" if args.train else "rollouts of evaluations"
        raise EvsysError(f"the record has no {what}")
    known = {
        "--task": (args.task, "task", {view.task_id for view in views}),
        "--arm": (args.arm, "arm or run", {name for view in views for name in (view.arm, view.run)}),
        "--benchmark": ([args.benchmark] if args.benchmark else [], "benchmark",
                        {name for view in views for name in (view.benchmark, view.benchmark.rpartition("/")[2])}),
    }  # fmt: skip
    for flag, (words, what, names) in known.items():
        for word in words:
            if word not in names:
                near = closest(word, names)
                known_names = [near] if near and len(names) > LISTED else sorted(names)[:LISTED]
                raise EvsysError(f"{flag}: {not_known(word, what, known_names)}")


def _show(views: list[RolloutView], args: argparse.Namespace, target: Path) -> None:
    from evsys_sdk.cli.data import print_json

    chosen = views[: args.limit or None]
    if args.json:
        print_json({"record": str(target), "n_rollouts": len(views), "rollouts": [plain_view(view) for view in chosen]})
        return
    for view in chosen:
        _print_view(view, full=args.full)
    failed = sum(view.is_failed for view in views)
    more = "" if len(chosen) == len(views) else f", {len(chosen)} shown (--limit 0 shows all)"
    print(f"{len(views)} rollout{'' if len(views) == 1 else 's'}, {failed} failed{more}")


def _show_diff(diff: Diff, args: argparse.Namespace, target: Path) -> None:
    from evsys_sdk.cli.data import print_json

    chosen = diff.tasks[: args.limit or None]
    better = sum(task.change > 0 for task in diff.tasks)
    worse = sum(task.change < 0 for task in diff.tasks)
    if args.json:
        counts = {"n_tasks": diff.n_tasks, "n_different": len(diff.tasks), "n_better": better, "n_worse": worse}
        print_json({"record": str(target), "left": diff.left, "right": diff.right, **counts,
                    "tasks": [_plain_task(task) for task in chosen]})  # fmt: skip
        return
    for task in chosen:
        _print_task(task, diff, full=args.full)
    more = "" if len(chosen) == len(diff.tasks) else f"; {len(chosen)} shown (--limit 0 shows all)"
    print(
        f"{diff.right} against {diff.left}: {len(diff.tasks)} of {diff.n_tasks} tasks differ, "
        f"{better} better, {worse} worse{more}"
    )


def plain_view(view: RolloutView) -> dict[str, Any]:
    """A rollout as `--json` prints it."""
    from dataclasses import asdict

    return asdict(view) | {"answer": view.answer, "failed": view.is_failed}


def _plain_task(task: TaskDiff) -> dict[str, Any]:
    return {
        "benchmark": task.benchmark,
        "task_id": task.task_id,
        "change": task.change,
        "left": [plain_view(view) for view in task.left],
        "right": [plain_view(view) for view in task.right],
    }


def _print_view(view: RolloutView, *, full: bool) -> None:
    when = "" if view.step is None else " untrained" if view.step == 0 else f" step {view.step}"
    stage = f" stage {view.stage}" if view.stage else ""
    sample = f" #{view.sample}" if view.sample else ""
    print(f"== {view.benchmark} {view.task_id}{sample}  {view.run}{when}{stage}  {_outcome(view)}")
    _print_question(view, full=full)
    _print_answer(view, full=full)
    print()


def _print_task(task: TaskDiff, diff: Diff, *, full: bool) -> None:
    print(f"== {task.benchmark} {task.task_id}  change {task.change:+g}")
    _print_question(task.left[0], full=full)
    # Of several tries the ones that make the difference: the worst of the worse side, the best of the better.
    pick = (min, max) if task.change > 0 else (max, min)
    for name, views, choose in ((diff.left, task.left, pick[0]), (diff.right, task.right, pick[1])):
        view = choose(views, key=lambda view: view.reward or 0.0)
        passed = sum(not one.is_failed for one in views)
        of = f", {passed} of {len(views)} passed" if len(views) > 1 else ""
        print(f"-- {name}: {_outcome(view)}{of}")
        _print_answer(view, full=full)
    print()


def _outcome(view: RolloutView) -> str:
    reward = "no reward" if view.reward is None else f"reward {view.reward:g}"
    return reward if view.status == "ok" else f"{reward}, {view.status}"


def _print_question(view: RolloutView, *, full: bool) -> None:
    for message in view.messages:
        label = "prompt" if message["role"] == "user" else message["role"]
        _print_text(label, message["text"], full=full)
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
    if len(text) > LONGEST and not full:
        text = f"{text[:LONGEST]} ... ({len(text):,} characters; --full shows all)"
    first, *rest = text.splitlines() or [""]
    print(f"{label + ':':<10} {first}")
    for line in rest:
        print(f"{'':<10} {line}")
