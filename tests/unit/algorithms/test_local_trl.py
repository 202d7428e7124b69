"""`local_sft` and `local_rl`: TRL's trainers inside our loop, on a model made on the spot."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from safetensors.torch import load_file

from evsys_sdk import register_verifier
from evsys_sdk.algorithms.local_rl import LocalRL
from evsys_sdk.algorithms.local_sft import LocalSFT, trl_row
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.backends.local import LocalBackend
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.errors import BackendError, Cancelled, DataError
from evsys_sdk.protocols import KeptWeights
from evsys_sdk.registry import algorithms, verifiers
from evsys_sdk.testing import training_context
from evsys_sdk.training_api import Datum, ModelInput, SamplingParams, TensorData

ROWS = [
    {"messages": [{"role": "user", "content": f"say {word}"}], "target_assistant": word, "metadata": {"id": word}}
    for word in ("red", "green", "blue", "ochre", "pink", "teal")
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _context(folder, rows=ROWS, **given):
    return training_context(folder, rows, backend=LocalBackend(), model_name="tiny-random", **given)


def _logprob(ctx, path, question, answer):
    """How likely these weights, loaded as scoring loads them, find an answer."""

    async def ask():
        service = ctx.extras["backend_handles"]["service"]
        sampler = await service.create_sampling_client(path)
        tokenizer = service.get_tokenizer()
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        tokens = [*prompt, *tokenizer.encode(answer), tokenizer.eos_token_id]
        logprobs = await sampler.compute_logprobs(ModelInput.from_ints(tokens))
        return sum(logprobs[len(prompt) :])

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of `local_sft`."""
    ctx = _context(tmp_path_factory.mktemp("trained"), seed=3)
    params = {"max_steps": 3, "batch_size": 6, "learning_rate": 1e-2, "lr_schedule": "linear", "save_every": 2}
    return ctx, LocalSFT(**params).train(ctx)


def test_the_scored_model_has_learnt_the_rows(trained):
    ctx, result = trained
    assert result.status == "completed" and result.metrics["final_loss"] < result.metrics["first_loss"]
    before, after = (_logprob(ctx, path, "say red", "red") for path in (None, result.artifacts["final_sampler"]))
    assert after > before + 0.5


def test_every_step_is_logged_with_the_rate_of_the_schedule(trained):
    ctx, result = trained
    assert [step for step, _ in ctx.log_store.metrics] == [1, 2, 3]
    assert ctx.log_store.curve("lr") == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])
    assert sum(ctx.log_store.curve("tokens")) == result.metrics["tokens"] > 0
    assert {"loss", "grad_norm", "mean_token_accuracy", "tokens_per_second"} <= set(ctx.log_store.metrics[0][1])


def test_the_rate_of_the_schedule_is_the_one_that_moves_the_weights(tmp_path):
    """Adam's first step moves every weight by about the rate; B starts at zero."""
    ctx = _context(tmp_path, max_steps=1)
    result = LocalSFT(max_steps=50, batch_size=6, learning_rate=1e-2, warmup_steps=10).train(ctx)
    saved = load_file(Path(result.artifacts["final_checkpoint"]) / "weights.safetensors")
    moved = max(float(tensor.abs().max()) for name, tensor in saved.items() if name.endswith("lora_B"))
    assert ctx.log_store.curve("lr") == [pytest.approx(1e-3)] and moved == pytest.approx(1e-3, rel=0.05)


def test_checkpoints_are_kept_as_asked_and_are_of_the_engines_own_kind(trained):
    ctx, result = trained
    kept = json.loads((ctx.output_dir / "checkpoints.json").read_text())["checkpoints"]
    assert [entry["step"] for entry in kept] == [2, 3] and kept[-1]["final"]
    adapter = json.loads((Path(result.artifacts["final_sampler"]) / "adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"]) == ("LORA", 8)


def test_the_first_loss_is_that_of_sft_on_the_same_rows(trained, tmp_path):
    ctx = _context(tmp_path, seed=3)
    own = SFT(max_steps=1, batch_size=6).train(ctx)
    assert trained[1].metrics["first_loss"] == pytest.approx(own.metrics["first_loss"], rel=1e-3)


