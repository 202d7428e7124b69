"""Reinforcement learning on the mock backend, through the same code that drives real ones."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from evsys_sdk.algorithms.rl import RL, MockRL
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.errors import BackendError, ConfigError
from evsys_sdk.protocols import Rollout, Turn
from evsys_sdk.registry import algorithms, register_verifier, verifiers
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training_api import Capabilities

COLOURS = ("red", "green", "blue", "black", "white", "grey")
FAST = {"max_tokens": 6, "batch_size": 3, "learning_rate": 2e-3}


def _tasks(colours=COLOURS, pattern="^[0-9]"):
    verifier = {"fn_name": "regex_match", "expected": pattern}
    return [{"task_id": c, "instruction": f"A digit for {c}?", "verifier": verifier} for c in colours]


def _context(folder, rows=None, **given):
    return training_context(folder, rows or _tasks(), rollouts=given.pop("rollouts", InProcessRolloutEngine()), **given)


class Scripted:
    """A rollout engine that says what it is told: reward by sample number, of tokens that nobody sampled."""

    def __init__(self, *rewards, turns=1, **fields):
        self.rewards, self.turns, self.fields = rewards, turns, fields
        self.calls = []

    async def roll_out(self, tasks, *, sampler, renderer, sampling, num_samples=1, agent=None):
        self.calls.append(([task.task_id for task in tasks], sampling, num_samples))
        turns = [
            Turn(prompt_tokens=[*b"ask"] * (n + 1), completion_tokens=[65 + n, 66], logprobs=[-1.0, -2.0], text="AB")
            for n in range(self.turns)
        ]
        return [
            [Rollout(task_id=task.task_id, turns=turns, reward=reward, **self.fields) for reward in self.rewards]
            for task in tasks
        ]


def _advantages(backend):
    """Of the first forward/backward call, one list per datum, context left out."""
    data = next(event for event in backend.events if event.call == "forward_backward").args[0]
    return [[a for a in datum.loss_fn_inputs["advantages"].tolist() if a] for datum in data]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"loss": "ppo", "advantage": "dr_grpo"},
        {"loss": "cispo", "loss_fn_config": {"clip_high_threshold": 2.0}, "advantage": "rloo"},
        {"advantage": "grpo", "max_steps": 20},
        {"kl_coef": 0.05, "num_samples": 16},
        {"async_steps": 1},
        {"num_samples": 1, "drop_constant_reward": False, "batch_size": 6, "max_steps": 20},
    ],
    ids=str,
)
def test_the_reward_rises_clearly_from_a_start_that_is_not_zero(tmp_path, params):
    ctx = _context(tmp_path)
    result = RL(**{**FAST, "max_steps": 12, "num_samples": 12, **params}).train(ctx)
    rewards = ctx.log_store.curve("reward/mean")
    assert max(rewards[:3]) > 0 and sum(rewards[:2]) / 2 < 0.5
    assert sum(rewards[-3:]) / 3 > 0.9
    assert result.metrics["final_reward"] == rewards[-1]


def _timeless(log):
    timed = ("step_seconds", "tokens_per_second")
    return [{key: value for key, value in metrics.items() if key not in timed} for _, metrics in log.metrics]


@pytest.mark.parametrize("lag", [0, 2])
def test_one_seed_repeats_exactly_and_another_differs(tmp_path, lag):
    runs = []
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        ctx = _context(tmp_path / place, seed=seed)
        result = RL(max_steps=4, async_steps=lag, **FAST).train(ctx)
        runs.append((result.artifacts["final_checkpoint"].rpartition("/")[2], _timeless(ctx.log_store)))
    assert runs[0] == runs[1] and runs[0][0] != runs[2][0]


def test_each_step_and_task_draws_for_itself(tmp_path):
    engine = Scripted(0.0, 1.0)
    RL(max_steps=4, num_samples=2, batch_size=2).train(_context(tmp_path, rollouts=engine))
    assert [len(tasks) for tasks, _, _ in engine.calls] == [2, 2, 2, 2]
    assert len({sampling.seed for _, sampling, _ in engine.calls}) == 4
    seen = sorted(task for tasks, _, _ in engine.calls[:3] for task in tasks)
    assert seen == sorted(COLOURS), "an epoch sees every task once"


def test_the_sampling_settings_reach_the_engine(tmp_path):
    engine = Scripted(0.0, 1.0)
    RL(max_steps=1, num_samples=5, max_tokens=7, temperature=0.5).train(_context(tmp_path, rollouts=engine))
    ((_, sampling, samples),) = engine.calls
    assert (samples, sampling.max_tokens, sampling.temperature) == (5, 7, 0.5)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # rewards 1, 0, 0 -> mean 1/3; 6 tokens, 3 rollouts of 2, max_tokens 8
        ({"advantage": "centred"}, [2 / 3 / 6, -1 / 3 / 6, -1 / 3 / 6]),
        ({"advantage": "rloo"}, [1 / 6, -0.5 / 6, -0.5 / 6]),
        ({"advantage": "dr_grpo"}, [2 / 3 / 24, -1 / 3 / 24, -1 / 3 / 24]),
        ({"advantage": "centred", "loss_normalisation": "constant"}, [2 / 3 / 24, -1 / 3 / 24, -1 / 3 / 24]),
        ({"advantage": "grpo"}, [a / (3**-0.5 + 1e-4) / 6 for a in (2 / 3, -1 / 3, -1 / 3)]),
    ],
    ids=str,
)
def test_every_written_token_gets_the_normalised_advantage_of_its_rollout(tmp_path, params, expected):
    backend = RecordingBackend()
    ctx = _context(tmp_path, _tasks(["red"]), backend=backend, rollouts=Scripted(1.0, 0.0, 0.0))
    RL(max_steps=1, num_samples=3, max_tokens=8, **params).train(ctx)
    assert _advantages(backend) == [pytest.approx([value] * 2, rel=1e-5) for value in expected]


def test_sequence_normalisation_lets_a_long_rollout_weigh_no_more_than_a_short_one(tmp_path):
    class Uneven(Scripted):
        async def roll_out(self, tasks, **kwargs):
            groups = await super().roll_out(tasks, **kwargs)
            turn = groups[0][0].turns[0]
            long = replace(turn, completion_tokens=[65] * 8, logprobs=[-1.0] * 8)
            groups[0][0] = replace(groups[0][0], turns=[long])
            return groups

    sums = {}
    for how in ("token", "sequence"):
        backend = RecordingBackend()
        ctx = _context(tmp_path, _tasks(["red"]), backend=backend, rollouts=Uneven(1.0, 0.0))
        RL(max_steps=1, num_samples=2, loss_normalisation=how).train(ctx)
        sums[how] = [sum(advantages) for advantages in _advantages(backend)]
    assert sums["token"] == pytest.approx([0.4, -0.1], rel=1e-4)  # 8 and 2 of 10 tokens
    assert sums["sequence"] == pytest.approx([0.25, -0.25], rel=1e-4)


def test_every_turn_is_trained_on_its_own_tokens(tmp_path):
    backend = RecordingBackend()
    ctx = _context(tmp_path, _tasks(["red"]), backend=backend, rollouts=Scripted(1.0, 0.0, turns=2))
    RL(max_steps=1, num_samples=2).train(ctx)
    data = next(event for event in backend.events if event.call == "forward_backward").args[0]
    inputs = [bytes(datum.model_input.tokens) for datum in data]
    assert inputs == [b"askA", b"askaskB"] * 2, (
        "the second turn's prompt is its own, not the first turn's plus what it said"
    )
    assert data[1].loss_fn_inputs["logprobs"].tolist()[-2:] == [-1.0, -2.0]


def test_groups_with_one_reward_are_left_out_and_counted(tmp_path):
    class Half(Scripted):
        async def roll_out(self, tasks, **kwargs):
            groups = await super().roll_out(tasks, **kwargs)
            return [[replace(r, reward=1.0) for r in groups[0]], *groups[1:]]

    for drop, data in ((True, 2), (False, 4)):
        backend = RecordingBackend()
        ctx = _context(tmp_path, _tasks(["red", "green"]), backend=backend, rollouts=Half(1.0, 0.0))
        RL(max_steps=1, num_samples=2, drop_constant_reward=drop).train(ctx)
        ((_, metrics),) = ctx.log_store.metrics
        assert metrics["frac_constant_groups"] == 0.5
        assert metrics["reward/mean"] == 0.75, "over all rollouts, those left out too"
        assert len(next(e for e in backend.events if e.call == "forward_backward").args[0]) == data


def test_a_step_whose_groups_are_all_constant_is_skipped_and_counted(tmp_path):
    backend = RecordingBackend()
    ctx = _context(tmp_path, backend=backend, rollouts=Scripted(1.0, 1.0))
    result = RL(max_steps=3, num_samples=2).train(ctx)
    assert result.metrics["steps_skipped"] == 3 and result.metrics["steps"] == 3
    assert ctx.log_store.curve("skipped") == [1.0] * 3 and ctx.log_store.curve("reward/mean") == [1.0] * 3
    assert not [e for e in backend.events if e.call in ("forward_backward", "optim_step")], "nothing moved"


def test_bad_rollouts_are_left_out_counted_and_never_a_zero(tmp_path):
    class Flaky(Scripted):
        async def roll_out(self, tasks, **kwargs):
            groups = await super().roll_out(tasks, **kwargs)
            broken = replace(groups[0][0], reward=None, status="infra_error", error="lost")
            cut = replace(groups[0][0].turns[0], logprobs=[-1.0])
            return [[*group, broken, replace(group[0], turns=[cut])] for group in groups]

    backend = RecordingBackend()
    ctx = _context(tmp_path, _tasks(["red"]), backend=backend, rollouts=Flaky(1.0, 0.0))
    result = RL(max_steps=1, num_samples=4).train(ctx)
    ((_, metrics),) = ctx.log_store.metrics
    assert metrics["dropped/infra_error"] == 1 and metrics["dropped/unequal_lengths"] == 1
    assert metrics["reward/mean"] == pytest.approx(2 / 3), "three rewards, the broken rollout has none"
    assert _advantages(backend) == [pytest.approx([0.125] * 2), pytest.approx([-0.125] * 2)]
    assert result.metrics["rollouts_dropped"] == 2


@pytest.mark.parametrize("status", ["agent_error", "timeout"])
def test_what_the_model_did_wrong_is_a_failure_that_is_learnt_from(tmp_path, status):
    class Clumsy(Scripted):
        async def roll_out(self, tasks, **kwargs):
            [group] = await super().roll_out(tasks, **kwargs)
            lost = replace(group[0], reward=None, status="infra_error", error="lost")
            return [[group[0], replace(group[1], reward=None, status=status, error="no such call"), lost]]

    backend = RecordingBackend()
    ctx = _context(tmp_path, _tasks(["red"]), backend=backend, rollouts=Clumsy(1.0, 1.0))
    result = RL(max_steps=1, num_samples=3).train(ctx)
    ((_, metrics),) = ctx.log_store.metrics
    assert metrics["reward/mean"] == 0.5 and metrics[f"failed/{status}"] == 1 and metrics["dropped/infra_error"] == 1
    good, bad = (advantages[0] for advantages in _advantages(backend))
    assert good == -bad > 0, "the failure is what the good rollout is better than; the lost one counts for neither"
    assert result.metrics["rollouts_dropped"] == 1 and f"dropped/{status}" not in metrics


class Speechless(Scripted):
    """The samples from number `said` on fail before the model writes a token."""

    def __init__(self, *rewards, said, status="agent_error"):
        super().__init__(*rewards)
        self.said, self.status = said, status

    async def roll_out(self, tasks, **kwargs):
        groups = await super().roll_out(tasks, **kwargs)
        lost = {"turns": [], "reward": None, "status": self.status, "error": "raised at once"}
        return [[*group[: self.said], *(replace(one, **lost) for one in group[self.said :])] for group in groups]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # rewards 1, 1, 0, 0 -> mean 1/2; 4 tokens, 2 rollouts of 2, max_tokens 8, 4 asked for
        ({"advantage": "centred"}, 0.5 / 4),
        ({"advantage": "rloo"}, 0.5 * 4 / 3 / 4),
        ({"advantage": "centred", "loss_normalisation": "sequence"}, 0.5 / 4),
        ({"advantage": "dr_grpo"}, 0.5 / 32),
    ],
    ids=str,
)
@pytest.mark.parametrize("status", ["agent_error", "timeout"])
def test_a_failure_before_the_first_token_is_what_the_others_are_compared_with(tmp_path, params, expected, status):
    backend = RecordingBackend()
    engine = Speechless(1.0, 1.0, 1.0, 1.0, said=2, status=status)
    ctx = _context(tmp_path, _tasks(["red"]), backend=backend, rollouts=engine)
    result = RL(max_steps=1, num_samples=4, max_tokens=8, **params).train(ctx)
    ((_, metrics),) = ctx.log_store.metrics
    assert _advantages(backend) == [pytest.approx([expected] * 2, rel=1e-5)] * 2
    assert metrics["reward/mean"] == 0.5 and metrics[f"failed/{status}"] == metrics["rollouts_without_tokens"] == 2
    assert metrics["rollouts_dropped"] == 0 and result.metrics["rollouts_dropped"] == 0
    assert "groups_without_tokens" not in metrics and metrics["completion_tokens"] == 2


@pytest.mark.parametrize("drop", [True, False])
def test_a_group_that_wrote_nothing_gives_no_gradient_and_is_counted(tmp_path, drop):
    class Mixed(Scripted):
        async def roll_out(self, tasks, **kwargs):
            spoken, silent = await super().roll_out(tasks, **kwargs)
            return [spoken, [replace(one, turns=[], status="agent_error", error="raised") for one in silent]]

    backend = RecordingBackend()
    ctx = _context(tmp_path, _tasks(["red", "blue"]), backend=backend, rollouts=Mixed(1.0, 0.0))
    RL(max_steps=1, num_samples=2, batch_size=2, drop_constant_reward=drop).train(ctx)
    ((_, metrics),) = ctx.log_store.metrics
    assert _advantages(backend) == [pytest.approx([0.125] * 2), pytest.approx([-0.125] * 2)]
    assert metrics["groups_without_tokens"] == 1 and metrics["reward/mean"] == 0.5
    assert metrics["frac_constant_groups"] == 0.0 and "skipped" not in metrics


def test_one_step_in_which_nothing_was_written_is_skipped(tmp_path):
    class Late(Speechless):
        async def roll_out(self, tasks, **kwargs):
            self.said = 2 if self.calls else 0
            return await super().roll_out(tasks, **kwargs)

    ctx = _context(tmp_path, _tasks(["red"]), rollouts=Late(1.0, 0.0, said=0))
    result = RL(max_steps=2, num_samples=2, drop_constant_reward=False).train(ctx)
    assert result.metrics["steps_skipped"] == 1 and ctx.log_store.curve("reward/mean") == [0.0, 0.5]


@pytest.mark.parametrize("steps", [2, 8])
def test_a_run_in_which_no_rollout_ever_has_a_token_fails_with_the_reason(tmp_path, steps):
    engine = Speechless(1.0, 1.0, said=0)
    with pytest.raises(BackendError, match=r"had no usable rollout .*: 2 agent_error\); first error: raised at once"):
        RL(max_steps=steps, num_samples=2).train(_context(tmp_path, _tasks(["red"]), rollouts=engine))
    assert len(engine.calls) == min(steps, 3)


def test_a_verifier_says_what_a_failure_is_worth(tmp_path, monkeypatch):
    class Clumsy(Scripted):
        async def roll_out(self, tasks, **kwargs):
            [group] = await super().roll_out(tasks, **kwargs)
            return [[group[0], replace(group[1], reward=None, status="agent_error", error="no such call")]]

    def from_minus_one(model_output, expected, params):
        return 1.0

    from_minus_one.failing_reward = -1.0
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    register_verifier("from_minus_one")(from_minus_one)
    [task] = _tasks(["red"])
    task["verifier"]["fn_name"] = "from_minus_one"
    ctx = _context(tmp_path, [task], rollouts=Clumsy(1.0, 1.0))
    RL(max_steps=1, num_samples=2).train(ctx)
    assert ctx.log_store.curve("reward/mean") == [0.0]


def test_a_step_in_which_every_rollout_failed_is_said_once(tmp_path, capfd):
    class AllFail(Scripted):
        async def roll_out(self, tasks, **kwargs):
            groups = await super().roll_out(tasks, **kwargs)
            return [[replace(one, reward=None, status="agent_error", error="bad call") for one in g] for g in groups]

    ctx = _context(tmp_path, _tasks(["red"]), rollouts=AllFail(1.0, 1.0))
    result = RL(max_steps=4, num_samples=2).train(ctx)
    assert result.metrics["steps_skipped"] == 4 and ctx.log_store.curve("reward/mean") == [0.0] * 4
    told = [line for line in capfd.readouterr().err.splitlines() if "every rollout failed" in line]
    assert len(told) == 1 and "2 agent_error" in told[0] and "bad call" in told[0]


@pytest.mark.parametrize("steps", [2, 8])
def test_a_run_whose_rollouts_all_break_fails_with_the_reason(tmp_path, steps):
    engine = Scripted(None, None, status="infra_error", error="the sampler is gone")
    with pytest.raises(BackendError, match=r"had no usable rollout .*infra_error\); first error: the sampler is gone"):
        RL(max_steps=steps, num_samples=2).train(_context(tmp_path, rollouts=engine))
    assert len(engine.calls) == min(steps, 3)


def test_the_kl_penalty_pulls_back_to_the_start(tmp_path):
    drift = {}
    for coef in (1e-6, 1.0):
        ctx = _context(tmp_path / str(coef))
        calm = {**FAST, "learning_rate": 1e-3, "drop_constant_reward": False}
        RL(max_steps=8, num_samples=8, kl_coef=coef, **calm).train(ctx)
        drift[coef] = sum(ctx.log_store.curve("kl")[-3:]) / 3
        assert ctx.log_store.curve("kl")[0] == pytest.approx(0.0, abs=1e-5), "the start is the reference"
    assert drift[1.0] < 0.5 * drift[1e-6]


def test_the_reference_is_what_the_stage_starts_with_not_the_untrained_model(tmp_path):
    first = RL(max_steps=6, num_samples=12, **FAST).train(_context(tmp_path))
    ctx = _context(tmp_path, start_from=first.artifacts["final_checkpoint"])
    RL(max_steps=1, num_samples=12, kl_coef=0.1, drop_constant_reward=False, **FAST).train(ctx)
    assert ctx.log_store.curve("kl") == [pytest.approx(0.0, abs=1e-5)]


def test_without_a_price_no_reference_is_asked(tmp_path):
    backend = RecordingBackend()
    RL(max_steps=2, **FAST).train(_context(tmp_path, backend=backend))
    assert not [event for event in backend.events if event.call == "compute_logprobs"]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_rollouts_are_as_old_as_async_steps_allow_and_no_older(tmp_path, lag):
    ctx = _context(tmp_path)
    RL(max_steps=6, async_steps=lag, **FAST).train(ctx)
    assert ctx.log_store.curve("rollout_lag") == [min(step, lag) for step in range(6)]


def test_with_async_steps_rolling_out_and_training_overlap(tmp_path):
    order = {}
    for lag in (0, 1):
        backend = RecordingBackend()
        ctx = _context(tmp_path, _tasks(["red"]), backend=backend)
        RL(max_steps=2, async_steps=lag, num_samples=32, drop_constant_reward=False, **FAST).train(ctx)
        submitted = [e.call for e in backend.events if e.what == "submitted" and e.call in ("sample", "optim_step")]
        order[lag] = submitted
    assert order[0] == ["sample", "optim_step", "sample", "optim_step"]
    assert order[1] == ["sample", "sample", "optim_step", "optim_step"]


def test_a_step_trains_while_the_next_rollouts_are_still_going_on(tmp_path):
    """The third step's rollouts end only after the second step was trained: without overlap they never would."""
    backend = RecordingBackend(inner=MockBackend(latency_ms=2))

    class Patient(InProcessRolloutEngine):
        calls = 0

        async def roll_out(self, tasks, **kwargs):
            self.calls += 1
            if self.calls == 3:
                async with asyncio.timeout(20):
                    while backend.order("optim_step").count("answered optim_step") < 2:
                        await asyncio.sleep(0.001)
            return await super().roll_out(tasks, **kwargs)

    ctx = _context(tmp_path, _tasks(["red"]), backend=backend, rollouts=Patient())
    result = RL(max_steps=4, async_steps=1, num_samples=4, drop_constant_reward=False, **FAST).train(ctx)
    assert result.metrics["steps"] == 4


