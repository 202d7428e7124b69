"""What the published documents promise of the Python API, each promise as they word it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

import evsys_sdk
from evsys_sdk import protocols, registry
from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.algorithms.sdft import SDFT
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.config.metadata import Metadata
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.sources import DataSource
from evsys_sdk.data.stores import InMemoryDataStore
from evsys_sdk.errors import DataError, EvsysError, WorkspaceError
from evsys_sdk.eval.metrics import as_metric
from evsys_sdk.eval.scoring import score_one
from evsys_sdk.experiment.experiment import Experiment, RunOptions, run_experiment
from evsys_sdk.protocols import TaskScores
from evsys_sdk.record.log_stores import JsonlLogStore, MultiplexLogStore
from evsys_sdk.research.state import Proposer
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import training_context

CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def registries_as_before(monkeypatch):
    for one in registry.REGISTRIES.values():
        one.names()
        monkeypatch.setattr(one, "entries", dict(one.entries))


def config(tmp_path, **changes):
    run = {
        "name": "r0",
        "data": {"source_kind": "in_memory", "rows": [CHAT] * 4},
        "model": {"name": "m"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 2, "batch_size": 2}},
        "backend": {"kind": "mock"},
        "eval": {"enabled": False},
    }
    return {"name": "x", "output_dir": str(tmp_path / "out"), "run": run | changes}


# --- registries


def test_a_built_ins_name_is_refused_where_another_class_takes_it(tmp_path):
    """In a process of its own: the built-ins must not have been loaded before."""
    program = """
import evsys_sdk
try:
    @evsys_sdk.register_transform("identity")
    class Mine:
        def __call__(self, rows): return rows
except evsys_sdk.EvsysError as exc:
    print(exc)
evsys_sdk.get_algorithm("sft")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "'identity' is already registered by evsys_sdk.data.transforms" in done.stdout
    assert "__main__.Mine" in done.stdout


def test_every_protocol_can_be_asked_at_run_time():
    found = [
        cls for cls in vars(protocols).values()
        if inspect.isclass(cls) and getattr(cls, "_is_protocol", False) and cls.__module__ == protocols.__name__
    ]  # fmt: skip
    assert len(found) > 10
    for cls in [*found, DataSource, Proposer]:  # contracts of registered kinds that are in rooms of their own
        assert isinstance(object(), cls) is False


def test_the_training_toolkit_is_importable_from_the_package():
    assert evsys_sdk.TrainingLoop and issubclass(BaseAlgorithm, evsys_sdk.StepBuilder)


def test_the_mock_client_works_without_a_run():
    client = evsys_sdk.get_inference("mock")()
    assert client.generate(prompt="one two three", max_tokens=2, temperature=0.0, stop=None) == "one two"
    assert client.generate(prompt="one two three", max_tokens=9, temperature=0.0, stop=["three"]) == "one two "


# --- data


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"instruction": "?", "verifier": {}, "inputs": {}, "messages": []}, "harbor_task"),
        ({"inputs": {"q": "?"}, "messages": []}, "prompt_dataset"),
        ({"messages": []}, "chat_messages"),
        ({"inputs": "?", "messages": []}, "chat_messages"),
        ({"x": 1}, "unknown"),
    ],
)
def test_a_row_with_columns_of_several_formats_is_a_task_then_inputs_then_a_chat(row, shape):
    assert evsys_sdk.detect_format(row) == shape


def test_a_chat_beside_other_columns_still_trains(tmp_path):
    rows = [{**CHAT, "inputs": {"q": "2+2?"}}]
    assert SFT(max_steps=1).train(training_context(tmp_path, rows)).status == "completed"


@pytest.mark.parametrize("row", [{}, {"x": 1}, {"prompt": "?"}, {"messages": []}, {"messages": None}, CHAT])
def test_a_row_without_images_has_none(row):
    assert evsys_sdk.has_images(row) is False


def test_images_are_found_in_every_format():
    image = [evsys_sdk.image_url_block("http://x/y.png")]
    assert evsys_sdk.has_images({"messages": [{"role": "user", "content": image}]})
    assert evsys_sdk.has_images({"instruction": image, "verifier": {}})
    assert evsys_sdk.has_images({"inputs": {"picture": image}})