def test_one_seed_repeats_exactly_and_another_differs(tmp_path):
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        ctx = _context(tmp_path / name, seed=seed)
        result = LocalSFT(max_steps=2, batch_size=2, learning_rate=1e-3).train(ctx)
        weights.append((Path(result.artifacts["final_checkpoint"]) / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_it_resumes_from_saved_weights_of_its_own_and_of_sft(trained, tmp_path):
    first = trained[1]
    ctx = _context(tmp_path / "own", start_from=first.artifacts["final_checkpoint"])
    again = LocalSFT(max_steps=1, batch_size=6).train(ctx)
    assert again.metrics["first_loss"] < first.metrics["final_loss"]
    engine = SFT(max_steps=1, batch_size=6).train(
        _context(tmp_path / "sft", start_from=first.artifacts["final_checkpoint"])
    )
    assert engine.metrics["first_loss"] == pytest.approx(again.metrics["first_loss"], rel=1e-3)
    back = LocalSFT(max_steps=1, batch_size=6).train(
        _context(tmp_path / "back", start_from=engine.artifacts["final_checkpoint"])
    )
    assert back.metrics["first_loss"] < engine.metrics["first_loss"]


def test_all_weights_can_be_trained(tmp_path):
    ctx = _context(tmp_path)
    result = LocalSFT(max_steps=2, batch_size=6, lora_rank=0, learning_rate=1e-3).train(ctx)
    before, after = (_logprob(ctx, path, "say red", "red") for path in (None, result.artifacts["final_sampler"]))
    assert after > before + 0.5 and result.metrics["final_loss"] < result.metrics["first_loss"]


def test_it_prints_nothing_and_leaves_nothing_beside_the_weights(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **_: pytest.fail("somebody was told"))
    LocalSFT(max_steps=1, batch_size=2).train(_context(tmp_path / "run"))
    assert capfd.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints.json", "weights"]


class Hooks:
    """Notes what the loop says; asks for a sampler at every step; stops after `until`."""

    def __init__(self, until=99, cancel_at=0):
        self.until, self.cancel_at, self.heard, self.scores = until, cancel_at, [], {}

    def step_start(self, step):
        pass

    def train_start(self, total_steps):
        self.heard.append(f"start {total_steps}")

    def flush(self):
        pass

    def recorded_steps(self):
        return 10**6

    async def resumed(self, last: KeptWeights):
        self.heard.append(f"resumed {last.step}")

    async def step_end(self, step, metrics, snapshot):
        if step == self.cancel_at:
            raise Cancelled("enough")
        sampler = await snapshot()
        prompt = ModelInput.from_ints([1, 2, 3])
        self.scores[step] = (await sampler.compute_logprobs(prompt))[1]
        self.heard.append(f"step {step}")

    def checkpoint(self, step, path, *, planned=True):
        self.heard.append(f"kept {step}")

    async def train_end(self, metrics):
        self.heard.append("end")

    def should_stop(self):
        return "good enough" if len(self.scores) >= self.until else None

    def best(self, metric, mode, *, after=0):
        return (1, 0.5)


def test_hooks_hear_every_step_can_sample_from_it_and_can_stop_it(tmp_path):
    hooks = Hooks(until=2)
    ctx = _context(tmp_path, hooks=hooks, max_steps=4)
    result = LocalSFT(num_epochs=9, batch_size=2, learning_rate=1e-2).train(ctx)
    assert hooks.heard == ["start 4", "step 1", "step 2", "kept 2", "end"]
    assert hooks.scores[1] != hooks.scores[2], "each snapshot has the weights of its step"
    assert result.metrics["steps"] == 2 and result.stopped_early == "good enough"


def test_the_best_evaluated_weights_can_be_the_runs(tmp_path):
    ctx = _context(tmp_path, hooks=Hooks())
    result = LocalSFT(max_steps=2, batch_size=2, best_by="val/x/pass@1").train(ctx)
    assert result.extras["best_checkpoint"]["step"] == 1 and "step-000001" in result.artifacts["final_sampler"]


def test_the_users_wish_to_stop_comes_through(tmp_path):
    with pytest.raises(Cancelled, match="enough"):
        LocalSFT(max_steps=3, batch_size=2).train(_context(tmp_path, hooks=Hooks(cancel_at=1)))


def test_a_resumed_run_starts_again_unless_it_had_ended(tmp_path):
    with pytest.raises(Cancelled):
        LocalSFT(max_steps=3, batch_size=2, save_every=1).train(_context(tmp_path, hooks=Hooks(cancel_at=2)))
    hooks = Hooks()
    LocalSFT(max_steps=3, batch_size=2).train(_context(tmp_path, hooks=hooks, resume=True))
    assert hooks.heard[:3] == ["start 3", "resumed 0", "step 1"]
    hooks = Hooks()
    result = LocalSFT(max_steps=3, batch_size=2).train(_context(tmp_path, hooks=hooks, resume=True))
    assert hooks.heard == ["start 3", "resumed 3", "end"] and result.metrics["steps"] == 3


def test_weights_that_are_spoilt_stop_the_run(tmp_path):
    with pytest.raises(BackendError, match=r"step \d: (loss|grad_norm) is (nan|inf), so the weights are spoilt"):
        LocalSFT(max_steps=5, batch_size=6, learning_rate=1e30).train(_context(tmp_path))


def test_what_trl_raises_is_told_with_its_name(tmp_path):
    with pytest.raises(BackendError, match="local_sft: TRL's trainer failed: ValueError"):
        LocalSFT(max_steps=1, trl={"optim": "no_such_optimiser"}).train(_context(tmp_path))


def test_settings_of_trl_itself_are_passed_on_and_checked(tmp_path):
    result = LocalSFT(max_steps=1, batch_size=2, trl={"optim": "sgd"}).train(_context(tmp_path))
    assert result.metrics["steps"] == 1
    with pytest.raises(BackendError, match="'weight_decy' is not a setting of SFTConfig; closest: weight_decay"):
        LocalSFT(max_steps=1, trl={"weight_decy": 0.1}).train(_context(tmp_path))
    with pytest.raises(BackendError, match=r"trl.report_to is set by this algorithm"):
        LocalSFT(max_steps=1, trl={"report_to": "wandb"}).train(_context(tmp_path))


@pytest.mark.parametrize(("kind", "instead"), [(LocalSFT, "sft"), (LocalRL, "rl")])
def test_other_backends_are_refused_with_what_to_use_there(tmp_path, kind, instead):
    with pytest.raises(BackendError, match=f"on the local backend only, not on 'mock'; on 'mock' use {instead}"):
        kind(max_steps=1).train(training_context(tmp_path, ROWS))


def test_a_datum_becomes_trls_row():
    inputs = {"target_tokens": TensorData([8, 9, 3], "int64"), "weights": TensorData([0.0, 1.0, 1.0])}
    row = trl_row(Datum(ModelInput.from_ints([7, 8, 9]), inputs))
    assert row == {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]}


@pytest.mark.parametrize("kind", [LocalSFT, LocalRL])
def test_every_setting_is_read(tmp_path, kind):
    small = {"num_epochs": 1, "batch_size": 3, "num_samples": 2, "max_tokens": 2}
    known = kind.Config.model_fields
    algorithm = kind(**kind.Config(**{key: value for key, value in small.items() if key in known}).model_dump())
    forget(algorithm.cfg)
    algorithm.train(_context(tmp_path, ROWS if kind is LocalSFT else _tasks()))
    assert list(unread(algorithm.cfg)) == []


def _tasks(verifier="likes_low_tokens", count=3):
    plan = {"kind": "in_process", "fn_name": verifier, "expected": "x"}
    return [{"task_id": f"t{i}", "instruction": f"say {i}", "verifier": plan} for i in range(count)]


@pytest.fixture(autouse=True)
def _verifiers():
    """Verifiers that a random model can please, or that break."""

    @register_verifier("likes_low_tokens")
    def likes(model_output, expected, params):
        return float(sum(letter in "aeiou " for letter in model_output))

    @register_verifier("breaks_at_times")
    def breaks(model_output, expected, params):
        if len(model_output) % 2:
            raise ValueError("odd")
        return 1.0

    yield
    del verifiers.entries["likes_low_tokens"], verifiers.entries["breaks_at_times"]


def test_rl_learns_from_the_verifiers_and_is_scored(tmp_path):
    ctx = _context(tmp_path, _tasks())
    result = LocalRL(max_steps=3, batch_size=2, num_samples=4, max_tokens=6, learning_rate=1e-2).train(ctx)
    assert ctx.log_store.curve("reward/mean")[0] > 0 and max(ctx.log_store.curve("grad_norm")) > 0
    before, after = (_logprob(ctx, path, "say 1", "a") for path in (None, result.artifacts["final_sampler"]))
    assert before != after and math.isfinite(after)


def test_rl_asks_in_the_words_of_the_renderer(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    asked = []
    real = trl.GRPOTrainer._generate_single_turn

    def spy(self, prompt_ids, *args, **kwargs):
        asked.extend(map(list, prompt_ids))
        return real(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", spy)
    ctx = _context(tmp_path, _tasks(count=1))
    algorithm = LocalRL(max_steps=1, batch_size=1, num_samples=2, max_tokens=2)
    algorithm.train(ctx)
    tokenizer = ctx.extras["backend_handles"]["service"].get_tokenizer()
    chat = [{"role": "user", "content": "say 0"}]
    assert asked == [tokenizer.apply_chat_template(chat, add_generation_prompt=True)] * 2


def test_a_verifier_that_breaks_gives_no_reward_and_is_counted(tmp_path):
    ctx = _context(tmp_path, _tasks("breaks_at_times"))
    result = LocalRL(max_steps=2, batch_size=2, num_samples=4, max_tokens=6).train(ctx)
    assert result.metrics["rewards_missing"] > 0
    means = [value for value in ctx.log_store.curve("rewards/reward/mean") if math.isfinite(value)]
    assert set(means) == {1.0}, "not averaged with zeros"


def test_a_verifier_that_hangs_gives_no_reward_and_holds_up_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("evsys_sdk.algorithms.local_rl.VERIFIER_SECONDS", 0.05)
    opened = threading.Event()
    register_verifier("hangs")(lambda model_output, expected, params: float(opened.wait(300)))
    try:
        result = LocalRL(max_steps=1, batch_size=1, num_samples=2, max_tokens=2).train(
            _context(tmp_path, _tasks("hangs"))
        )
    finally:
        opened.set()
        del verifiers.entries["hangs"]
    assert result.metrics["rewards_missing"] == 2


def test_epochs_count_tasks_and_the_last_batch_is_filled_up(tmp_path):
    algorithm = LocalRL(num_epochs=2, batch_size=2, num_samples=2, max_tokens=2)
    result = algorithm.train(_context(tmp_path, _tasks(count=3)))
    assert result.metrics["steps"] == 4 and algorithm._numbers() == [0, 1, 2, 0]


def test_the_price_of_drift_is_measured_from_the_start_weights(trained, tmp_path):
    start = trained[1].artifacts["final_checkpoint"]
    ctx = _context(tmp_path, _tasks(), start_from=start)
    LocalRL(max_steps=1, batch_size=2, num_samples=2, max_tokens=4, kl_coef=0.1).train(ctx)
    assert ctx.log_store.curve("kl") == [pytest.approx(0.0, abs=1e-6)]
    with pytest.raises(BackendError, match="TRL measures kl_coef against the untrained model"):
        LocalRL(max_steps=1, kl_coef=0.1, lora_rank=0).train(_context(tmp_path, _tasks(), start_from=start))


def test_tasks_that_need_a_sandbox_are_refused_by_name(tmp_path):
    task = {"task_id": "s", "instruction": "x", "verifier": {"kind": "e2b", "dockerfile": "", "test_sh": ""}}
    with pytest.raises(DataError, match="task 's': local_rl takes in-process verifiers, not 'e2b'"):
        LocalRL(max_steps=1).train(_context(tmp_path, [task]))


def test_both_are_registered_and_say_what_they_take():
    assert algorithms.get("local_sft") is LocalSFT and algorithms.get("local_rl") is LocalRL
    assert {"train_on", "trl", "lora_rank"} <= set(algorithms.schema("local_sft")["properties"])
    assert {"num_samples", "kl_coef"} <= set(algorithms.schema("local_rl")["properties"])


def test_a_sampler_over_its_weights_samples(trained):
    ctx, result = trained

    async def sample():
        service = ctx.extras["backend_handles"]["service"]
        sampler = await service.create_sampling_client(result.artifacts["final_sampler"])
        return await sampler.sample(ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(max_tokens=4, seed=1))

    assert len(asyncio.run(sample()).sequences) == 2


def test_trls_optimiser_has_the_algorithms_own_settings(tmp_path):
    from types import SimpleNamespace

    recipe = LocalSFT(max_steps=1, adam_beta1=0.5, adam_beta2=0.6, adam_eps=0.001, weight_decay=0.25)
    recipe.steps_per_epoch = lambda: 1
    plan = recipe._plan(SimpleNamespace(max_steps=None))
    copy = SimpleNamespace(
        model=SimpleNamespace(device="cpu"), engine=SimpleNamespace(info=SimpleNamespace(dtype="float32"))
    )
    made = recipe._settings(plan, tmp_path, 0, copy)
    assert (made["adam_beta1"], made["adam_beta2"], made["adam_epsilon"], made["weight_decay"]) == (
        0.5,
        0.6,
        0.001,
        0.25,
    )
