"""A benchmark is read strictly and scored honestly."""

from __future__ import annotations

import gzip
import json

import pytest

from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import DataError, EvsysError, UnknownKind
from evsys_sdk.eval.benchmark import Benchmark, sampling_problem, task_problems
from evsys_sdk.protocols import Rollout, Turn


def row(task_id="t1", fn_name="exact_match", expected="yes", **more) -> dict:
    verifier = {"kind": "in_process", "fn_name": fn_name, "expected": expected, "params": more.pop("params", {})}
    return {"task_id": task_id, "instruction": f"Solve {task_id}", "verifier": verifier, **more}


def write(path, *rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))


class ScriptedEngine:
    """Answers each task with prepared rewards; None is an infrastructure error."""

    def __init__(self, **rewards):
        self.rewards, self.asked = rewards, {}

    async def roll_out(self, tasks, *, sampler, renderer, sampling, num_samples=1):
        self.asked = {"tasks": [t.task_id for t in tasks], "sampling": sampling, "num_samples": num_samples}
        return [[self._one(task.task_id, i) for i in range(num_samples)] for task in tasks]

    def _one(self, task_id, index):
        rewards = self.rewards.get(task_id, [1.0])
        reward = rewards[index % len(rewards)]
        turn = Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text="yes" if reward else "no")
        if reward is None:
            return Rollout(task_id=task_id, status="infra_error", error="connection lost")
        return Rollout(task_id=task_id, turns=[turn], reward=reward)


async def score(benchmark, engine, **options):
    return await benchmark.score(engine=engine, sampler=None, renderer=None, seed=1, **options)


def test_a_directory_with_a_tasks_file_is_a_benchmark_and_so_is_the_file(tmp_path):
    write(tmp_path / "mail" / "tasks.jsonl", row("a"), "", row("b", level=3))
    by_folder, by_file = Benchmark.load(tmp_path / "mail"), Benchmark.load(tmp_path / "mail" / "tasks.jsonl")
    assert by_folder == by_file and by_folder.name == "mail"
    assert [task.task_id for task in by_folder.tasks] == ["a", "b"]
    assert by_folder.tasks[1].metadata == {"level": 3}
    assert by_folder.places[1].endswith("tasks.jsonl:3")


def test_the_hash_is_that_of_the_content(tmp_path):
    write(tmp_path / "one.jsonl", row("a"))
    write(tmp_path / "two.jsonl", row("a"))
    write(tmp_path / "three.jsonl", row("a", expected="no"))
    (tmp_path / "four.jsonl.gz").write_bytes(gzip.compress((tmp_path / "one.jsonl").read_bytes()))
    one, two, three, four = (
        Benchmark.load(tmp_path / name) for name in ("one.jsonl", "two.jsonl", "three.jsonl", "four.jsonl.gz")
    )
    assert one.sha256 == two.sha256 == four.sha256 != three.sha256
    assert (one.name, four.name) == ("one", "four")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "expected an object"),
        ('{"instruction": "x"}', "no known shape"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "a task has `instruction` and `verifier`"),
        (json.dumps({"instruction": "x", "verifier": {"kind": "in_proces"}}), "closest: in_process"),
        (json.dumps({"instruction": "x", "verifier": {"kind": "in_process"}}), "fn_name"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, reason):
    write(tmp_path / "tasks.jsonl", row("a"), line)
    with pytest.raises(DataError, match=reason) as told:
        Benchmark.load(tmp_path)
    assert f"{tmp_path / 'tasks.jsonl'}:2: " in str(told.value)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_what_is_no_benchmark_says_what_one_is(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"a benchmark is a tasks.jsonl or a directory holding one"):
        Benchmark.load(tmp_path / name)


def test_a_file_without_tasks_is_refused(tmp_path):
    write(tmp_path / "tasks.jsonl", "")
    with pytest.raises(DataError, match="has no tasks"):
        Benchmark.load(tmp_path)


