"""Phases in a row on the mock backend."""

from __future__ import annotations

import pytest

from evsys_sdk.algorithms.combo import Combo
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.checks.preflight import deep_problems, ignored_settings
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.errors import BackendError, ConfigError, DataError
from evsys_sdk.protocols import RunResult
from evsys_sdk.registry import algorithms
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training_api import Capabilities

WORDS = ("red", "green", "blue", "black")
SFT_BLOCK = {"kind": "sft", "params": {"max_steps": 3, "learning_rate": 2e-4, "batch_size": 4}}
RL_BLOCK = {
    "kind": "rl",
    "params": {"max_steps": 4, "learning_rate": 5e-4, "batch_size": 4, "max_tokens": 8, "num_samples": 8},
}
TASKS = {
    "source_kind": "in_memory",
    "rows": [
        {"task_id": w, "instruction": f"say {w}", "verifier": {"fn_name": "exact_match", "expected": w}} for w in WORDS
    ],
}


def _chats():
    return [{"messages": [{"role": "user", "content": f"say {w}"}], "target_assistant": w} for w in WORDS]


def _context(folder, **given):
    ctx = training_context(folder, _chats(), rollouts=InProcessRolloutEngine(), **given)
    ctx.extras["load_rows"] = lambda data, place: data.rows
    return ctx


def _phases(*blocks):
    return [{"algorithm": block} for block in blocks]


def _phase(metrics):
    """Which every metric is named after, but for the tokens, which the budget counts."""
    [phase] = {name.partition("/")[0] for name in metrics if name != "tokens"}
    return phase


class Hooks:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def step_start(self, step):
        pass

    def train_start(self, total_steps):
        self.told.append(("train_start", total_steps))

    async def step_end(self, step, metrics, snapshot):
        self.told.append(("step_end", step, _phase(metrics)))

    def checkpoint(self, step, path, *, planned=True):
        self.told.append(("checkpoint", step))

    def flush(self):
        pass

    def recorded_steps(self):
        return 10**6

    async def train_end(self, metrics):
        self.told.append(("train_end", _phase(metrics)))

    def should_stop(self):
        return None


def test_the_second_phase_starts_from_the_firsts_weights(tmp_path):
    backend = RecordingBackend()
    ctx = _context(tmp_path, backend=backend)
    result = Combo(phases=_phases(SFT_BLOCK, SFT_BLOCK)).train(ctx)
    loaded = [e.args for e in backend.events if e.what == "submitted" and e.call == "load_state"]
    assert loaded == [(result.artifacts["sft_1/final_checkpoint"], False)]
    assert result.metrics["sft_2/first_loss"] < result.metrics["sft_1/first_loss"]


def test_two_phases_are_the_same_as_one_run_that_starts_from_the_others_weights(tmp_path):
    chained = Combo(phases=_phases(SFT_BLOCK, SFT_BLOCK)).train(_context(tmp_path / "a"))
    first = SFT(**SFT_BLOCK["params"]).train(_context(tmp_path / "b"))
    second = SFT(**SFT_BLOCK["params"]).train(_context(tmp_path / "c", start_from=first.artifacts["final_checkpoint"]))
    names = [r.artifacts["final_checkpoint"].rpartition("/")[2] for r in (chained, second)]
    assert names[0] == names[1], "files are named after their content"


def test_rl_resumes_where_sft_got_to(tmp_path):
    ctx = _context(tmp_path)
    first = {**SFT_BLOCK, "params": {**SFT_BLOCK["params"], "max_steps": 12, "learning_rate": 1e-4}}
    result = Combo(phases=[{"algorithm": first}, {"algorithm": RL_BLOCK, "data": TASKS}]).train(ctx)
    cold = algorithms.build("rl", RL_BLOCK["params"])
    alone = training_context(tmp_path, TASKS["rows"], rollouts=InProcessRolloutEngine())
    assert cold.train(alone).metrics["first_reward"] == 0.0
    assert result.metrics["rl/first_reward"] > 0.05
    assert result.metrics["rl/final_reward"] > result.metrics["rl/first_reward"]