def test_rollouts_that_nobody_will_learn_from_are_not_started_or_are_stopped(tmp_path):
    engine = Scripted(0.0, 1.0)
    RL(max_steps=3, async_steps=5, num_samples=2).train(_context(tmp_path, rollouts=engine))
    assert len(engine.calls) == 3

    class Stuck(Scripted):
        cancelled = 0

        async def roll_out(self, tasks, **kwargs):
            groups = await super().roll_out(tasks, **kwargs)
            try:
                await asyncio.sleep(3600 if len(self.calls) > 1 else 0)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return groups

    engine = Stuck(0.0, 1.0)
    ctx = _context(tmp_path, rollouts=engine, backend=MockBackend(fail_at_step=1))
    with pytest.raises(BackendError, match="fails at step 1 as configured"):
        RL(max_steps=9, async_steps=2, num_samples=2).train(ctx)
    assert engine.cancelled == 2


def test_some_rollouts_of_each_step_are_written_down(tmp_path):
    RL(max_steps=2, num_samples=4, log_rollouts=5, **FAST).train(_context(tmp_path, stage="first"))
    lines = [json.loads(line) for line in (tmp_path / "logs/training/rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * 5 + [2] * 5
    assert len({line["task_id"] for line in lines[:3]}) == 3, "one of each task before the second of any"
    assert {"completion", "reward", "turns", "status"} <= set(lines[0]) and lines[0]["stage"] == "first"
    RL(max_steps=1, log_rollouts=0, **FAST).train(_context(tmp_path / "none"))
    assert not (tmp_path / "none/logs").exists()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"num_samples": 1}, "num_samples: 1 makes every group constant.*drop_constant_reward: false"),
        ({"num_samples": 1, "drop_constant_reward": False, "advantage": "grpo"}, "advantage compares the rollouts"),
        ({"loss": "ppo", "loss_fn_config": {"clip_low": 0.8}}, "clip_low.*closest: clip_low_threshold"),
        ({"loss": "pppo"}, "must be one of importance_sampling, ppo, cispo; closest: ppo"),
        ({"temperature": 0.0}, "greater than 0"),
        ({"agent_params": {"a": 1}}, "set agent_import_path too"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_at_validation(params, said):
    with pytest.raises(ConfigError, match=said):
        algorithms.build("rl", params)


@pytest.mark.parametrize(
    ("has", "params", "said"),
    [
        ({"losses": frozenset({"cross_entropy"})}, {}, "no importance_sampling loss; set loss to one of cross_entropy"),
        ({"losses": frozenset({"ppo"})}, {"loss": "ppo", "kl_coef": 0.1}, "kl_coef needs logprobs .*set kl_coef: 0"),
        ({"losses": frozenset({"ppo"})}, {"loss": "ppo"}, None),
    ],
)
def test_what_the_backend_lacks_is_said_with_the_remedy(has, params, said):
    import re

    lack = RL(**params).needs(Capabilities(**has))
    assert lack is None if said is None else re.search(said, lack)


def test_a_run_without_a_rollout_engine_says_so(tmp_path):
    with pytest.raises(BackendError, match="no rollout engine"):
        RL(max_steps=1).train(training_context(tmp_path, _tasks()))


def test_the_metrics_of_a_step(tmp_path):
    ctx = _context(tmp_path)
    RL(max_steps=1, num_samples=16, kl_coef=0.1, **FAST).train(ctx)
    ((_, metrics),) = ctx.log_store.metrics
    assert {"reward/mean", "reward/std", "frac_constant_groups", "kl", "kl_sampling", "entropy"} <= set(metrics)
    assert {"completion_tokens", "tokens", "loss", "grad_norm", "rollouts_dropped"} <= set(metrics)
    assert metrics["kl_sampling"] == pytest.approx(0.0, abs=1e-5), "fresh rollouts are on-policy"
    assert metrics["entropy"] > 1.0 and metrics["rollouts"] == 48


def test_every_setting_is_read(tmp_path):
    algorithm = RL(**RL.Config(num_samples=4, kl_coef=0.1, max_tokens=4).model_dump())
    forget(algorithm.cfg)
    algorithm.train(_context(tmp_path))
    assert list(unread(algorithm.cfg)) == []


def test_mock_rl_is_rl_on_the_mock_and_runs_nowhere_else(tmp_path):
    runs = [cls(max_steps=2, **FAST).train(_context(tmp_path)) for cls in (RL, MockRL)]
    assert runs[0].metrics == runs[1].metrics

    class Elsewhere(MockBackend):
        name = "tinker"

    with pytest.raises(
        BackendError, match="mock_rl runs on the mock backend only, not on 'tinker'; on 'tinker' use rl"
    ):
        MockRL(max_steps=1).train(_context(tmp_path, backend=Elsewhere()))
    assert algorithms.get("rl") is RL and algorithms.get("mock_rl") is MockRL


def test_retries_and_places_of_rollouts_are_settings(tmp_path):
    made = []

    class Engine(InProcessRolloutEngine):
        def limited(self, **limits):
            made.append(limits)
            return super().limited(**limits)

    RL(max_steps=1, num_samples=2, n_concurrent=3, max_attempts=2, max_tokens=2).train(
        _context(tmp_path, rollouts=Engine())
    )
    assert made == [{"concurrency": 3, "max_attempts": 2}]
    with pytest.raises(BackendError, match="takes no max_attempts"):
        RL(max_steps=1, num_samples=2, max_attempts=2).train(_context(tmp_path / "other", rollouts=Scripted(1.0, 0.0)))