@pytest.mark.parametrize("kind", ["generator", "tuple", "map"])
def test_a_transform_may_return_any_iterable_of_rows(registries_as_before, kind):
    @evsys_sdk.register_transform("iterable")
    class Doubled:
        def __call__(self, rows):
            made = [{"n": row["n"] * 2} for row in rows]
            return {"generator": (row for row in made), "tuple": tuple(made), "map": map(dict, made)}[kind]

    assert rows_after("iterable") == [{"n": 2}, {"n": 4}]


@pytest.mark.parametrize("made", [{"n": 1}, "rows", 3, None])
def test_what_is_no_rows_is_refused(registries_as_before, made):
    @evsys_sdk.register_transform("wrong")
    class Wrong:
        def __call__(self, rows):
            return made

    with pytest.raises(DataError, match=r"'wrong' \(number 1\) must return rows"):
        rows_after("wrong")


def test_what_a_generator_raises_is_its_transforms_fault(registries_as_before):
    @evsys_sdk.register_transform("raises")
    class Raises:
        def __call__(self, rows):
            yield rows[0]
            raise KeyError("n")

    with pytest.raises(DataError, match=r"transform 'raises' \(number 1\) failed: KeyError"):
        rows_after("raises")


def rows_after(kind):
    data = evsys_sdk.DataConfig(source_kind="in_memory", rows=[{"n": 1}, {"n": 2}], transforms=[{"kind": kind}])
    return load_rows(data, store=InMemoryDataStore()).rows


# --- metrics


def test_answers_are_taken_out_of_their_tags_before_a_metric_sees_them():
    seen = []

    class Spy:
        def compute(self, *, predictions, targets):
            seen.extend(predictions)
            return 0.0

    task = TaskScores(task_id="t", rewards=[0.0, 0.0], predictions=["So: <answer> 4 </answer>", "5"], target="4")
    as_metric(Spy())([task])
    assert seen == ["4", "5"]


@pytest.mark.parametrize("name", ["pass@1", "pass^2", "pass_at_k", "pass_rate", "mean_reward"])
@pytest.mark.parametrize(("rewards", "said"), [([], "no tasks"), ([[1.0], []], "task 1 has no rollouts")])
def test_a_metric_of_nothing_is_invalid_and_says_why(name, rewards, said):
    with pytest.raises(EvsysError, match=f"invalid: .*{said}"):
        evsys_sdk.get_metric(name)().compute(rewards)


@pytest.mark.parametrize("name", ["exact_match", "toolkit_match"])
@pytest.mark.parametrize(("predictions", "targets"), [([], []), (["a"], []), ([], ["a"])])
def test_predictions_and_targets_must_be_there_and_fit(name, predictions, targets):
    with pytest.raises(EvsysError, match="invalid: "):
        evsys_sdk.get_metric(name)().compute(predictions=predictions, targets=targets)


def test_a_projects_metric_is_not_asked_about_nothing():
    class Mine:
        def compute(self, task_rewards):
            return 0.0

    assert score_one("mine", Mine(), []).value is None
    broken = score_one("mine", Mine(), [TaskScores(task_id="a", rewards=[1.0]), TaskScores(task_id="b", rewards=[])])
    assert broken.value is None and "no rollouts" in str(broken.error)


def test_pass_rate_counts_each_task_the_same_as_its_text_says():
    metric = evsys_sdk.get_metric("pass_rate")
    assert metric().compute([[1.0], [0.0, 0.0, 0.0]]) == 0.5
    assert "each task counts the same" in metric.__doc__


def test_cost_latency_and_tokens_are_metrics():
    assert {"cost", "latency", "tokens"} <= set(evsys_sdk.list_metrics())


@pytest.mark.parametrize("name", ["cost", "latency", "tokens"])
@pytest.mark.parametrize(("rollouts", "said"), [([], "no tasks"), ([[]], "task 0 has no rollouts")])
def test_the_cost_of_nothing_is_invalid_and_says_why(name, rollouts, said):
    with pytest.raises(EvsysError, match=f"invalid: .*{said}"):
        evsys_sdk.get_metric(name)().compute(rollouts=rollouts)