def test_steps_count_on_and_metrics_carry_the_phases_name(tmp_path):
    hooks = Hooks()
    ctx = _context(tmp_path, hooks=hooks)
    phases = [{"algorithm": SFT_BLOCK, "name": "warm"}, {"algorithm": RL_BLOCK, "data": TASKS}]
    result = Combo(phases=phases).train(ctx)
    assert [step for step, _ in ctx.log_store.metrics] == [1, 2, 3, 4, 5, 6, 7]
    assert len(ctx.log_store.curve("warm/loss")) == 3 and len(ctx.log_store.curve("rl/reward/mean")) == 4
    assert result.metrics["steps"] == 7 and result.metrics["warm/steps"] == 3 and result.metrics["rl/steps"] == 4
    assert result.metrics["tokens"] == result.metrics["warm/tokens"] + result.metrics["rl/tokens"]
    assert hooks.told == [
        ("train_start", 3),
        *[("step_end", step, "warm") for step in (1, 2, 3)],
        ("checkpoint", 3),
        ("train_end", "warm"),
        ("train_start", 7),
        *[("step_end", step, "rl") for step in (4, 5, 6, 7)],
        ("checkpoint", 7),
        ("train_end", "rl"),
    ]


def test_the_runs_weights_are_the_last_phases_and_each_phase_keeps_its_own(tmp_path):
    ctx = _context(tmp_path)
    result = Combo(phases=_phases(SFT_BLOCK, SFT_BLOCK)).train(ctx)
    assert result.artifacts["final_sampler"] == result.artifacts["sft_2/final_sampler"]
    assert result.artifacts["final_checkpoint"] != result.artifacts["sft_1/final_checkpoint"]
    assert ctx.log_store.artifacts == result.artifacts
    manifests = sorted(path.parent.name for path in tmp_path.rglob("checkpoints.json"))
    assert manifests == ["sft_1", "sft_2"]


def test_each_phase_has_its_rows_and_the_run_gets_its_own_back(tmp_path):
    ctx = _context(tmp_path)
    places = []
    ctx.extras["load_rows"] = lambda data, place: places.append(place) or data.rows
    Combo(phases=[{"algorithm": SFT_BLOCK}, {"algorithm": RL_BLOCK, "data": TASKS}]).train(ctx)
    assert places == ["algorithm.params.phases[1].data"]
    assert ctx.extras["train_rows"] == _chats() and ctx.extras["n_train_rows"] == 4


def test_all_rows_are_loaded_and_all_needs_looked_at_before_the_first_phase(tmp_path):
    def fail(data, place):
        raise DataError("no such file")

    backend = RecordingBackend()
    ctx = _context(tmp_path, backend=backend)
    ctx.extras["load_rows"] = fail
    with pytest.raises(DataError, match="no such file"):
        Combo(phases=[{"algorithm": SFT_BLOCK}, {"algorithm": RL_BLOCK, "data": TASKS}]).train(ctx)
    poor = Capabilities(losses=frozenset({"cross_entropy"}))
    ctx.extras["backend_handles"]["service"]._real.capabilities = poor
    with pytest.raises(BackendError, match="combo: phase 'rl': this backend has no importance_sampling"):
        Combo(phases=[{"algorithm": SFT_BLOCK}, {"algorithm": RL_BLOCK}]).train(ctx)
    assert backend.events == []


def test_data_of_its_own_needs_a_run_that_can_load_it(tmp_path):
    ctx = _context(tmp_path)
    del ctx.extras["load_rows"]
    with pytest.raises(DataError, match="phase 'rl' has its own data"):
        Combo(phases=[{"algorithm": RL_BLOCK, "data": TASKS}]).train(ctx)


def test_a_failing_phase_fails_the_run(tmp_path):
    ctx = _context(tmp_path, backend=MockBackend(fail_at_step=2))
    with pytest.raises(BackendError, match="fails at step 2 as configured"):
        Combo(phases=_phases(SFT_BLOCK, SFT_BLOCK)).train(ctx)


@pytest.fixture
def plain():
    """An algorithm that is nothing but `train`, and leaves no weights."""

    class Plain:
        """Nothing but train."""

        status = "completed"

        def train(self, ctx):
            ctx.log_store.log_scalar("x", 1.0, 5)
            return RunResult(run_id=ctx.run_id, status=self.status, error="tired")

    algorithms.register("plain_for_test")(Plain)
    yield Plain
    del algorithms.entries["plain_for_test"]


