"""Checkpoints by name: which run, which stage, which step."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from evsys_sdk.cli.main import main
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment import export
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.history.checkpoint_refs import CheckpointName, checkpoint_path
from evsys_sdk.run.open_model import ModelRef, find_target, find_weights

CHATS = {"path": "train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"say {word}", "completion": word} for word in ("red", "green", "blue", "black")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def go(name="first", *, stages=(), model=None, algorithm=None, arm="r0", folder=None, **options):
        block = {"name": arm, "model": {"name": "any", **(model or {})}, "backend": {"kind": "mock"}}
        block["algorithm"] = algorithm or {"kind": "sft", "params": {"max_steps": 4, "save_every": 2}}
        block |= {"continual": {"stages": [{"name": one, "data": CHATS} for one in stages]}} if stages else {}
        block |= {} if stages else {"data": CHATS}
        config = {"name": name, "output_dir": folder or f"outputs/{name}", "run": block}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
        result = Experiment.from_yaml(f"{name}.yaml").run(RunOptions(**options))
        assert result.completed, result.runs[0].error
        return result.runs[0]

    return go


@pytest.mark.parametrize("text", ["outputs/r0", "tinker://run/weights/x@final", "a@b", "pass@1", "r0@step-x", "@final"])
def test_a_path_or_an_address_is_no_name(text):
    assert CheckpointName.parse(text) is None
    assert checkpoint_path(text, "state") == text


@pytest.mark.parametrize("ref", ["outputs/first/r0", "first/r0", "first", "r0"])
def test_a_run_is_named_by_its_directory_or_by_name(run, ref):
    made = run()
    assert checkpoint_path(f"{ref}@final", "state") == made.artifacts["final_checkpoint"]
    assert checkpoint_path(f"{ref}@final", "sampler") == made.artifacts["final_sampler"]
    assert checkpoint_path(f"{ref}@latest", "state") == made.artifacts["final_checkpoint"]
    assert "step-000002" in checkpoint_path(f"{ref}@step-2", "state")


def test_a_name_of_several_runs_is_refused_with_the_candidates(run):
    run()
    run("second")
    with pytest.raises(EvsysError, match=r"'r0' can mean 2 runs: .*first/r0.*name one as <experiment>/<run>"):
        checkpoint_path("r0@final", "state")
    with pytest.raises(EvsysError, match="no run 'nothing'; known: "):
        checkpoint_path("nothing@final", "state")


def exported(ref, monkeypatch):
    """The target that `evsys model export <ref>` finds; it is not written."""
    seen = []

    def find(wish):
        seen.append(find_target(wish))
        raise EvsysError("found")

    monkeypatch.setattr(export, "find_target", find)
    with pytest.raises(EvsysError, match="found"):
        export.export_run(ref, "peft", None)
    return seen[0]


def test_export_takes_every_name_that_a_checkpoint_has(run, monkeypatch):
    made = run()
    for ref in ("r0", "first", "first/r0", "r0@final", "first@final", "r0@latest", "first/r0@step-4"):
        assert exported(ref, monkeypatch).checkpoint == made.artifacts["final_sampler"], ref
    assert exported("r0@step-2", monkeypatch).checkpoint == checkpoint_path("r0@step-2", "sampler")
    with pytest.raises(EvsysError, match="no run 'nothing'; known: first/r0"):
        export.export_run("nothing@final", "peft", None)


def test_export_takes_a_stage_of_a_chain(run, monkeypatch):
    run(stages=("one", "two"))
    for ref in ("r0@one/final", "r0@one/step-2"):
        assert exported(ref, monkeypatch).checkpoint == checkpoint_path(ref, "sampler"), ref


def test_runs_of_one_name_in_one_folder_are_told_apart(run, monkeypatch):
    first, second = run(folder="outputs"), run("second", folder="outputs", algorithm={
        "kind": "sft", "params": {"max_steps": 2, "save_every": 1}})  # fmt: skip
    assert second.run_dir.name.endswith("r0@second")
    for ref, made in (("first/r0", first), ("second/r0", second)):
        assert checkpoint_path(f"{ref}@final", "sampler") == made.artifacts["final_sampler"]
        assert exported(ref, monkeypatch).checkpoint == made.artifacts["final_sampler"]
        assert find_target(ModelRef(text=f"{ref}@final", backend="mock")).checkpoint == made.artifacts["final_sampler"]
    assert exported("some-org/some-model", monkeypatch).checkpoint is None
    shutil.rmtree(second.run_dir)
    with pytest.raises(EvsysError, match="no run 'second/r0'; known: first/r0"):
        checkpoint_path("second/r0@final", "state")


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(run):
    run()
    with pytest.raises(EvsysError, match=r"no checkpoint 'step-3'; there are: r0@step-2, r0@step-4"):
        checkpoint_path("r0@step-3", "state")


def test_a_stage_of_a_chain_is_named_too(run):
    made = run(stages=("one", "two"))
    assert checkpoint_path("r0@final", "state") == made.artifacts["final_checkpoint"]
    first, second = (checkpoint_path(f"r0@{stage}/final", "state") for stage in ("one", "two"))
    assert first != second == made.artifacts["final_checkpoint"]
    with pytest.raises(EvsysError, match="can mean r0@one/step-2, r0@two/step-2; name the stage"):
        checkpoint_path("r0@step-2", "state")


def test_final_means_the_weights_that_best_by_chose(run, tmp_path):
    made = run()
    record = tmp_path / "outputs/first/r0/run_result.json"
    chosen = json.loads(record.read_text())
    chosen["artifacts"]["final_checkpoint"] = checkpoint_path("r0@step-2", "state")
    record.write_text(json.dumps(chosen))
    assert checkpoint_path("r0@final", "state") == chosen["artifacts"]["final_checkpoint"]
    assert checkpoint_path("r0@latest", "state") == made.artifacts["final_checkpoint"]


def test_a_run_directory_that_was_moved_has_its_weights_with_it(run, tmp_path):
    run()
    shutil.move(tmp_path / "outputs/first/r0", tmp_path / "elsewhere")
    assert checkpoint_path("elsewhere@final", "state").startswith(str(tmp_path / "elsewhere/weights/"))


def test_training_starts_from_the_named_weights_and_notices_when_they_change(run):
    first = run()
    whole = run("path", model={"load_checkpoint_path": first.artifacts["final_checkpoint"]})
    named = run("named", model={"load_checkpoint_path": "first/r0@final"})
    assert named.metrics["first_loss"] == whole.metrics["first_loss"] < first.metrics["first_loss"]
    run(algorithm={"kind": "sft", "params": {"max_steps": 2}}, fresh=True)
    with pytest.raises(EvsysError, match="weights of first/r0@final"):
        run("named", model={"load_checkpoint_path": "first/r0@final"})


def test_a_teacher_is_named_like_any_other_checkpoint(run):
    run()
    params = {"teacher": {"load_checkpoint_path": "first@final"}, "max_steps": 1, "num_samples": 2, "max_tokens": 4}
    assert run("student", algorithm={"kind": "distill", "params": params}).status == "completed"


def test_a_model_is_opened_by_the_name_of_its_checkpoint(run):
    run()
    target = find_target(ModelRef(text="first/r0@step-2"))
    assert "step-000002" in target.checkpoint and (target.model, target.backend) == ("any", "mock")


def test_a_model_is_opened_by_the_name_of_its_run_where_only_one_run_has_it(run):
    made = run()
    for text in ("r0", "first", "first/r0"):
        target = find_target(ModelRef(text=text))
        assert (target.checkpoint, target.backend) == (made.artifacts["final_sampler"], "mock"), text
    assert find_weights("r0", model="any", backend="mock", params={}).checkpoint == made.artifacts["final_sampler"]
    for text in ("some-org/some-model", "r1"):
        assert find_target(ModelRef(text=text)).checkpoint is None, "the name of a model"
    run("second")
    with pytest.raises(EvsysError, match=r"'r0' can mean 2 runs: (first/r0, second/r0|second/r0, first/r0); name one"):
        find_target(ModelRef(text="r0"))
    with pytest.raises(EvsysError, match=r"^\./r0: no such file or directory$"):
        find_target(ModelRef(text="./r0"))


def test_a_wrong_name_is_a_problem_of_the_config(run, capsys):
    run()
    run("next", model={"load_checkpoint_path": "first/r0@final"})
    assert main(["run", "next.yaml", "--set", "run.model.load_checkpoint_path=first/r0@step-9"]) == 1
    told = capsys.readouterr()
    assert "there are: r0@step-2, r0@step-4" in told.out + told.err
