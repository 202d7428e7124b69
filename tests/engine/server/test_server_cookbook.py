"""tinker-cookbook's own training loops, unmodified, against our server with a tiny random model."""

from __future__ import annotations

import itertools
import json

import pytest

from evsys_engine.engine import Engine
from evsys_engine.models import find_model
from evsys_engine.server import background_server

tinker = pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(find_model("tiny-random", cache=tmp_path_factory.mktemp("models")).path)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    engine = Engine.load(model, device="cpu", dtype="float32")
    with background_server(engine, tmp_path_factory.mktemp("checkpoints")) as running:
        yield running


@pytest.fixture(autouse=True)
def _the_cookbook_closes_no_clients(tinker_holders):
    yield
    for holder in tinker_holders:
        holder.close()


@pytest.fixture
def recipes(monkeypatch):
    pytest.importorskip("tinker_cookbook")
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The cookbook names no seeds: what the server would draw for its adapters and samples is the same every time.
    monkeypatch.setattr("evsys_engine.server.service.secrets.randbelow", lambda below: 1)
    monkeypatch.setattr("evsys_engine.scheduler.fresh_seed", itertools.count().__next__)
    import cookbook_recipes

    return cookbook_recipes


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def metrics_of(log):
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def checkpoints_of(log):
    return [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]


async def test_supervised_training_learns_saves_and_resumes(recipes, model, server, log):
    await recipes.supervised(model, server.url, log, max_steps=4)
    rows = [row for row in metrics_of(log) if "train_mean_nll" in row]
    assert len(rows) == 4 and rows[-1]["train_mean_nll"] < rows[0]["train_mean_nll"] - 0.5
    assert any("test/nll" in row for row in metrics_of(log))
    saved = checkpoints_of(log)
    assert saved[-1]["sampler_path"].startswith("tinker://") and saved[-1]["state_path"].startswith("tinker://")
    middle = next(row for row in saved if row["name"] == "000002" and "sampler_path" in row)
    (log / "checkpoints.jsonl").write_text(json.dumps(middle) + "\n")  # as if cut off after it
    await recipes.supervised(model, server.url, log, max_steps=6)
    assert [row["step"] for row in metrics_of(log) if "train_mean_nll" in row][4:] == [2, 3, 4, 5]


async def test_reinforcement_learning_runs_and_moves_the_weights(recipes, model, server, log, connect):
    await recipes.reinforcement(model, server.url, log)
    client, prompt = connect(server), tinker.ModelInput.from_ints([5, 6, 7, 8])
    trained = client.create_sampling_client(model_path=checkpoints_of(log)[-1]["sampler_path"])
    base = client.create_sampling_client(base_model=model)
    assert trained.compute_logprobs(prompt).result() != base.compute_logprobs(prompt).result()
    rows = metrics_of(log)
    assert len(rows) >= 3
    # The cookbook's problem pays 1 for a right answer and takes 0.1 for one that does not end as it should.
    assert all(-0.1 <= row["env/all/reward/total"] <= 1 for row in rows[:3])
    # The logprobs that training sees are those that sampling reported.
    assert all(abs(row["optim/kl_sample_train_v1"]) < 0.01 for row in rows[:3])


async def test_reinforcement_learning_with_ppo_and_a_kl_penalty(recipes, model, server, log):
    from tinker_cookbook.rl.train import KLReferenceConfig

    await recipes.reinforcement(
        model,
        server.url,
        log,
        loss_fn="ppo",
        kl_penalty_coef=0.1,
        kl_reference_config=KLReferenceConfig(base_model=model),
    )
    assert any("kl_policy_base" in key for row in metrics_of(log) for key in row)


async def test_asynchronous_reinforcement_learning(recipes, model, server, log):
    from tinker_cookbook.rl.train import AsyncConfig

    await recipes.reinforcement(
        model, server.url, log, async_config=AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)
    )
    assert metrics_of(log)


@pytest.mark.parametrize("trained_teacher", [False, True])
async def test_distillation_on_and_off_policy(recipes, model, server, log, trained_teacher):
    teacher = None
    if trained_teacher:
        await recipes.supervised(model, server.url, log.parent / "teacher", max_steps=2)
        teacher = checkpoints_of(log.parent / "teacher")[-1]["sampler_path"]
    await recipes.on_policy_distillation(model, server.url, log / "on", teacher)
    assert any("teacher_kl" in row for row in metrics_of(log / "on"))
    await recipes.off_policy_distillation(model, server.url, log / "off", teacher)
    assert len(metrics_of(log / "off")) >= 2


@pytest.mark.parametrize(
    "options",
    [{"topk": 5}, {"topk": 5, "reverse": True}, {"topk": 0, "loss_fn": "importance_sampling"}],
    ids=["forward", "reverse", "sampled"],
)
async def test_self_distillation(recipes, model, server, log, options):
    await recipes.self_distillation(model, server.url, log, **options)
    assert len(metrics_of(log)) >= 2
