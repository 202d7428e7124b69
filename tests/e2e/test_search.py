"""A search finds what a grid finds, for less, and a kill changes nothing of it.

How good a run is, is here a fixed function of its settings and its steps: a response surface instead of a model.
"""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.experiment import Experiment, RunOptions

SURFACE = """
import asyncio, math, os
from evsys_sdk import register_algorithm
from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.training.batch import TrainingBatch


@register_algorithm("surface")
class Surface(BaseAlgorithm):
    class Config(LoopParams):
        width: int = 4
        broken_at: int | None = None

    async def build_batch(self, step):
        if str(round(self.cfg.learning_rate * 1e9) % 2) == os.environ.get("SLOW"):
            await asyncio.sleep(0.05)
        if step == self.cfg.broken_at:
            raise RuntimeError("this one breaks")
        away = (math.log10(self.cfg.learning_rate) + 3) ** 2 + 0.3 * (math.log2(self.cfg.width) - 3) ** 2
        self.score = math.exp(-away / 4) * (1 - math.exp(-step / 10))
        return TrainingBatch(data=[], loss_fn="cross_entropy", metrics={"score": self.score})

    async def progress(self):
        return {"score": self.score}

    async def restore(self, progress):
        self.score = progress["score"]

    def run_metrics(self):
        return {"final_score": self.score}
"""
RATE, WIDTH = "algorithm.params.learning_rate", "algorithm.params.width"
SPACE = {RATE: [1e-5, 1e-4, 1e-3, 1e-2], WIDTH: [2, 8, 32]}


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "surface.py").write_text(SURFACE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return tmp_path


def _settings(search, *, steps=27, output_dir="out", params=None, **top):
    run = {
        "name": "t",
        "data": {"path": "rows.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
        "model": {"name": "table"},
        "algorithm": {"kind": "surface", "params": {"max_steps": steps, **(params or {})}},
        "backend": {"kind": "mock"},
    }
    if search is not None:
        top["search"] = {"objective": "final_score", **search}
    settings = {"name": "hunt", "imports": ["surface"], "output_dir": output_dir, "base_run": run, "leakage": "off"}
    return {**settings, **top}


def _run(search, options=None, **top):
    document = Document(label="config", data=_settings(search, **top))
    return Experiment(parse_config(document, folder=Path.cwd())).run(options or RunOptions())


def _steps_trained(folder="out"):
    [journal] = Path(folder).glob("*.journal.sqlite")
    with closing(sqlite3.connect(journal)) as db:
        return db.execute("SELECT count(*) FROM events WHERE kind = 'step'").fetchone()[0]


def _record(folder="out"):
    return json.loads((Path(folder) / "hunt.experiment_result.json").read_text())


def _trials(result):
    return [(trial["number"], trial["params"], trial["value"], trial["statuses"]) for trial in result.search["trials"]]


HALVING = {"kind": "halving", "space": SPACE, "min_steps": 3}


def test_halving_reaches_the_best_arm_of_the_grid_with_at_most_two_fifths_of_its_steps(world):
    grid = _run({"kind": "grid", "space": SPACE}, output_dir="grid", max_concurrent_arms=2)
    halving = _run(HALVING, output_dir="halving", max_concurrent_arms=2)
    best = [
        trial
        for result in (grid, halving)
        for trial in result.search["trials"]
        if trial["number"] == result.search["best"]
    ]
    assert best[0]["params"] == best[1]["params"] == {RATE: 1e-3, WIDTH: 8}
    assert best[0]["value"] == best[1]["value"] and best[1]["statuses"] == ["completed"]
    assert _steps_trained("grid") == 12 * 27
    assert _steps_trained("halving") == 12 * 3 + 4 * 6 + 18 <= 0.4 * _steps_trained("grid")


def test_a_grid_is_the_matrix_of_the_same_axes(world):
    axes = {RATE: [1e-4, 1e-3], WIDTH: [2, 8]}
    grid = _run({"kind": "grid", "space": axes}, output_dir="grid", steps=3)
    matrix = _run(None, output_dir="matrix", steps=3, matrix={"axes": axes}, metadata={"success_metric": "final_score"})
    assert [(run.run_id, run.metrics) for run in grid.runs] == [(run.run_id, run.metrics) for run in matrix.runs]
    assert _record("grid")["config"]["runs"] == _record("matrix")["config"]["runs"]
    assert grid.conclusion.findings == matrix.conclusion.findings


def test_of_trials_that_were_drawn_none_is_the_baseline_by_coming_first(world):
    search = {"kind": "random", "space": SPACE, "max_trials": 3}
    found = _run(search, steps=3, metadata={"success_metric": "final_score"}).conclusion
    verdict = found.findings.as_dict()["verdict"]
    assert verdict["baseline_arm"] is None and found.best_arm == verdict["winner"]["arm"]
    assert "the highest of 3 scored arms" in found.text and "baseline" not in found.text


def test_what_is_left_behind_has_a_status_of_its_own_and_a_whole_record(world):
    result = _run(HALVING)
    assert result.completed and {run.status for run in result.runs} == {"completed", "pruned"}
    first = result.search["trials"][0]
    assert first["statuses"] == ["pruned"] and first["at_step"] == 3
    told = json.loads((world / "out" / first["arm"] / "run_result.json").read_text())
    assert told["status"] == "pruned" and told["error"] is None
    assert told["metrics"]["steps"] == 3 and told["paused_at"] == 3
    logged = (world / "out" / first["arm"] / "logs/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [1, 2, 3]
    assert f"{first['arm']}: pruned at step 3 with final_score {first['value']:.3f}" in result.conclusion.text
    ranked = [arm.arm for arm in result.conclusion.arms if arm.scores]
    assert ranked == [trial["arm"] for trial in result.search["trials"] if trial["statuses"] == ["completed"]]
    rungs = _record()["search"]["rungs"]
    assert [(rung["step"], len(rung["trials"]), len(rung["go_on"])) for rung in rungs] == [(3, 12, 4), (9, 4, 1)]


def test_who_went_on_has_the_numbers_of_a_run_that_was_never_paused(world):
    callbacks = [{"kind": "local_logger"}, {"kind": "csv_metrics"}]
    halving = _run(HALVING, output_dir="halving", callbacks=callbacks)
    [end] = [run for run in halving.runs if run.status == "completed"]
    grid = _run({"kind": "grid", "space": {RATE: [1e-3], WIDTH: [8]}}, output_dir="grid", callbacks=callbacks)
    assert end.metrics == grid.runs[0].metrics
    paused, whole = (Path(run.run_dir) / "logs" for run in (end, grid.runs[0]))
    for name in ("metrics.jsonl", "training/metrics.jsonl"):
        rows = [[json.loads(line) for line in (logs / name).read_text().splitlines()] for logs in (paused, whole)]
        assert [(row["step"], row["score"]) for row in rows[0]] == [(row["step"], row["score"]) for row in rows[1]]
        assert [row["step"] for row in rows[0]] == list(range(1, 28))
    tables = [(logs / "metrics.csv").read_text().splitlines() for logs in (paused, whole)]
    assert tables[0][0] == tables[1][0] and len(tables[0]) == len(tables[1]) == 28


def test_seeds_of_a_trial_go_on_together(world):
    result = _run(HALVING | {"space": {RATE: [1e-4, 1e-3, 1e-2]}}, n_repeats=2, max_concurrent_arms=3)
    assert [trial["statuses"] for trial in result.search["trials"]] == [
        ["pruned"] * 2,
        ["completed"] * 2,
        ["pruned"] * 2,
    ]


KILLER = """
import json, os, signal, sys, traceback
from collections import Counter
import optuna, numpy, scipy.stats
from evsys_sdk.config.load import load_yaml
from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.record.journal import RunJournal


def run(folder, moment):
    \"\"\"In a process of its own, killed before `moment`: the so-manieth write to the journal, of any or of one kind;
    with a + after it.\"\"\"
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    add, writes = RunJournal.add, Counter()

    def dying(self, kind, *args, **options):
        writes.update(["any", kind])
        now = {f"{name}:{writes[name]}" for name in ("any", kind)}
        if moment in now:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, kind, *args, **options)
        if moment.rstrip("+") in now:
            os.kill(os.getpid(), signal.SIGKILL)

    RunJournal.add = dying
    try:
        done = Experiment(load_yaml("config.yaml", overrides=[f"output_dir={folder}"])).run().completed
        os._exit(0 if done else 2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


codes = {moment: [run(f"killed/{moment}", moment), run(f"killed/{moment}", "")] for moment in sys.argv[1:]}
print(json.dumps({"whole": run("whole", ""), "killed": codes}))
"""


def _facts(folder):
    """Everything the search and its runs left, clocks and places apart."""
    record = _record(folder)
    runs = []
    for run in record["runs"]:
        lines = (Path(run["run_dir"]) / "logs/metrics.jsonl").read_text().splitlines()
        steps = [(row["step"], row["score"]) for row in map(json.loads, lines)]
        runs.append((run["run_id"], run["status"], run["metrics"], steps))
    conclusion = record["conclusion"]
    return {"search": record["search"], "runs": runs, "conclusion": conclusion}


DRAWN = {RATE: {"low": 1e-6, "high": 1.0, "log": True}, WIDTH: [2, 4, 8]}


@pytest.mark.parametrize(
    ("search", "moments"),
    [
        pytest.param(
            {"kind": "halving", "space": SPACE, "max_trials": 6, "min_steps": 2, "eta": 2},
            ["trial:6", "any:12", "end:2", "value:3", "rung:1", "rung:1+", "any:63", "rung:2+", "any:80"],
            id="halving",
        ),
        pytest.param(
            {"kind": "tpe", "space": DRAWN, "max_trials": 6, "startup_trials": 2},
            ["step:5", "value:1", "trial:4+", "value:4+", "step:50"],
            id="tpe",
        ),
    ],
)
def test_a_kill_at_any_moment_ends_with_the_same_trials_values_and_steps(world, search, moments):
    settings = _settings(search, steps=9, params={"save_every": 3})
    (world / "config.yaml").write_text(json.dumps(settings))
    (world / "killer.py").write_text(KILLER)
    command = [sys.executable, "killer.py", *moments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes["whole"] == 0
    assert codes["killed"] == {moment: [-signal.SIGKILL, 0] for moment in moments}, done.stderr
    whole = _facts("whole")
    for moment in moments:
        assert _facts(f"killed/{moment}") == whole, f"killed at {moment}"


def test_a_budget_stops_a_search_and_a_larger_one_resumes_as_if_nothing_had_happened(world):
    short = _run(HALVING | {"budget": {"steps": 40}})
    assert _steps_trained() == 40 and not short.completed
    assert [run.status for run in short.runs].count("pruned") == 8, "the first rung was decided, and stays so"
    assert [run.error for run in short.runs if run.status == "cancelled"] == [
        "the budget is spent: 40 of 40 steps",
        *["not started: the budget is spent: 40 of 40 steps"] * 3,
    ]
    assert sorted(rung["step"] for rung in short.search["rungs"]) == [3]
    whole = _run(HALVING | {"budget": {"steps": 1000}})
    assert whole.completed and _steps_trained() == 78
    assert _trials(whole) == _trials(_run(HALVING, output_dir="whole"))


def test_who_waits_for_a_rung_that_is_not_decided_is_not_pruned(world):
    result = _run(HALVING | {"budget": {"steps": 10}})
    assert {run.status for run in result.runs} == {"cancelled"} and result.search["rungs"] == []
    assert result.runs[0].error == "waits at step 3: the search was stopped before it was decided which trials continue"
    told = json.loads((world / "out" / result.search["trials"][0]["arm"] / "run_result.json").read_text())
    assert (told["status"], told["error"]) == ("cancelled", result.runs[0].error)
    assert result.runs[-1].error == "not started: the budget is spent: 10 of 10 steps"


def test_going_on_with_a_trial_is_not_another_one_for_the_budget(world):
    enough = _run(HALVING | {"budget": {"trials": 12}})
    assert enough.completed and enough.budget["spent"]["trials"] == 12
    tpe = {"kind": "tpe", "space": {RATE: {"low": 1e-6, "high": 1.0, "log": True}}, "max_trials": 5}
    for _ in range(2):  # what an earlier process began counts
        short = _run(tpe | {"budget": {"trials": 2}}, output_dir="short", steps=2, budget={"trials": 4})
        assert [trial["statuses"][0] for trial in short.search["trials"]] == ["completed"] * 2 + ["cancelled"]


RANDOM = {"kind": "random", "space": {RATE: {"low": 1e-6, "high": 1.0, "log": True}}, "max_trials": 3}


def test_a_search_can_be_made_longer_and_not_into_another(world):
    short = _run(RANDOM, steps=2)
    longer = _run(RANDOM | {"max_trials": 5}, steps=2)
    assert _trials(longer)[:3] == _trials(short) and len(_trials(longer)) == 5
    assert _steps_trained() == 10
    with pytest.raises(EvsysError, match=r"search\.seed: \(not set\) -> 7"):
        _run(RANDOM | {"seed": 7}, steps=2)
    other = _run(RANDOM | {"seed": 7}, RunOptions(fresh=True), steps=2)
    assert _trials(other) != _trials(short)


def test_a_search_that_is_made_shorter_has_its_best_among_the_trials_it_lists(world):
    longer = _run(RANDOM | {"max_trials": 5, "seed": 5}, steps=2)
    values = {trial["number"]: trial["value"] for trial in longer.search["trials"]}
    assert longer.search["best"] == 4
    shorter = _run(RANDOM | {"max_trials": 2, "seed": 5}, steps=2)
    assert shorter.search["best"] == max((0, 1), key=values.__getitem__)


TPE = {"kind": "tpe", "space": DRAWN, "max_trials": 8, "startup_trials": 2}


def test_trials_at_the_same_time_draw_the_same_whichever_is_the_faster(world, monkeypatch):
    found = []
    for slow in ("0", "1"):
        monkeypatch.setenv("SLOW", slow)
        found.append(_trials(_run(TPE, output_dir=f"slow-{slow}", steps=3, max_concurrent_arms=3)))
    assert found[0] == found[1]


def test_what_was_drawn_stays_drawn_also_when_more_arms_run_at_once(world):
    short = _run(TPE | {"max_trials": 6}, steps=3)
    longer = _run(TPE, steps=3, max_concurrent_arms=4)
    assert _trials(longer)[:6] == _trials(short) and _steps_trained() == 8 * 3


def test_a_trial_that_breaks_is_behind_all_others_and_the_search_continues(world):
    space = {RATE: [1e-3, 1e-4, 1e-2], "algorithm.params.broken_at": [2, None]}
    result = _run({"kind": "halving", "space": space, "min_steps": 3, "eta": 2})
    statuses = {trial["number"]: trial["statuses"][0] for trial in result.search["trials"]}
    assert statuses == {0: "failed", 1: "completed", 2: "failed", 3: "pruned", 4: "failed", 5: "pruned"}
    assert not result.completed and result.search["best"] == 1


def test_a_rung_that_does_not_tell_trials_apart_says_so(world):
    space = {"algorithm.params.broken_at": [None, 50, 60, 70]}
    result = _run({"kind": "halving", "space": space, "min_steps": 3, "eta": 2})
    assert [(rung["go_on"], rung["left_alike"]) for rung in result.search["rungs"]] == [((0, 1), 2), ((0,), 1)]
    assert "2 of 4 continued after step 3 (2 no worse were left behind)" in result.conclusion.text
    assert "1 of 2 continued after step 6 (1 no worse was left behind)" in result.conclusion.text


def test_a_rehearsal_pauses_too_and_leaves_the_search_itself_untouched(world):
    rehearsal = _run(HALVING, RunOptions(dry=True))
    assert len(rehearsal.search["trials"]) == 4 and [rung["step"] for rung in rehearsal.search["rungs"]] == [1]
    assert not (world / "out" / "hunt.journal.sqlite").exists()


def test_a_search_that_had_ended_blames_no_setting_for_being_unread(world):
    assert _run(TPE, steps=3).unread_settings == []
    assert _run(TPE, steps=3).unread_settings == []


def test_fresh_begins_a_search_anew(world):
    _run(HALVING)
    _run(HALVING)
    assert _steps_trained() == 78, "the same command again trains nothing"
    again = _run(HALVING, RunOptions(fresh=True))
    assert again.completed and _steps_trained() == 2 * 78


def test_a_score_made_while_training_decides_who_continues(project, minimal_run):
    project.write_tasks()
    space = {RATE: [1e-6, 1e-3, 1e-5, 1e-7]}
    path = project.config(
        run=minimal_run(algorithm__params={"max_steps": 12, "batch_size": 4}, eval={"enabled": False}),
        search={"kind": "halving", "space": space, "min_steps": 4, "eta": 4},
        metadata={
            "success_metric": "val.pass@1",
            "benchmark": [{"name": "colours", "path": "bench", "split": "val", "run_every": 4, "temperature": 0}],
        },
    )
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stderr
    assert "search: step 4: 1 of 4 trials continue, best val.pass@1" in done.stderr
    assert "Best trial: r0__t001__learning_rate0p001 with val.pass@1 1.000 (learning_rate=0.001)" in done.stdout
    assert "r0__t000__learning_rate1e-06: pruned at step 4 with val.pass@1 0.000" in done.stdout
    shown = project.evsys("show", "hello_sft", "--dir", "outputs", check=True).stdout
    assert "hello_sft: completed" in shown and "not ranked: pruned at step 4" in shown
    shutil.rmtree(project.root / "outputs")
    checked = project.evsys("validate", "--deep", path, "--set", "metadata.benchmark[0].run_every=5")
    assert checked.returncode == 1 and "halving needs it at step 4: set run_every to 4 or less" in checked.stderr


@pytest.mark.parametrize("objective", ["final_cost", {"name": "final_cost"}])
def test_halving_by_a_metric_of_which_less_is_better_keeps_the_lowest(world, objective):
    costs = SURFACE.replace('{"score": self.score})', '{"cost": 1 - self.score})').replace(
        '{"final_score": self.score}', '{"final_cost": 1 - self.score}'
    )
    (world / "surface.py").write_text(costs.replace('"surface"', '"surface_of_costs"'))
    search = {"kind": "halving", "space": {RATE: [1e-5, 1e-4, 1e-3]}, "min_steps": 3, "eta": 3, "objective": objective}
    settings = _settings(search, steps=9)
    settings["base_run"]["algorithm"]["kind"] = "surface_of_costs"
    experiment = Experiment(parse_config(Document(label="config", data=settings), folder=world))
    experiment.run(RunOptions())
    assert experiment.search["mode"] == "min"
    assert [trial["params"][RATE] for trial in experiment.search["trials"] if "completed" in trial["statuses"]] == [
        1e-3
    ]