def test_a_phase_without_state_cannot_be_followed_but_can_be_last(tmp_path, plain):
    with pytest.raises(BackendError, match="phase 'sft' has nothing to start from"):
        Combo(phases=_phases({"kind": "plain_for_test"}, SFT_BLOCK)).train(_context(tmp_path))
    result = Combo(phases=_phases(SFT_BLOCK, {"kind": "plain_for_test"})).train(_context(tmp_path))
    assert "final_checkpoint" not in result.artifacts and "sft/final_checkpoint" in result.artifacts
    assert result.metrics["steps"] == 3 + 5, "what it logged counts"


def test_a_phase_that_did_not_complete_ends_the_chain(tmp_path, plain):
    plain.status = "failed"
    result = Combo(phases=_phases({"kind": "plain_for_test"}, SFT_BLOCK)).train(_context(tmp_path))
    assert (result.status, result.error) == ("failed", "tired") and "sft/steps" not in result.metrics


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ([], "at least 1 item"),
        ([{"algorithm": {"kind": "sftt"}}], r"phases\[0\].algorithm.*closest: sft"),
        ([{"algorithm": {"kind": "sft", "params": {"learning_rat": 1}}}], "learning_rat.*closest: learning_rate"),
        ([{"algorithm": {"kind": "rl", "params": {"num_samples": 1}}}], "num_samples: 1 makes every group constant"),
        (
            [
                {"algorithm": SFT_BLOCK},
                {"algorithm": SFT_BLOCK, "data": {"path": "x", "transforms": [{"kind": "nop"}]}},
            ],
            r"phases\[1\].data.*'nop' is not a transform",
        ),
        ([{"algorithm": SFT_BLOCK, "name": "a"}, {"algorithm": RL_BLOCK, "name": "a"}], "names must differ; twice: a"),
        ([{"algorithm": SFT_BLOCK, "name": "a/b"}], "name"),
        ([{"algorithm": SFT_BLOCK, "datta": {}}], "datta.*closest: data"),
    ],
)
def test_blocks_inside_are_validated_as_deeply_as_those_outside(phases, said):
    with pytest.raises(ConfigError, match=said):
        algorithms.build("combo", {"phases": phases})


def test_a_combo_may_be_a_phase(tmp_path):
    inner = {"kind": "combo", "params": {"phases": _phases(SFT_BLOCK, SFT_BLOCK)}}
    result = Combo(phases=_phases(inner, SFT_BLOCK)).train(_context(tmp_path))
    assert result.metrics["steps"] == 9 and result.metrics["combo/sft_2/steps"] == 3


def test_every_setting_is_read(tmp_path):
    algorithm = Combo(phases=[{"algorithm": SFT_BLOCK, "name": "a"}, {"algorithm": RL_BLOCK, "data": TASKS}])
    forget(algorithm.cfg)
    algorithm.train(_context(tmp_path))
    assert list(unread(algorithm.cfg)) == []


def test_a_phases_missing_file_and_ignored_setting_are_found_before_anything_runs():
    phases = [
        {"algorithm": {"kind": "sft"}, "data": {"path": "nowhere.jsonl"}},
        {"algorithm": {"kind": "sft"}, "name": "b", "data": {"source_kind": "in_memory", "rows": [{}], "path": "x"}},
        {"algorithm": {"kind": "sft"}, "name": "c", "data": "not a block"},
    ]
    run = {
        "name": "r",
        "data": {"source_kind": "in_memory", "rows": [{"prompt": "a", "completion": "b"}]},
        "model": {"name": "m"},
        "algorithm": {"kind": "combo", "params": {"phases": phases}},
    }
    config = ExperimentConfig.model_validate({"name": "e", "run": run})
    problems = {problem.path: problem.message for problem in deep_problems(config)}
    assert "nowhere.jsonl" in problems["runs[0].algorithm.params.phases[0].data.path"]
    ignored = {problem.path: problem.message for problem in ignored_settings(config)}
    assert "source_kind is in_memory" in ignored["runs[0].algorithm.params.phases[1].data.path"]


def test_phases_with_different_ranks_are_refused_before_any_trains():
    wider = {"kind": "sft", "params": {**SFT_BLOCK["params"], "lora_rank": 32}}
    with pytest.raises(ValueError, match=r"lora_rank must be the same in all of them \(sft_1: \d+, sft_2: 32\)"):
        Combo(phases=_phases(SFT_BLOCK, wider))
