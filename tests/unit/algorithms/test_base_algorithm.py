"""What BaseAlgorithm does for its subclasses."""

from __future__ import annotations

import asyncio

import pytest

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.errors import BackendError
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.checkpoints import CheckpointManifest
from evsys_sdk.training_api import Datum, ModelInput, TensorData


def _datum(text="hello world"):
    tokens = [*text.encode()]
    inputs = {
        "target_tokens": TensorData(tokens[1:], "int64"),
        "weights": TensorData([1.0] * (len(tokens) - 1)),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


class Parrot(BaseAlgorithm):
    """The smallest algorithm there can be."""

    name = "parrot"

    async def build_batch(self, step):
        return TrainingBatch([_datum()])


def test_an_algorithm_is_a_build_batch(tmp_path):
    result = Parrot(max_steps=5).train(training_context(tmp_path, []))
    assert result.status == "completed" and result.metrics["steps"] == 5
    assert result.metrics["final_loss"] < result.metrics["first_loss"]
    assert set(result.artifacts) == {"final_checkpoint", "final_sampler"}


def test_train_works_inside_a_running_event_loop(tmp_path):
    async def notebook():
        return Parrot(max_steps=2).train(training_context(tmp_path, []))

    assert asyncio.run(notebook()).metrics["steps"] == 2


def test_artifacts_are_logged(tmp_path):
    ctx = training_context(tmp_path, [])
    result = Parrot(max_steps=1).train(ctx)
    assert ctx.log_store.artifacts == result.artifacts


def test_an_algorithm_without_epochs_needs_max_steps(tmp_path):
    with pytest.raises(BackendError, match="parrot: set max_steps"):
        Parrot().train(training_context(tmp_path, []))


def test_the_command_lines_ceiling_holds_and_keeps_the_recipes_schedule(tmp_path):
    full, cut = training_context(tmp_path / "a", []), training_context(tmp_path / "b", [], max_steps=3)
    for ctx in (full, cut):
        Parrot(max_steps=10, lr_schedule="linear", warmup_fraction=0.2).train(ctx)
    assert len(cut.log_store.metrics) == 3
    assert cut.log_store.curve("lr") == full.log_store.curve("lr")[:3]
    assert cut.log_store.curve("loss") == full.log_store.curve("loss")[:3]


@pytest.mark.parametrize(
    ("params", "per_epoch", "steps"),
    [
        ({}, 7, 7),
        ({"num_epochs": 3}, 7, 21),
        ({"max_steps": 200}, 7, 200),
        ({"max_steps": 200, "num_epochs": 3}, 7, 200),
        ({"max_steps": 5, "num_epochs": 3}, 7, 5),
        ({"max_steps": 5}, None, 5),
        ({}, None, None),
    ],
)
def test_steps_follow_from_epochs_and_max_steps(params, per_epoch, steps):
    assert LoopParams(**params).planned_steps(per_epoch) == steps


def test_two_kinds_of_warm_up_are_refused():
    with pytest.raises(ValueError, match="warmup_steps and warmup_fraction are both set"):
        LoopParams(warmup_steps=3, warmup_fraction=0.1)


def test_training_starts_from_given_weights_with_a_fresh_optimiser(tmp_path):
    first = Parrot(max_steps=5).train(training_context(tmp_path, []))
    backend = RecordingBackend()
    ctx = training_context(tmp_path, [], backend=backend, start_from=first.artifacts["final_checkpoint"])
    second = Parrot(max_steps=1).train(ctx)
    loading = next(event for event in backend.events if event.call == "load_state")
    assert loading.args == (first.artifacts["final_checkpoint"], False)
    assert second.metrics["first_loss"] < first.metrics["final_loss"]


def test_a_backend_without_a_service_is_refused_clearly(tmp_path):
    ctx = training_context(tmp_path, [])
    ctx.extras["backend_handles"] = {}
    with pytest.raises(BackendError, match="backend 'mock' offers no training service"):
        Parrot(max_steps=1).train(ctx)


def test_what_the_backend_lacks_is_said_before_anything_is_made(tmp_path):
    class Demanding(Parrot):
        def needs(self, capabilities):
            return "this backend has no dro_v2; use another"

    backend = RecordingBackend()
    with pytest.raises(BackendError, match="this backend has no dro_v2"):
        Demanding(max_steps=1).train(training_context(tmp_path, [], backend=backend))
    assert backend.events == []


def test_setup_comes_before_the_first_batch_with_client_and_service_there(tmp_path):
    seen = []

    class Careful(Parrot):
        async def setup(self, ctx, backend):
            seen.append((ctx.run_id, backend is self.service, self.client is not None, self.renderer is not None))

        async def build_batch(self, step):
            seen.append(step)
            return await super().build_batch(step)

    Careful(max_steps=2).train(training_context(tmp_path, []))
    assert seen == [("test", True, True, True), 1, 2]


def test_gradient_clipping_reaches_the_optimiser(tmp_path):
    backend = RecordingBackend()
    Parrot(max_steps=1, max_grad_norm=0.5).train(training_context(tmp_path, [], backend=backend))
    adam = next(event for event in backend.events if event.call == "optim_step").args[0]
    assert adam.grad_clip_norm == 0.5


def test_the_rank_and_the_seed_reach_the_adapter(tmp_path):
    backend = RecordingBackend()
    ctx = training_context(tmp_path, [], backend=backend, seed=7)
    Parrot(max_steps=1, lora_rank=3).train(ctx)
    assert next(event for event in backend.events if event.call == "create_training_client").args == (3, 7)


def test_every_setting_is_read(tmp_path):
    """A setting that nothing reads would be reported to the user as such."""
    algorithm = Parrot(**{**LoopParams().model_dump(), "max_steps": 2, "save_every": 1})
    forget(algorithm.cfg)
    algorithm.train(training_context(tmp_path, []))
    assert set(unread(algorithm.cfg)) == {"num_epochs", "batch_size"}  # those of data, which a parrot has none of


@pytest.mark.parametrize(
    ("fractions", "steps"), [([0.5], [4, 8]), ([0.25, 1.0], [2, 8]), ([0.01], [1, 8]), ([0.3, 0.31], [2, 8])]
)
def test_checkpoints_fall_exactly_on_the_asked_parts(tmp_path, fractions, steps):
    Parrot(max_steps=8, save_at_fractions=fractions).train(training_context(tmp_path, []))
    assert [c.step for c in CheckpointManifest.load(tmp_path / "checkpoints.json").checkpoints] == steps


@pytest.mark.parametrize(
    "bad", [{"save_at_fractions": [0]}, {"save_at_fractions": [1.1]}, {"best_by": "test/b/pass@1"}]
)
def test_what_cannot_be_kept_is_refused(bad):
    with pytest.raises(ValueError, match=r"save_at_fractions|best_by"):
        Parrot(max_steps=8, **bad)


ADAM = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_eps": 0.001, "weight_decay": 0.25, "max_grad_norm": 2.0}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_optimisers_settings_come_from_the_params(tmp_path, kind):
    from evsys_sdk.registry import algorithms
    from evsys_sdk.testing import RecordingBackend, training_context
    from evsys_sdk.training_api import AdamParams

    pytest.importorskip("torch")
    chat = [{"role": "user", "content": "hi"}]
    rows = [{"messages": [*chat, {"role": "assistant", "content": "ho"}]}]
    if kind == "dpo":
        rows = [{"messages": chat, "chosen": "ho", "rejected": "no"}]
    book = RecordingBackend()
    params = {"max_steps": 2, "learning_rate": 0.01, **ADAM}
    algorithms.build(kind, params).train(training_context(tmp_path, rows, backend=book))
    steps = [event.args[0] for event in book.events if event.call == "optim_step" and event.what == "submitted"]
    wanted = AdamParams(learning_rate=0.01, beta1=0.5, beta2=0.6, eps=0.001, weight_decay=0.25, grad_clip_norm=2.0)
    assert steps == [wanted, wanted]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adam_beta1", 1.0), ("adam_beta2", -0.1), ("adam_eps", 0), ("weight_decay", -1),
        ("adam_eps", float("inf")), ("weight_decay", float("nan")), ("max_grad_norm", float("inf")),
        ("learning_rate", float("inf")),
    ],
)  # fmt: skip
def test_settings_that_would_spoil_the_weights_are_refused(name, value):
    from pydantic import ValidationError

    from evsys_sdk.algorithms.base import LoopParams

    with pytest.raises(ValidationError, match=name):
        LoopParams(**{name: value})


def test_every_algorithm_that_trains_in_steps_has_the_settings_in_its_schema():
    from evsys_sdk.algorithms.base import BaseAlgorithm
    from evsys_sdk.registry import algorithms, list_algorithms

    stepped = [name for name in list_algorithms() if issubclass(algorithms.get(name), BaseAlgorithm)]
    assert {"sft", "rl", "dpo", "distill", "sdft", "local_sft", "local_rl"} <= set(stepped)
    for name in stepped:
        known = algorithms.schema(name)["properties"]
        assert known["adam_beta1"]["exclusiveMaximum"] == 1 and known["weight_decay"]["minimum"] == 0
        assert known["adam_eps"]["exclusiveMinimum"] == 0
