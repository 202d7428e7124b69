"""A benchmark is read strictly and scored honestly."""

from __future__ import annotations

import gzip
import json

import pytest

from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import DataError, EvsysError, UnknownKind
from evsys_sdk.eval.benchmark import Benchmark, find_copies, sampling_problem, task_problems
from evsys_sdk.eval.evaluate import WeightsModel
from evsys_sdk.protocols import Rollout, Turn
from evsys_sdk.training_api import SamplingParams


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

    async def roll_out(self, tasks, *, sampler, renderer, sampling, num_samples=1, finished=None):
        self.asked = {"tasks": [t.task_id for t in tasks], "sampling": sampling, "num_samples": num_samples}
        return [[self._one(task.task_id, i) for i in range(num_samples)] for task in tasks]

    def _one(self, task_id, index):
        rewards = self.rewards.get(task_id, [1.0])
        reward = rewards[index % len(rewards)]
        turn = Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text="yes" if reward else "no")
        if reward is None:
            return Rollout(task_id=task_id, status="infra_error", error="connection lost")
        return Rollout(task_id=task_id, turns=[turn], reward=reward)


async def score(benchmark, engine, *, max_tokens=256, temperature=1.0, **options):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    return await benchmark.score(WeightsModel(engine=engine, sampler=None, renderer=None, sampling=sampling), **options)


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
    with pytest.raises(DataError, match=r"a benchmark is a tasks.jsonl, a directory holding one, or "):
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


def directory(root, name, **files):
    """A task directory as somebody would write it for harbor."""
    texts = {"task.toml": "", "instruction.md": f"Make {name}.\n", "tests/test.sh": "exit 0\n", **files}
    for path, text in texts.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(text)
    return root / name


def test_a_directory_of_task_directories_is_a_benchmark_and_so_is_one_alone(tmp_path):
    directory(tmp_path, "b/deep")
    place = directory(tmp_path, "a", **{"task.toml": '[metadata]\nlevel = "easy"\n'})
    suite = Benchmark.load(tmp_path, name="terminal")
    assert [task.task_id for task in suite.tasks] == ["a", "b/deep"]
    assert suite.tasks[0].metadata["level"] == "easy" and suite.places == [str(place), str(tmp_path / "b/deep")]
    assert Benchmark.from_dir(tmp_path, name="terminal") == suite and suite.name == "terminal"
    alone = Benchmark.load(place)
    assert (alone.name, [task.task_id for task in alone.tasks]) == ("a", ["a"])


def test_where_there_is_a_tasks_file_it_alone_is_the_benchmark(tmp_path):
    directory(tmp_path, "a")
    write(tmp_path / "tasks.jsonl", row("from the file"))
    assert [task.task_id for task in Benchmark.load(tmp_path).tasks] == ["from the file"]


def test_the_hash_of_task_directories_is_of_their_contents_wherever_they_lie(tmp_path, monkeypatch):
    for home in ("here", "elsewhere/deeper"):
        for name in ("a", "b"):
            directory(tmp_path / home, name)
    here = Benchmark.load(tmp_path / "here").sha256
    (tmp_path / "here" / "a" / "__pycache__").mkdir()
    (tmp_path / "here" / "a" / "__pycache__" / "x.pyc").write_text("left behind")
    monkeypatch.chdir(tmp_path / "here")
    assert Benchmark.load(".").sha256 == here == Benchmark.load(tmp_path / "elsewhere/deeper").sha256


@pytest.mark.parametrize(
    "file", ["task.toml", "instruction.md", "tests/test.sh", "environment/data.txt", "solution/solve.sh"]
)
def test_any_file_of_a_task_changes_the_hash(tmp_path, file):
    place = directory(tmp_path, "a", **{"environment/data.txt": "x", "solution/solve.sh": "x"})
    before = Benchmark.load(tmp_path).sha256
    (place / file).write_text((place / file).read_text() + "# other\n")
    assert Benchmark.load(tmp_path).sha256 != before


def test_what_moved_between_files_changes_the_hash(tmp_path):
    place = directory(tmp_path, "a", **{"environment/one": "ab", "environment/two": ""})
    before = Benchmark.load(tmp_path).sha256
    (place / "environment/one").write_text("a")
    (place / "environment/two").write_text("b")
    assert Benchmark.load(tmp_path).sha256 != before


def test_task_directories_that_share_an_id_stay_distinct_and_a_tasks_own_files_are_no_tasks(tmp_path):
    from evsys_sdk.rollout.task_dirs import write_task

    task = HarborTask(task_id="t", instruction="x", verifier=InProcessVerifier(fn_name="exact_match", expected="y"))
    for name in ("one", "two"):
        write_task(task, tmp_path / name)
    (tmp_path / "one" / "environment" / "sample").mkdir()
    (tmp_path / "one" / "environment" / "sample" / "task.toml").write_text("")
    assert [found.task_id for found in Benchmark.load(tmp_path).tasks] == ["t", "t@two"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"task.toml": "no toml at all"}, "a/task.toml: "),
        ({"task.toml": "[metadata.evsys]\nrow = '[1'\n"}, "a/task.toml: metadata.evsys.row is no JSON"),
        ({"task.toml": """[metadata.evsys]\nrow = '{"instruction": 3}'\n"""}, "/a: "),
        ({"instruction.md": None}, "a is not a task directory: it has no .*a/instruction.md"),
    ],
)
def test_a_task_directory_that_cannot_be_read_says_which_file_is_wrong(tmp_path, files, said):
    place = directory(tmp_path, "a", **{path: text for path, text in files.items() if text is not None})
    for path, text in files.items():
        if text is None:
            (place / path).unlink()
    with pytest.raises(DataError, match=said):
        Benchmark.load(tmp_path)


def test_from_dir_says_what_is_no_directory(tmp_path):
    with pytest.raises(DataError, match="nowhere is not a directory of task directories: it does not exist"):
        Benchmark.from_dir(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no task directories"):
        Benchmark.from_dir(tmp_path)


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


def test_copies_of_a_task_are_found_by_what_they_ask_and_expect(tmp_path):
    def task(name, said="say red", expected="red", **metadata):
        verifier = InProcessVerifier(fn_name="exact_match", expected=expected)
        return HarborTask(task_id=name, instruction=said, verifier=verifier, metadata=metadata)

    asked = [{"role": "user", "content": "hello"}]
    tasks = [
        task("a"), task("b", expected="blue"), task("c", history=asked), task("d", said=" Say\n red", n=4),
        task("e", history=asked), task("f", said="say green"),
    ]  # fmt: skip
    assert find_copies(tasks) == {"d": "a", "e": "c"}
    for name, text in (("one", "1"), ("two", "2"), ("three", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.txt").write_text(text)
    in_folders = [task(name, harbor={"dir": str(tmp_path / name)}) for name in ("one", "two", "three")]
    assert find_copies(in_folders) == {"three": "one"}