@pytest.mark.parametrize(
    ("args", "named"),
    [(("<answer>x</answer>",), {"expected": None}), ((), {"completion": "<answer>x</answer>", "expected": None}),
     ((), {"model_output": "<answer>x</answer>", "expected": None, "params": {}}),
     (("<answer>x</answer>", None), {"params": {"format": "answer"}}),
     (("<answer>x</answer>", None), {"format": "answer"})],
)  # fmt: skip
def test_a_verifier_is_called_by_position_and_by_name(args, named):
    assert evsys_sdk.get_verifier("format_only")(*args, **named) == 1.0


# --- training


def test_the_numbers_of_a_batch_survive_an_overridden_step_metrics(tmp_path):
    class Mine(SFT):
        async def build_batch(self, step):
            batch = await super().build_batch(step)
            batch.metrics["mine"] = float(step)
            return batch

        def step_metrics(self, step, batch, outputs):
            return {"other": 1.0}

    ctx = training_context(tmp_path, [CHAT])
    Mine(max_steps=2).train(ctx)
    assert ctx.log_store.curve("mine") == [1.0, 2.0] and ctx.log_store.curve("other") == [1.0, 1.0]


@pytest.mark.parametrize(("max_steps", "num_epochs"), [(7, 1), (2, 5)])
def test_max_steps_wins_over_num_epochs(max_steps, num_epochs):
    assert LoopParams(max_steps=max_steps, num_epochs=num_epochs).planned_steps(3) == max_steps


def test_a_demonstration_that_does_not_fit_is_left_out_counted_and_named(tmp_path, capsys):
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}], "target_assistant": text, "id": name}
        for i, (name, text) in enumerate([("short", "yes"), ("endless", "so " * 500), ("brief", "no")])
    ]
    ctx = training_context(tmp_path, rows, rollouts=InProcessRolloutEngine())
    result = SDFT(max_steps=2, max_tokens=8, max_length=400).train(ctx)
    assert result.metrics["rows_dropped"] == 1 and result.extras["dropped_rows"] == ["endless"]
    assert "endless" in capsys.readouterr().err


def test_when_no_demonstration_fits_nothing_is_trained(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "?"}], "target_assistant": "so " * 500}]
    ctx = training_context(tmp_path, rows, rollouts=InProcessRolloutEngine())
    with pytest.raises(DataError, match="no row is left"):
        SDFT(max_steps=2, max_tokens=8, max_length=100).train(ctx)


# --- experiments


def test_metadata_is_a_mapping():
    metadata = Metadata(budget=3, hypothesis="more is more")
    assert isinstance(metadata, Mapping)
    assert {**metadata}["budget"] == 3 and dict(metadata)["hypothesis"] == "more is more"
    assert len(metadata) == len(list(metadata)) == len(metadata.keys()) == len(metadata.items())
    assert (
        "budget" in metadata
        and list(metadata.keys()) == list(metadata)
        and ("budget", 3) in metadata.items()
        and 3 in list(metadata.values())
    )


def test_run_experiment_can_start_over_and_fork(tmp_path):
    first = run_experiment(config(tmp_path))[0]
    again = run_experiment(config(tmp_path))[0]
    assert again.finished_before and first.metrics["final_loss"] == again.metrics["final_loss"]
    assert not run_experiment(config(tmp_path), fresh=True)[0].finished_before
    changed = config(tmp_path, seed=7)
    with pytest.raises(EvsysError):
        run_experiment(changed)
    assert run_experiment(changed, fork=True)[0].status == "completed"


def test_an_experiment_has_a_status(tmp_path):
    result = Experiment(evsys_sdk.ExperimentConfig(**config(tmp_path))).run(RunOptions())
    assert result.status == "completed"
    record = json.loads((tmp_path / "out" / "x.experiment_result.json").read_text())
    assert record["status"] == "completed"


@pytest.mark.parametrize("value", [..., "high", None, [1.0]])
def test_what_is_no_number_is_refused_as_a_metric(tmp_path, value):
    for store in (
        JsonlLogStore(log_dir=str(tmp_path)),
        MultiplexLogStore(stores=[{"kind": "jsonl", "params": {"log_dir": str(tmp_path / "m")}}]),
    ):
        with pytest.raises(EvsysError, match=r"metric 'loss' of step 3 .* not a number"):
            store.log_scalar("loss", value, 3)
        store.log_scalar("loss", 1.0, 4)  # the store itself is none the worse


