"""Every algorithm from a YAML to a record on real weights: `local` in this process, `tinker` against our own server.

The two learn the same: the config differs in one line, and so do the records.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from evsys_sdk.errors import ConfigError

pytest.importorskip("torch", reason="needs the extra local")

from evsys_engine.server import background_server
from evsys_engine.server.run import ServerAddress
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.registry import algorithms

FOCAL = """
from evsys_sdk import register_algorithm
from evsys_sdk.algorithms.sft import SFT


def my_focal_loss(data, logprobs):
    loss = 0.0
    for datum, lp in zip(data, logprobs):
        loss = loss - (datum.loss_fn_inputs["weights"].to_torch() * (1 - lp.exp()) ** 2 * lp).sum()
    return loss, {"focal": float(loss.detach())}


@register_algorithm("focal_sft")
class FocalSFT(SFT):
    name = "focal_sft"

    async def build_batch(self, step_idx):
        batch = await super().build_batch(step_idx)
        batch.loss_fn = my_focal_loss   # a client-side LossCallable
        return batch
"""
WORDS = ("red", "green", "blue", "black")
SHORT = {"max_steps": 2, "batch_size": 2, "lora_rank": 4, "learning_rate": 1e-2}
SAMPLED = {**SHORT, "num_samples": 6, "max_tokens": 4}
TO_TASKS = {"kind": "to_harbor_task", "params": {"fn_name": "regex_match", "expected_key": "pattern"}}
TASKS = {"path": "data/tasks.jsonl", "transforms": [TO_TASKS]}
CHATS = {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]}


@pytest.fixture
def world(project, monkeypatch):
    """The project with rows for every algorithm, and the walkthrough's focal loss as a module."""
    (project.root / "my_focal.py").write_text(FOCAL)
    monkeypatch.syspath_prepend(project.root)
    project.write_rows("data/tasks.jsonl", [{"prompt": f"say {w}", "pattern": "o|s"} for w in WORDS])
    project.write_rows("data/pairs.jsonl", [{"prompt": f"say {w}", "chosen": w, "rejected": w[::-1]} for w in WORDS])
    yield project
    sys.modules.pop("my_focal", None)
    algorithms.entries.pop("focal_sft", None)


@pytest.fixture
def backend(request):
    """The backend block of each kind."""

    def block(kind):
        if kind == "local":
            return {"kind": "local", "params": {"threads": 1}}
        return {"kind": "tinker", "params": {"base_url": request.getfixturevalue("tinker_server").url}}

    return block


def _arm(name, backend, params, data=CHATS, kind=None):
    return {
        "name": name,
        "data": data,
        "model": {"name": "tiny-random"},
        "algorithm": {"kind": kind or name, "params": params},
        "backend": backend,
    }


def _run(project, arms, folder="outputs", **top):
    """Run arms as one experiment; their records by name."""
    path = project.config(f"name: from_{arms[0]['name']}", runs=arms, output_dir=folder, imports=["my_focal"], **top)
    result = Experiment.from_yaml(path).run()
    assert not result.unread_settings
    return {arm["name"]: project.record(arm["name"], folder) for arm in arms}


def _all_algorithms(project, backend):
    folder = f"outputs/{backend['kind']}"
    first = _run(project, [_arm("teacher", backend, {**SHORT, "max_steps": 3}, kind="sft")], folder)
    teacher = {"load_checkpoint_path": first["teacher"]["artifacts"]["final_sampler"]}
    phases = [
        {"algorithm": {"kind": "sft", "params": SHORT}},
        {"algorithm": {"kind": "rl", "params": SAMPLED}, "data": TASKS},
    ]
    arms = [
        _arm("rl", backend, {**SAMPLED, "kl_coef": 0.1}, TASKS),
        _arm("sdft", backend, SAMPLED),
        _arm("distill", backend, {**SAMPLED, "teacher": teacher}),
        _arm("dpo", backend, SHORT, {"path": "data/pairs.jsonl"}),
        _arm("combo", backend, {"phases": phases}),
        _arm("focal_sft", backend, SHORT),
        _arm("full", backend, {**SHORT, "lora_rank": 0, "learning_rate": 1e-4}, kind="sft"),
    ]
    return first | _run(project, arms, folder)


def _learnt(record):
    """What a record says of learning; times and paths differ from run to run."""
    return {key: value for key, value in record["metrics"].items() if "second" not in key}


def _check(project, kind, name, record):
    assert record["status"] == "completed", f"{name}: {record['error']}"
    assert record["metrics"]["steps"] == {"teacher": 3, "combo": 4}.get(name, 2)
    assert all(math.isfinite(value) for value in record["metrics"].values())
    assert record["artifacts"]["final_sampler"].startswith("tinker://") == (kind == "tinker")
    steps = [line["step"] for line in project.metrics(f"{kind}/{name}") if {"loss", "sft/loss", "rl/loss"} & set(line)]
    assert steps == list(range(1, int(record["metrics"]["steps"]) + 1)), f"{name}: every step has learnt"