def test_a_file_from_windows_is_read(tmp_path):
    text = json.dumps(row("a")) + "\r\n" + json.dumps(row("b")) + "\r\n"
    (tmp_path / "tasks.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert len(Benchmark.load(tmp_path).tasks) == 2


def test_tasks_that_share_an_id_stay_distinct():
    rows = [row("a"), row("a"), row("a#2"), row("a"), row("b")]
    ids = [task.task_id for task in Benchmark.from_iterable("x", rows).tasks]
    assert ids == ["a", "a#3", "a#2", "a#4", "b"]


def test_rows_and_typed_tasks_make_the_same_benchmark():
    typed = HarborTask(
        task_id="t1", instruction="Solve t1", verifier=InProcessVerifier(fn_name="exact_match", expected="yes")
    )
    assert Benchmark.from_iterable("x", [row()]) == Benchmark.from_iterable("x", [typed])


async def test_scores_come_with_interval_denominator_and_errors():
    benchmark = Benchmark.from_iterable("suite", [row(name) for name in "abcd"])
    result = await score(benchmark, ScriptedEngine(a=[0.0], b=[None]), metrics=["pass@1", "exact_match"], split="val")
    first = result.scores[0]
    assert (result.name, result.split, result.error) == ("suite", "val", None)
    assert (first.metric, first.value, first.n_tasks, first.n_rollouts, first.n_errors) == ("pass@1", 0.5, 4, 4, 1)
    assert first.low == pytest.approx(0.150, abs=1e-3) and first.high == pytest.approx(0.850, abs=1e-3)
    assert result.scores[1].value == 0.5
    assert len(result.rollouts) == 4


async def test_an_eval_where_everything_errored_is_invalid():
    benchmark = Benchmark.from_iterable("suite", [row("a"), row("b")])
    result = await score(benchmark, ScriptedEngine(a=[None], b=[None]))
    assert result.scores[0].value is None
    assert result.error == "invalid: all 2 rollouts errored; the first: connection lost"


async def test_rollouts_per_task_are_by_default_the_largest_k():
    engine, benchmark = ScriptedEngine(), Benchmark.from_iterable("suite", [row("a")])
    await score(benchmark, engine, metrics=["pass@1", "pass^4", "pass@2"])
    assert engine.asked["num_samples"] == 4
    await score(benchmark, engine, metrics=["mean_reward"], num_samples=3)
    assert engine.asked["num_samples"] == 3


async def test_a_k_beyond_num_samples_is_refused_before_anything_is_spent():
    engine, benchmark = ScriptedEngine(), Benchmark.from_iterable("suite", [row("a")])
    with pytest.raises(EvsysError, match="pass@3 needs num_samples of at least 3; it is 2"):
        await score(benchmark, engine, metrics=["pass@1", "pass@3"], num_samples=2)
    assert engine.asked == {}
    assert sampling_problem(["pass@3"], 3) is None and sampling_problem(["pass@3"], None) is None


async def test_an_unknown_metric_is_refused_before_anything_is_spent():
    engine, benchmark = ScriptedEngine(), Benchmark.from_iterable("suite", [row("a")])
    with pytest.raises(UnknownKind, match="closest: mean_reward"):
        await score(benchmark, engine, metrics=["mean_rewards"])
    assert engine.asked == {}


async def test_the_limit_takes_the_first_tasks_and_the_settings_reach_the_sampler():
    engine, benchmark = ScriptedEngine(), Benchmark.from_iterable("suite", [row(name) for name in "abc"])
    await score(benchmark, engine, limit=2, max_tokens=9, temperature=0.5)
    sampling = engine.asked["sampling"]
    assert engine.asked["tasks"] == ["a", "b"]
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.5, 1)


async def test_a_breakdown_has_the_same_numbers_per_group():
    rows = [row("a", level="easy"), row("b", level="hard"), row("c", level="hard")]
    benchmark = Benchmark.from_iterable("suite", rows)
    result = await score(benchmark, ScriptedEngine(b=[0.0]), breakdown_keys=["level"])
    assert {key: scores[0].value for key, scores in result.breakdown["level"].items()} == {"easy": 1.0, "hard": 0.5}


def test_wrong_verifiers_are_told_once_at_their_first_use(tmp_path):
    write(
        tmp_path / "tasks.jsonl",
        row("a"),
        row("b", fn_name="exact_mach"),
        row("c", fn_name="exact_mach", params={"n": 1}),
        row("d", params={"case_sensitve": True}),
        row("e", params={"case_sensitive": True}),
    )
    problems = task_problems(Benchmark.load(tmp_path))
    assert len(problems) == 2
    assert problems[0].startswith(
        f"{tmp_path}/tasks.jsonl:2: task 'b': 'exact_mach' is not a verifier; closest: exact_match"
    )
    assert problems[1].startswith(
        f"{tmp_path}/tasks.jsonl:4: task 'd': params of verifier 'exact_match': case_sensitve"
    )