@pytest.mark.parametrize("value", [..., "high", float("nan")])
def test_a_run_that_logs_no_number_says_which(tmp_path, registries_as_before, capsys, value):
    @evsys_sdk.register_algorithm("logs_it")
    class LogsIt:
        def train(self, ctx):
            ctx.log_store.log_metrics({"mine": value}, 1)
            return evsys_sdk.RunResult(run_id=ctx.run_id, status="completed", metrics={"final": value})

    result = run_experiment(config(tmp_path, algorithm={"kind": "logs_it"}))[0]
    if value == value:  # not NaN
        assert result.status == "failed" and "metric 'mine' of step 1" in str(result.error)
    else:
        assert "metric 'mine' is nan at step 1" in capsys.readouterr().err
        record = json.loads((tmp_path / "out" / "r0" / "run_result.json").read_text())
        assert any("'final' is nan" in warning for warning in record["warnings"])
        assert "metric 'mine' is nan at step 1" in record["warnings"], "also what is only logged"


# --- workspace


def test_a_workspace_ignores_itself_in_git(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    run_experiment(config(tmp_path) | {"output_dir": str(tmp_path / ".evsys" / "outputs")})
    status = subprocess.run(
        ["git", "-C", str(tmp_path), "status", "--porcelain"], capture_output=True, text=True, check=True
    )
    assert (tmp_path / ".evsys" / "outputs" / "r0").is_dir() and status.stdout == ""


def test_a_manifest_says_its_rows_and_its_transform_chain(tmp_path):
    workspace = evsys_sdk.Workspace(tmp_path / ".evsys")
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 3}\n')
    chain = [{"kind": "first_n", "params": {"n": 1}}, "dedupe"]
    one = workspace.add(tmp_path / "a.jsonl", name="one", transforms=chain)
    other = workspace.add(tmp_path / "b.jsonl", name="other", transforms=reversed(chain))
    data = json.loads(workspace.versions("dataset").manifest_path(one.id).read_text())
    assert data["n_rows"] == 2 and len(data["lineage"]["transforms_sha256"]) == 64
    assert one.lineage.transforms_sha256 == workspace.get("one").lineage.transforms_sha256
    assert one.lineage.transforms_sha256 != other.lineage.transforms_sha256


class Remote:
    def __init__(self):
        self.asked, self.rows, self.id, self.version = 0, [{"n": 1}], "sums-1", 1

    def fetch(self, kind, ref):
        self.asked += 1
        info = {"id": self.id, "name": "sums", "version": self.version, "n_rows": len(self.rows)}
        return info, iter(self.rows)


def test_force_pulls_again_and_finds_a_newer_version(tmp_path):
    remote = Remote()
    workspace = evsys_sdk.Workspace(tmp_path / ".evsys", source=remote)
    workspace.pull_dataset("sums")
    workspace.pull_dataset("sums")
    assert remote.asked == 1
    workspace.pull_dataset("sums", force=True)
    assert remote.asked == 2
    remote.rows, remote.id, remote.version = [{"n": 1}, {"n": 2}], "sums-2", 2
    assert len(workspace.pull_dataset("sums", force=True).read_text().splitlines()) == 2


def test_force_does_not_change_what_an_id_stands_for(tmp_path):
    remote = Remote()
    workspace = evsys_sdk.Workspace(tmp_path / ".evsys", source=remote)
    before = workspace.pull_dataset("sums-1").read_bytes()
    remote.rows = [{"n": 9}]
    with pytest.raises(WorkspaceError, match="sha256 differs"):
        workspace.pull_dataset("sums-1", force=True)
    assert workspace.pull_dataset("sums-1").read_bytes() == before


def test_force_without_a_source_is_refused(tmp_path):
    with pytest.raises(WorkspaceError, match="no remote source"):
        evsys_sdk.Workspace(tmp_path / ".evsys").pull_benchmark("sums", force=True)
