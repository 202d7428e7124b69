"""What the terminal says of runs that are under way."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from evsys_sdk.cli import progress
from evsys_sdk.cli.progress import LiveProgress, PlainProgress, progress_display, short_names
from evsys_sdk.format import console_for


@pytest.fixture
def shown(monkeypatch):
    """A display whose clock stands still until somebody moves it."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    display = PlainProgress(io.StringIO())

    def passes(seconds):
        clock.now += seconds

    display.passes = passes
    return display


def ctx(*, replaying=False):
    return SimpleNamespace(run_id="e/r", extras={"run_name": "r"}, replaying=replaying)


def trained(display, steps, *, each=0.0, replaying=False):
    for step in steps:
        display.passes(each)
        display.on_step(ctx(replaying=replaying), step, {"loss": 1.0})


def last_line(display):
    return display.stream.getvalue().splitlines()[-1]


def test_the_time_that_is_left_is_that_of_the_steps_that_were_made(shown):
    shown.on_train_start(ctx(), 300)
    trained(shown, range(1, 101), each=0.5)
    assert last_line(shown).endswith("  2 min left")


def test_after_a_resume_only_new_steps_count_and_are_shown(shown):
    shown.on_train_start(ctx(), 300)
    shown.passes(60)  # the model is loaded
    trained(shown, range(1, 111), replaying=True)
    score = SimpleNamespace(metric="pass@1", value=0.5)
    shown.on_eval(ctx(replaying=True), SimpleNamespace(scores=[score], step=100, split="val", name="tools"))
    assert shown.stream.getvalue() == "r: training\n"
    trained(shown, range(111, 121), each=2.0)
    assert (
        last_line(shown) == "r: step 120 of 300  training  loss 1.0000  val/tools pass@1 0.500 at step 100  6 min left"
    )


def test_a_later_stage_of_a_chain_is_not_taken_for_a_quick_one(shown):
    shown.on_train_start(ctx(), 100)
    trained(shown, range(1, 101), each=0.1)
    shown.on_train_start(ctx(), 200)
    trained(shown, range(101, 151), each=1.0)
    assert last_line(shown).endswith("  50 s left")


def score(display, metric, value, *, step, name="tools", split="val", config=None):
    about = ctx()
    about.config = config
    scores = [SimpleNamespace(metric=one, value=number) for one, number in zip(metric, value, strict=True)]
    display.on_eval(about, SimpleNamespace(scores=scores, step=step, split=split, name=name))


def success(name):
    return SimpleNamespace(metadata=SimpleNamespace(success_metric=SimpleNamespace(name=name)))


@pytest.mark.parametrize("name", ["pass@1", "val.pass@1", "tools.pass@1", "val/tools/pass@1", "val.tools.pass@1"])
def test_the_success_metric_is_shown_and_not_the_last_one(shown, name):
    config = success(name)
    score(shown, ["mean_reward", "pass@1", "tokens"], [0.7, 0.5, 99.0], step=20, config=config)
    score(shown, ["pass@1"], [0.1], step=20, name="other", split="test", config=config)
    assert last_line(shown).endswith("val/tools pass@1 0.500 at step 20")


def test_a_run_says_what_it_is_doing(shown):
    shown.doing(ctx(), "loading model")
    assert last_line(shown) == "r: loading model"
    shown.on_train_start(ctx(), 4)
    trained(shown, range(1, 5), each=1.0)
    shown.doing(ctx(), "scoring")
    assert last_line(shown) == "r: step 4 of 4  scoring  loss 1.0000"


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["r0__learning_rate1e-05", "r0__learning_rate0p001"], ["…1e-05", "…0p001"]),
        (["base__lr1e-4__rank8", "base__lr2e-4__rank8"], ["…1e-4…", "…2e-4…"]),
        (["alpha", "alpine"], ["alpha", "alpine"]),
        (["x"], ["x"]),
        (["a", "a"], ["a", "a"]),
        (["n" * 60 + "1", "m" * 60 + "2"], ["n" * 13 + "…" + "n" * 13 + "1", "m" * 13 + "…" + "m" * 13 + "2"]),
        ([], []),
    ],
)
def test_names_lose_what_they_share(names, short):
    assert short_names(names) == short


