"""`evsys regrade`: new scores for old rollouts, and the old record left as it was."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path
from statistics import stdev

import pytest

from evsys_sdk.cli.main import main
from evsys_sdk.files import write_json
from evsys_sdk.protocols import EvalResult, Rollout, Score, Turn
from evsys_sdk.record.journal import Journal, JournalledRollouts, to_data_without
from evsys_sdk.record.local_logger import rollout_record
from evsys_sdk.record.models import rollout_to_data, to_data
from evsys_sdk.registry import register_verifier, verifiers
from evsys_sdk.training.rollout_data import log_rollouts

TASKS = [
    {
        "task_id": word,
        "instruction": f"Say {word}",
        "verifier": {"fn_name": "exact_match", "expected": word},
        "metadata": {"length": len(word)},
    }
    for word in ("red", "green", "blue")
]
RUN = {
    "name": "r0",
    "data": {"path": "train.jsonl"},
    "model": {"name": "m"},
    "algorithm": {"kind": "rl"},
    "backend": {"kind": "mock"},
}
CONFIG = {"name": "exp", "run": RUN, "metadata": {"benchmark": [{"name": "colours", "path": "val", "split": "val"}]}}
SAID = {"red": ["red", "Red"], "green": ["GREEN", "grass"], "blue": ["blue", "Blue"]}


def turn(text):
    return Turn(prompt_tokens=[1, 2], completion_tokens=[3], logprobs=[-0.5], text=text)


def rollout(task_id, text, sample=0, **changes):
    reward = float(text == task_id)
    return Rollout(
        **{"task_id": task_id, "turns": [turn(text)], "reward": reward, "metadata": {"sample": sample}} | changes
    )


def colours(**changes):
    rollouts = [rollout(task, text, index) for task, said in SAID.items() for index, text in enumerate(said)]
    scores = [Score(metric="pass@1", value=1 / 3)]
    return EvalResult(**{"name": "colours", "split": "val", "scores": scores, "rollouts": rollouts} | changes)


class Project:
    """A folder with a benchmark, a config, and the record that a run left."""

    def __init__(self, root: Path):
        self.root, self.outputs = root, root / "outputs"
        self.write("val/tasks.jsonl", TASKS)
        self.write("train.jsonl", TASKS)
        self.record(colours())

    def write(self, name, rows):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def record(self, *results, run="r0", config=CONFIG):
        run_dir = self.outputs / run
        run_dir.mkdir(parents=True, exist_ok=True)
        with closing(Journal(self.outputs / "exp.journal.sqlite")) as journal:
            attempt = journal.begin(f"exp/{run}", "fingerprint")
            for number, result in enumerate(results):
                kept = JournalledRollouts(attempt, f"eval-{number}")
                attempt.add("eval", to_data_without(result, kept), at=number, key=f"eval-{number}")
        suite = hashlib.sha256((self.root / "val/tasks.jsonl").read_bytes()).hexdigest()
        about = {"benchmarks": [{"name": "val/colours", "sha256": suite, "tasks": 3}]}
        write_json(
            run_dir / "run_result.json",
            {"run_id": f"exp/{run}", "experiment": "exp", "run": run, "hparams": RUN, "environment": about},
        )
        summary = {"experiment": "exp", "config": config, "config_folder": str(self.root)}
        write_json(self.outputs / "exp.experiment_result.json", summary)

    def everything(self):
        return {str(p): p.read_bytes() for p in self.outputs.rglob("*") if p.is_file() and "regrades" not in str(p)}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    return Project(tmp_path)


@pytest.fixture
def regraded(capsys):
    def ask(*arguments, code=0):
        assert main(["regrade", *map(str, arguments), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return ask


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def scores(told, metric="pass@1", index=0):
    [found] = [score for score in told["evals"][index]["scores"] if score["metric"] == metric]
    return found["old"], found["new"], found["change"]


def test_another_verifier_gives_other_scores_of_the_same_rollouts(project, regraded):
    told = regraded("outputs/r0", "--verifier", "exact_match", "--params", "case_sensitive=false")
    old, new, change = scores(told)
    assert (old["value"], new["value"]) == (pytest.approx(1 / 3), pytest.approx(5 / 6))
    assert change["value"] == pytest.approx(0.5) and change["low"] < 0.4 < 0.6 < change["high"]  # alike is not certain
    assert old["low"] < old["value"] < old["high"] and new["n_tasks"] == 3 and new["n_rollouts"] == 6
    [found] = told["evals"]
    assert found["n_changed"] == 3 and found["graded_by"] == ["exact_match"]
    assert [(one["task_id"], one["sample"], one["old_reward"], one["new_reward"]) for one in found["changed"]] == [
        ("red", 1, 0.0, 1.0), ("green", 0, 0.0, 1.0), ("blue", 1, 0.0, 1.0),
    ]  # fmt: skip


def test_the_change_has_an_interval_of_its_own(project, regraded):
    told = regraded("outputs/r0", "--verifier", "contains")
    assert scores(told)[2]["value"] == 0 and told["evals"][0]["n_changed"] == 0
    said = [["yes", "yes"]] * 5 + [["yes", "no"]] * 5 + [["no", "no"]] * 10
    rows = [
        {"task_id": f"t{task}", "completion": text, "expected": "-", "reward": 0.0, "metadata": {"sample": sample}}
        for task, texts in enumerate(said)
        for sample, text in enumerate(texts)
    ]
    path = project.write("mine.jsonl", rows)
    change = scores(regraded(path, "--verifier", "regex_match", "--params", "pattern=yes"))[2]
    # The paired interval, by hand: each task's own change, and Student's t with 19 degrees of freedom.
    reach = 2.0930 * stdev([1.0] * 5 + [0.5] * 5 + [0.0] * 10) / 20**0.5
    assert change["value"] == pytest.approx(0.375)
    assert (change["low"], change["high"]) == pytest.approx((0.375 - reach, 0.375 + reach), abs=1e-4)


def test_the_old_record_is_not_touched_and_the_new_one_lies_beside_it(project, regraded):
    before = project.everything()
    told = regraded("outputs/r0", "--verifier", "format_only")
    again = regraded("outputs/r0", "--verifier", "format_only")
    assert project.everything() == before
    assert told["record"] == "outputs/r0/regrades/1" and again["record"] == "outputs/r0/regrades/2"
    lines = lines_of("outputs/r0/regrades/1/rollouts.jsonl")
    assert len(lines) == 6 and lines[0]["old_reward"] == 1.0 and lines[0]["reward"] == 0.0
    assert lines[0]["turns"][0]["text"] == "red" and lines[0]["split"] == "val"
    kept = json.loads(Path("outputs/r0/regrades/1/regrade.json").read_text())
    assert kept["evals"] == told["evals"] and kept["verifier"] == "format_only"


def test_without_options_the_tasks_of_the_config_grade_as_they_are_now(project, regraded):
    assert regraded("outputs/r0")["evals"][0]["n_changed"] == 0
    mild = [{**task, "verifier": {**task["verifier"], "params": {"case_sensitive": False}}} for task in TASKS]
    project.write("val/tasks.jsonl", mild)
    told = regraded("outputs/r0")
    assert told["evals"][0]["n_changed"] == 3
    assert told["notes"] == ["val/colours: the tasks are not the ones of the run any more; graded by those of now"]


def test_a_benchmark_that_is_named_brings_the_verifiers(project, regraded):
    tasks = [{**TASKS[0], "verifier": {"fn_name": "contains", "expected": "d"}}]
    project.write("other/tasks.jsonl", tasks)
    told = regraded("outputs/r0", "--benchmark", "other")
    assert told["evals"][0]["n_without_task"] == 4 and told["evals"][0]["n_rollouts"] == 2
    assert scores(told)[1]["value"] == 1.0 and scores(told)[0]["n_tasks"] == 1  # left out on both sides


def test_an_experiment_is_regraded_with_all_its_runs(project, regraded):
    project.record(colours(step=2), run="r1")
    for target in ("outputs", "outputs/exp.journal.sqlite", "outputs/exp.experiment_result.json"):
        told = regraded(target)
        assert [(found["run"], found["step"]) for found in told["evals"]] == [("r0", None), ("r1", 2)]
        assert told["record"].startswith("outputs/exp.regrades/")
    assert [found["run"] for found in regraded("outputs", "--only", "r1")["evals"]] == ["r1"]


def test_the_last_attempt_at_a_run_counts_and_what_was_superseded_does_not(project, regraded):
    with closing(Journal(project.outputs / "exp.journal.sqlite")) as journal:
        attempt = journal.begin("exp/r0", "fingerprint")
        attempt.add("eval", to_data(colours(step=3)), at=3)
        attempt.add("eval", to_data(colours(step=6)), at=6)
        attempt.supersede(after=3)
    assert [found["step"] for found in regraded("outputs/r0")["evals"]] == [3]


def test_a_journal_that_a_live_run_has_open_can_be_read(project, regraded):
    with closing(Journal(project.outputs / "exp.journal.sqlite")) as journal:
        journal.begin("exp/r9", "fingerprint")
        assert (project.outputs / "exp.journal.sqlite-wal").exists()
        assert len(regraded("outputs/r0")["evals"]) == 1


def test_without_a_journal_the_logs_are_read(project, regraded):
    (project.outputs / "exp.journal.sqlite").unlink()
    rows = [rollout_record(found, one) for found in (colours(stage="a"), colours(stage="b")) for one in found.rollouts]
    project.write("outputs/r0/logs/validation/rollouts.jsonl", rows)
    told = regraded("outputs/r0")
    assert [(found["stage"], found["name"], found["n_rollouts"]) for found in told["evals"]] == [
        ("a", "colours", 6),
        ("b", "colours", 6),
    ]
    assert scores(told)[0]["value"] == pytest.approx(1 / 3)


def test_what_was_trained_on_is_graded_when_asked_for(project, regraded):
    for step in (1, 2):
        log_rollouts(project.outputs / "r0", step, [rollout("red", "Red"), rollout("blue", "blue")], limit=8)
    assert [found["split"] for found in regraded("outputs/r0")["evals"]] == ["val"]
    told = regraded(
        "outputs/r0", "--only", "train", "--verifier", "exact_match", "--params", '{"case_sensitive": false}'
    )
    assert [(found["split"], found["n_rollouts"]) for found in told["evals"]] == [("train", 4)]
    assert [score["value"] for score in scores(told, "mean_reward")[:2]] == [0.5, 1.0]


def test_a_file_of_ones_own_brings_what_was_expected(project, regraded, tmp_path):
    rows = [
        {"task_id": "x", "completion": "4.0", "expected": 4, "reward": 0.0},
        {"task_id": "y", "completion": "5", "expected": 6},
    ]
    path = project.write("mine/answers.jsonl", rows)
    told = regraded(path, "--verifier", "numeric_match")
    old, new, _ = scores(told)
    assert (old["value"], old["n_errors"], new["value"], new["n_errors"]) == (0.0, 1, 0.5, 0)
    assert told["record"] == str(tmp_path / "mine/answers.regrades/1")


def test_an_evaluation_apart_from_any_run_is_graded_by_the_tasks_that_are_named(project, regraded, capsys):
    found = colours(split="test")
    project.write("alone/rollouts.jsonl", [rollout_record(found, one) for one in found.rollouts])
    write_json(project.root / "alone/settings.json", {"subject": {}, "folding": {"metrics": ["pass@2"]}})
    assert main(["regrade", "alone"]) == 1
    assert "Name them with --benchmark PATH" in capsys.readouterr().err
    told = regraded("alone", "--benchmark", "val")
    assert [score["metric"] for score in told["evals"][0]["scores"]] == ["pass@2", "mean_reward"]
    assert scores(told, "pass@2")[1]["value"] == pytest.approx(2 / 3)


def test_what_hosted_models_answered_is_graded_beside_the_runs(project, regraded):
    rows = [
        {"model": model, "split": "val", "eval": "colours", **rollout_to_data(one)}
        for model in ("big", "small")
        for one in colours().rollouts
    ]
    told = regraded(project.write("outputs/exp.models.rollouts.jsonl", rows))
    assert [(found["run"], found["n_rollouts"]) for found in told["evals"]] == [("big", 6), ("small", 6)]


def test_a_new_record_can_be_regraded_itself(project, regraded):
    regraded("outputs/r0", "--verifier", "format_only")
    told = regraded("outputs/r0/regrades/1", "--verifier", "exact_match", "--metrics", "pass@1", "tokens")
    old, new, _ = scores(told)
    assert (old["value"], new["value"]) == (0.0, pytest.approx(1 / 3))
    assert scores(told, "tokens")[1]["value"] == 3  # counted, though the tokens stay in the old record


def test_a_broken_verifier_is_an_error_and_a_sound_one_mends_it(project, regraded):
    broken = rollout("red", "red", reward=None, status="infra_error", error="verifier 'x' on task 'red': boom")
    lost = Rollout(task_id="blue", status="infra_error", error="no connection")
    project.record(colours(rollouts=[broken, lost]))
    told = regraded("outputs/r0")
    [found] = told["evals"]
    assert (found["n_errors_old"], found["n_errors_new"], found["n_changed"]) == (2, 1, 1)
    assert scores(told)[1]["value"] == 0.5  # what never came to an answer stays a failure, and an error
    lines = lines_of(f"{told['record']}/rollouts.jsonl")
    assert [(line["status"], line["error"]) for line in lines] == [("ok", None), ("infra_error", "no connection")]


def test_a_verifier_that_can_never_grade_is_refused(project, regraded, capsys):
    told = regraded("outputs/r0", "--verifier", "numeric_match", code=1)
    assert "numeric_match needs `expected`: a number" in told["error"]


def test_a_verifier_that_raises_leaves_no_score_and_ends_with_2(project, regraded, monkeypatch):
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))

    @register_verifier("raises")
    def raises(model_output, expected, params):
        raise ValueError(f"cannot compare with {expected}")

    told = regraded("outputs/r0", "--verifier", "raises", code=2)
    assert scores(told)[1]["value"] is None and told["evals"][0]["n_errors_new"] == 6
    assert "red" in told["evals"][0]["changed"][0]["error"]


def test_the_answer_that_an_agent_gave_is_what_is_graded(project, regraded):
    project.record(colours(rollouts=[rollout("red", "I am done", metadata={"answer": "red"}), rollout("blue", "blue")]))
    assert scores(regraded("outputs/r0"))[1]["value"] == 1.0


def test_a_projects_own_verifier_is_found_through_the_config_in_the_record(project, regraded, capsys):
    (project.root / "my_regrade_checks.py").write_text(
        "from evsys_sdk import register_verifier\n"
        "print('noise on stdout')\n"
        "@register_verifier('same_start')\n"
        "def same_start(model_output, expected, params):\n"
        "    return float(model_output[:1].lower() == expected[:1])\n"
    )
    project.record(colours(), config={**CONFIG, "imports": ["my_regrade_checks"]})
    told = regraded("outputs/r0", "--verifier", "same_start")
    assert scores(told)[1]["value"] == 1.0


def test_a_module_with_verifiers_can_be_named(project, regraded):
    path = project.write("mine.jsonl", [{"task_id": "x", "completion": "abc", "expected": 3}])
    (project.root / "my_other_checks.py").write_text(
        "from evsys_sdk import register_verifier\n"
        "@register_verifier('this_long')\n"
        "def this_long(model_output, expected, params):\n"
        "    return float(len(model_output) == expected)\n"
    )
    told = regraded(path, "--verifier", "this_long", "--import", "my_other_checks")
    assert scores(told)[1]["value"] == 1.0


def test_a_judge_is_asked_about_many_at_a_time_and_gets_the_instruction(project, regraded):
    import asyncio

    from evsys_sdk import register_verifier

    under_way = {"now": 0, "most": 0}

    @register_verifier("slow_judge")
    class SlowJudge:
        async def verify(self, *, prompt, completion, target):
            under_way["now"] += 1
            under_way["most"] = max(under_way.values())
            await asyncio.sleep(0.01)
            under_way["now"] -= 1
            return float(prompt == f"Say {target}")

    assert scores(regraded("outputs/r0", "--verifier", "slow_judge"))[1]["value"] == 1.0
    assert under_way["most"] == 6
    under_way["most"] = 0
    regraded("outputs/r0", "--verifier", "slow_judge", "--concurrency", "2")
    assert under_way["most"] == 2


def test_people_see_scores_before_and_after_and_the_first_changes(project, capsys):
    assert main(["regrade", "outputs/r0", "--verifier", "exact_match", "--params", "case_sensitive=false"]) == 0
    out = capsys.readouterr().out
    assert "r0  val/colours: 3 tasks, 6 rollouts, graded by exact_match" in out
    assert "pass@1       0.333 [" in out and "] -> 0.833 [" in out and "change +0.500" in out
    assert "changed: 3 of 6 (3 up, 0 down)" in out and "red #1  0 -> 1  'Red'" in out
    assert "new record: outputs/r0/regrades/1" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "there is nothing at nowhere"),
        (["val"], "val is no record"),
        (["outputs/r0", "--only", "colour"], "closest: colours"),
        (["outputs/r0", "--only", "train"], "the record has no such rollouts"),
        (["outputs/r0", "--verifier", "exact_mach"], "closest: exact_match"),
        (["outputs/r0", "--verifier", "exact_match", "--params", "sensitive=1"], "sensitive: unknown key"),
        (["outputs/r0", "--verifier", "exact_match", "--params", "sensitive"], "KEY=VALUE or one JSON object"),
        (["outputs/r0", "--verifier", "exact_match", "--params", "{"], "not valid JSON"),
        (["outputs/r0", "--params", "a=1"], "--params are those of --verifier"),
        (["outputs/r0", "--metrics", "pass@x"], "is not a metric"),
        (["outputs/r0", "--out", "outputs"], "is not an empty folder"),
        (["outputs/r0", "--concurrency", "0"], "--concurrency is 0; give a whole number of at least 1"),
        (["loose.jsonl"], "Name them with --benchmark PATH"),
        (["broken.jsonl"], "broken.jsonl:2: this rollout has no `completion`"),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_1(project, capsys, arguments, words):
    project.write("loose.jsonl", [{"task_id": "t", "completion": "x"}])
    project.write("broken.jsonl", [{"task_id": "t", "completion": "x"}, {"task_id": "t"}])
    assert main(["regrade", *arguments]) == 1
    assert words in capsys.readouterr().err
    assert not list(project.root.rglob("regrade.json"))


def test_two_experiments_in_a_folder_are_told_apart(project, capsys):
    Journal(project.outputs / "other.journal.sqlite").close()
    assert main(["regrade", "outputs"]) == 1
    assert "2 experiments; say which: evsys regrade outputs/exp.journal.sqlite" in capsys.readouterr().err


def test_tests_inside_an_environment_that_is_gone_are_refused(project, capsys):
    plan = {"kind": "e2b", "dockerfile": "FROM scratch", "test_sh": "true"}
    project.write("val/tasks.jsonl", [{**task, "verifier": plan, "metadata": {"environment": True}} for task in TASKS])
    assert main(["regrade", "outputs/r0"]) == 1
    assert "the environment, which is gone; grade the answer with --verifier" in capsys.readouterr().err
    assert main(["regrade", "outputs/r0", "--verifier", "format_only"]) == 0