def test_every_algorithm_trains_and_both_backends_learn_the_same(world, backend):
    found = {}
    for kind in ("local", "tinker") if importlib.util.find_spec("tinker") else ("local",):
        found[kind] = _all_algorithms(world, backend(kind))
        for name, record in found[kind].items():
            _check(world, kind, name, record)
        assert all(line["focal"] > 0 for line in world.metrics(f"{kind}/focal_sft"))
    records = found["local"]
    assert records["teacher"]["metrics"]["final_loss"] < records["teacher"]["metrics"]["first_loss"]
    assert 0 < records["rl"]["metrics"]["first_reward"] < 1
    for name, other in found.get("tinker", {}).items():
        assert _learnt(other) == pytest.approx(_learnt(records[name]), rel=1e-4, abs=1e-4), name


def test_two_arms_on_two_servers_in_one_experiment(world, backend, tiny_engine, tmp_path):
    pytest.importorskip("tinker", reason="needs the extra tinker")
    here = backend("tinker")
    with background_server(tiny_engine, tmp_path / "second") as second:
        there = {"kind": "tinker", "params": {"base_url": second.url}}
        arms = [_arm("here", here, SHORT, kind="sft"), _arm("there", there, SHORT, kind="sft")]
        records = _run(world, arms, max_concurrent_arms=2)
        kept = [path.name for path in (tmp_path / "second").rglob("*") if path.is_dir()]
    assert [record["status"] for record in records.values()] == ["completed", "completed"]
    assert records["here"]["metrics"]["final_loss"] == records["there"]["metrics"]["final_loss"]
    run_there = records["there"]["artifacts"]["final_sampler"].removeprefix("tinker://").partition("/")[0]
    run_here = records["here"]["artifacts"]["final_sampler"].removeprefix("tinker://").partition("/")[0]
    assert run_there in kept and run_here not in kept


@pytest.mark.parametrize(
    ("lacks", "params", "kind", "remedy"),
    [
        ("topk_prompt_logprobs", SAMPLED, "sdft", "set kl: reverse"),
        ("custom_loss", SHORT, "dpo", "evsys-sdk[local]"),
        ("ppo", {**SAMPLED, "loss": "ppo"}, "rl", "set loss to one of"),
        ("prompt_logprobs", {**SAMPLED, "kl_coef": 0.1}, "rl", "set kl_coef: 0"),
        ("resume", {**SAMPLED, "teacher": "ema"}, "sdft", "set teacher: start"),
    ],
)
def test_a_recipe_that_needs_what_a_server_lacks_is_refused_before_anything_is_spent(
    world, backend, tinker_server, lacks, params, kind, remedy
):
    block = backend("tinker")
    block["params"]["lacks"] = [lacks]
    data = {"rl": TASKS, "dpo": {"path": "data/pairs.jsonl"}}.get(kind, CHATS)
    seen = len(tinker_server.service.checkpoints.runs())
    with pytest.raises(ConfigError) as caught:
        _run(world, [_arm("poor", block, params, data, kind)])
    (problem,) = caught.value.problems
    assert remedy in problem.message and problem.path.endswith("algorithm.kind")
    assert not (world.root / "outputs").exists()
    assert len(tinker_server.service.checkpoints.runs()) == seen


def test_full_fine_tuning_on_a_server_that_cannot_is_refused_before_anything_is_spent(world, backend, tinker_server):
    block = backend("tinker")
    block["params"]["lacks"] = ["full_fine_tuning"]
    seen = len(tinker_server.service.checkpoints.runs())
    record = _run(world, [_arm("poor", block, {**SHORT, "lora_rank": 0}, CHATS, "sft")])["poor"]
    assert record["status"] == "failed" and "set lora_rank to 1 or more" in record["error"]
    assert not (world.root / "outputs/poor/checkpoints.json").exists()
    assert len(tinker_server.service.checkpoints.runs()) == seen and record["metrics"] == {}


class PullThePlug:
    """Stops the server after a step, and waits until it is down."""

    def __init__(self, stack, at):
        self.stack, self.at = stack, at

    def on_step(self, ctx, step, metrics):
        if step == self.at:
            # Only now: a busy machine may take longer than that to connect.
            ctx.extras["backend_handles"]["service"].watch.timeout_seconds = 2
            self.stack.close()


def test_a_run_whose_server_dies_names_its_checkpoint_and_resumes_from_it_on_the_next(world, tiny_engine, tmp_path):
    pytest.importorskip("tinker", reason="needs the extra tinker")
    params = {**SHORT, "max_steps": 5, "save_every": 2}

    def run(server, name, folder, **options):
        block = {"kind": "tinker", "params": {"base_url": server.url}}
        path = world.config(f"name: dies_{name}", run=_arm(name, block, params, kind="sft"), output_dir=folder)
        Experiment.from_yaml(path).run(RunOptions(**options))
        return world.record(name, folder)

    with ExitStack() as stack:
        server = stack.enter_context(background_server(tiny_engine, tmp_path / "kept"))
        whole = run(server, "whole", "outputs")
        failed = run(server, "cut", "outputs", fresh=True, watchers=[PullThePlug(stack, at=3)])
    assert failed["status"] == "failed" and "the checkpoint of step 2 (tinker://" in failed["error"]
    address = ServerAddress(port=urlsplit(server.url).port)
    with background_server(tiny_engine, tmp_path / "kept", address) as again:
        resumed = run(again, "cut", "outputs")
    assert resumed["status"] == "completed", resumed["error"]
    assert _learnt(resumed) == _learnt(whole)
    losses = [(line["step"], line["loss"]) for line in world.metrics("cut") if "loss" in line]
    assert losses == [(line["step"], line["loss"]) for line in world.metrics("whole") if "loss" in line]