def test_a_live_table_fits_80_columns_and_12_lines_with_running_rows_first(shown, monkeypatch):
    display = LiveProgress(io.StringIO())
    runs = [SimpleNamespace(name=f"a_long_sweep_of_learning_rates__learning_rate{n}e-05__rank8") for n in range(1, 25)]
    config = SimpleNamespace(name="sweep", search=None, n_repeats=1, all_runs=lambda: runs)
    display.on_experiment_start(SimpleNamespace(config=config))
    for n, run in enumerate(runs[:20]):
        about = SimpleNamespace(
            run_id=run.name, extras={"run_name": run.name}, replaying=False, config=success("pass@1")
        )
        display.on_run_start(about)
        display.on_train_start(about, 24)
        shown.passes(10)
        display.on_step(about, 7, {"loss": 1.0})
        found = [SimpleNamespace(metric="pass@1", value=0.5), SimpleNamespace(metric="reward", value=9.0)]
        display.on_eval(about, SimpleNamespace(scores=found, step=6, split="val", name="tools"))
        if n < 17:
            display.on_run_end(about, SimpleNamespace(status="failed" if n == 3 else "completed"))
    out = io.StringIO()
    console = console_for(out, width=80, height=12, force_terminal=True, color_system=None)
    console.print(display)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 12 and all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("sweep: 17 of 24 runs done, 1 failed, 3 running, ") and lines[0].endswith(" left")
    assert [line.split()[0] for line in lines[2:6]] == ["…18e-05…", "…19e-05…", "…20e-05…", "…4e-05…"]
    assert lines[1].split() == ["run", "doing", "step", "learning", "pass@1", "left"]
    assert "training   7 of 24  loss 1.0000  0.500 @6  1 min" in lines[2] and "failed" in lines[5]
    assert lines[-1] == "… and 12 more: 12 completed"


def test_a_live_table_of_80_columns_shows_whole_names_where_there_is_room(shown):
    display = LiveProgress(io.StringIO())
    for name in ("sweep__learning_rate1e-05__s42", "sweep__learning_rate3e-05__s42"):
        about = SimpleNamespace(run_id=name, extras={"run_name": name}, replaying=False, config=success("pass@1"))
        display.on_run_start(about)
        display.on_train_start(about, 24)
        display.on_step(about, 7, {"loss": 1.0})
    out = io.StringIO()
    console_for(out, width=80, height=12, force_terminal=True, color_system=None).print(display)
    assert "sweep__learning_rate1e-05__s42 " in out.getvalue() and "…" not in out.getvalue()
    narrow = io.StringIO()
    console_for(narrow, width=50, height=12, force_terminal=True, color_system=None).print(display)
    assert "\n…1e-05…" in narrow.getvalue() and "sweep__" not in narrow.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_is_printed_beside_the_live_table_is_text(monkeypatch):
    """rich follows colours, hidden text, links and `\\r` in what it takes over from stdout and stderr."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_display(terminal, live=True):
        print("failed: everything\rpassed \x1b[8mbut not\x1b[0m", file=sys.stderr)
        print("see \x1b]8;;http://e.example/\x1b\\here\x1b]8;;\x1b\\ \x1b[31mred")
    shown = terminal.getvalue()
    assert "failed: everything\\u000dpassed \\u001b[8mbut not\\u001b[0m" in shown
    assert "see \\u001b]8;;http://e.example/\\u001b\\here" in shown
    assert "\x1b[8m" not in shown and "\x1b]8;" not in shown and "\x1b[31m" not in shown
    assert (sys.stdout, sys.stderr) == (terminal, terminal)
