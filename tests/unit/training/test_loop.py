"""The training loop: order of calls, metrics, hooks, checkpoints, guards."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from evsys_sdk.errors import BackendError, BackendUnavailable, Cancelled
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.checkpoints import CheckpointManifest
from evsys_sdk.training.loop import LoopPlan, merge_metrics, refuse_unsupported, run_loop
from evsys_sdk.training_api import Capabilities, Datum, ModelInput, TensorData


def _datum(text="hello world", weight=1.0):
    tokens = [*text.encode()]
    weights = TensorData([weight] * (len(tokens) - 1))
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": weights}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


class Builder:
    """The same batch every step."""

    def __init__(self, *data, **fields):
        self.batch = TrainingBatch(list(data) or [_datum(), _datum("good morning")], **fields)
        self.steps = []

    async def build_batch(self, step):
        self.steps.append(step)
        return self.batch

    def step_metrics(self, step, batch, outputs):
        return {**batch.metrics, "outputs": len(outputs)}


class Hooks:
    """Notes what the loop tells it; `at(step, snapshot)` is run in step_end."""

    def __init__(self, at=None, stop_after=None, found=None):
        self.told, self.at, self.stop_after, self.found = [], at, stop_after, found

    def step_start(self, step):
        pass

    def train_start(self, total_steps):
        self.told.append(("start", total_steps))

    async def step_end(self, step, metrics, snapshot):
        self.told.append(("step", step))
        if self.at:
            await self.at(step, snapshot)

    def checkpoint(self, step, path, *, planned=True):
        self.told.append(("checkpoint", step))

    def flush(self):
        pass

    def recorded_steps(self):
        return 10**6

    async def resumed(self, last):
        self.told.append(("resumed", last.step))

    def best(self, metric, mode, *, after=0):
        return self.found

    async def train_end(self, metrics):
        self.told.append(("end", metrics["loss"]))

    def should_stop(self):
        return "good enough" if self.told[-1] == ("step", self.stop_after) else None


async def _run(tmp_path, builder=None, backend=None, hooks=None, clock=None, resume=False, **plan):
    ctx = training_context(tmp_path, [], backend=backend, hooks=hooks)
    ctx.resume = resume
    service = ctx.extras["backend_handles"]["service"]
    client = await service.create_training_client(rank=1, seed=1)
    fields = {"total_steps": 3, "learning_rate": lambda step: 1e-3 * step, **plan}
    options = {"clock": clock} if clock else {}
    return await run_loop(builder or Builder(), client, service, ctx, LoopPlan(**fields), **options), ctx


async def test_forward_backward_and_optimiser_are_submitted_before_either_is_awaited(tmp_path):
    backend = RecordingBackend()
    await _run(tmp_path, backend=backend, total_steps=1)
    assert backend.order("forward_backward", "optim_step")[:3] == [
        "submitted forward_backward",
        "submitted optim_step",
        "awaited forward_backward",
    ]


async def test_accumulation_submits_every_piece_before_the_optimiser(tmp_path):
    backend = RecordingBackend()
    data = [_datum(text) for text in ("aaaa", "bbbb", "cccc", "dddd", "eeee")]
    await _run(tmp_path, Builder(*data), backend, total_steps=1, grad_accumulation=2)
    submitted = [event for event in backend.events if event.what == "submitted"]
    pieces = [len(event.args[0]) for event in submitted if event.call == "forward_backward"]
    assert pieces == [3, 2]
    order = [event.call for event in submitted if event.call in ("forward_backward", "optim_step")]
    assert order == ["forward_backward", "forward_backward", "optim_step"]


async def test_accumulated_pieces_train_as_one_batch_does(tmp_path):
    data = [_datum(text) for text in ("aaaa bbb", "bbbb", "cccc ddd", "dddd")]
    whole, _ = await _run(tmp_path / "a", Builder(*data), total_steps=4)
    pieces, _ = await _run(tmp_path / "b", Builder(*data), total_steps=4, grad_accumulation=2)
    assert pieces.final_loss == pytest.approx(whole.final_loss, rel=1e-4)


async def test_a_step_logs_loss_tokens_rate_norm_and_speed(tmp_path):
    ticks = iter(range(100))
    result, ctx = await _run(
        tmp_path, Builder(_datum("abcde"), metrics={"extra": 7.0}), total_steps=2, clock=lambda: next(ticks) * 0.5
    )
    step, metrics = ctx.log_store.metrics[0]
    assert step == 1
    assert metrics["loss"] == pytest.approx(metrics["loss:sum"] / 4)
    assert metrics["tokens"] == 4 and metrics["lr"] == 1e-3 and metrics["grad_norm"] > 0
    assert metrics["step_seconds"] == 0.5 and metrics["tokens_per_second"] == 8
    assert metrics["extra"] == 7.0 and metrics["outputs"] == 1
    assert [m["lr"] for _, m in ctx.log_store.metrics] == [1e-3, 2e-3]
    assert (result.steps, result.tokens) == (2, 8)


async def test_loss_is_per_unit_of_weight(tmp_path):
    light, _ = await _run(tmp_path / "a", Builder(_datum(weight=1.0)), total_steps=1)
    heavy, _ = await _run(tmp_path / "b", Builder(_datum(weight=3.0)), total_steps=1)
    assert heavy.first_loss == pytest.approx(light.first_loss, rel=1e-5)


async def test_loss_falls(tmp_path):
    result, _ = await _run(tmp_path, total_steps=10)
    assert result.final_loss < 0.5 * result.first_loss


async def test_the_final_weights_are_always_kept(tmp_path):
    result, ctx = await _run(tmp_path, total_steps=3)
    assert result.checkpoint.step == 3
    assert CheckpointManifest.load(tmp_path / "checkpoints.json").last_complete() == result.checkpoint
    service = ctx.extras["backend_handles"]["service"]
    client = await service.create_training_client(rank=1, seed=5)
    await client.load_state(result.checkpoint.state)
    await service.create_sampling_client(result.checkpoint.sampler)


async def test_checkpoints_come_when_asked_and_the_last_one_not_twice(tmp_path):
    hooks = Hooks()
    await _run(tmp_path, hooks=hooks, total_steps=4, save_every=2)
    assert [step for what, step in hooks.told if what == "checkpoint"] == [2, 4]
    assert [c.step for c in CheckpointManifest.load(tmp_path / "checkpoints.json").checkpoints] == [2, 4]


async def test_weights_are_kept_at_the_given_steps_and_no_other(tmp_path):
    await _run(tmp_path, total_steps=7, save_at=frozenset({2, 5}), save_every=3)
    assert [c.step for c in CheckpointManifest.load(tmp_path / "checkpoints.json").checkpoints] == [2, 3, 5, 6, 7]


async def test_the_loop_resumes_from_the_last_whole_checkpoint(tmp_path):
    whole, _ = await _run(tmp_path / "whole", total_steps=6)
    await _run(tmp_path / "cut", total_steps=3, save_every=2)
    manifest = CheckpointManifest.load(tmp_path / "cut/checkpoints.json")
    (_, last) = [c for c in manifest.checkpoints if c.complete]
    manifest.begin(3)  # as if the kill had come while step 3 was being saved
    builder, hooks = Builder(), Hooks()
    resumed, ctx = await _run(tmp_path / "cut", builder, hooks=hooks, resume=True, total_steps=6)
    assert builder.steps == [3, 4, 5, 6] and hooks.told[1] == ("resumed", 2)
    assert [step for step, _ in ctx.log_store.metrics] == [3, 4, 5, 6]
    for name in ("steps", "tokens", "first_loss", "final_loss"):
        assert getattr(resumed, name) == getattr(whole, name)
    assert last.step == 3


async def test_a_loop_that_had_ended_does_nothing_but_say_so(tmp_path):
    first, _ = await _run(tmp_path, hooks=Hooks(stop_after=2), total_steps=50)
    builder = Builder()
    again, _ = await _run(tmp_path, builder, hooks=Hooks(), resume=True, total_steps=50)
    assert builder.steps == [] and again.stopped == "good enough"
    assert again.checkpoint == first.checkpoint and again.final_loss == first.final_loss


async def test_a_builder_gets_back_what_it_kept(tmp_path):
    class Counting(Builder):
        count = 0

        async def build_batch(self, step):
            self.count += 10
            return await super().build_batch(step)

        async def progress(self):
            return {"count": self.count}

        async def restore(self, progress):
            self.count = progress["count"]

    await _run(tmp_path, Counting(), total_steps=2)
    manifest = CheckpointManifest.load(tmp_path / "checkpoints.json")
    manifest.complete(replace(manifest.checkpoints[-1], final=False))
    builder = Counting()
    await _run(tmp_path, builder, resume=True, total_steps=3)
    assert builder.count == 30


async def test_the_best_evaluated_weights_are_kept_and_named(tmp_path):
    async def look(step, snapshot):
        if step in (2, 4):
            await snapshot()

    result, _ = await _run(tmp_path, hooks=Hooks(at=look, found=(2, 0.9)), total_steps=5, best_by="val/b/pass@1")
    assert [c.step for c in CheckpointManifest.load(tmp_path / "checkpoints.json").checkpoints] == [2, 4, 5]
    assert result.best.step == 2 and result.best_value == 0.9 and result.checkpoint.step == 5


async def test_a_backend_that_is_gone_is_told_with_what_is_kept(tmp_path):
    class Gone(Builder):
        async def build_batch(self, step):
            if step == 4:
                raise BackendUnavailable("the server does not answer")
            return await super().build_batch(step)

    with pytest.raises(BackendUnavailable) as caught:
        await _run(tmp_path, Gone(), total_steps=9, save_every=2)
    last = CheckpointManifest.load(tmp_path / "checkpoints.json").last_complete()
    assert "the server does not answer" in str(caught.value)
    assert f"the checkpoint of step 2 ({last.state})" in str(caught.value)
    with pytest.raises(BackendUnavailable, match="no checkpoint was made yet"):
        await _run(tmp_path / "none", Gone(), total_steps=9)


async def test_hooks_hear_everything_in_order(tmp_path):
    hooks = Hooks()
    result, _ = await _run(tmp_path, hooks=hooks, total_steps=2)
    assert hooks.told == [("start", 2), ("step", 1), ("step", 2), ("checkpoint", 2), ("end", result.final_loss)]


async def test_a_hook_can_stop_early_and_the_weights_are_kept(tmp_path):
    result, _ = await _run(tmp_path, hooks=Hooks(stop_after=2), total_steps=50)
    assert result.steps == 2 and result.stopped == "good enough" and result.checkpoint.step == 2


async def test_cancelling_in_a_hook_passes_through_and_what_was_saved_stays(tmp_path):
    async def cancel(step, snapshot):
        if step == 2:
            raise Cancelled("stop it")

    with pytest.raises(Cancelled, match="stop it"):
        await _run(tmp_path, hooks=Hooks(at=cancel), total_steps=5, save_every=2)
    assert CheckpointManifest.load(tmp_path / "checkpoints.json").last_complete().step == 2


async def test_a_snapshot_is_of_its_step_even_when_it_is_awaited_later(tmp_path):
    asked = {}

    async def ask(step, snapshot):
        asked[step] = snapshot()  # not awaited: training goes on

    backend = RecordingBackend()
    await _run(tmp_path, backend=backend, hooks=Hooks(at=ask), total_steps=3)
    prompt = _datum().model_input
    said = [sum((await (await asked[step]).compute_logprobs(prompt))[1:]) for step in (1, 2, 3)]
    assert said[0] < said[1] < said[2]


async def test_a_snapshot_asked_for_too_late_is_refused(tmp_path):
    kept = []

    async def keep(step, snapshot):
        kept.append(snapshot)

    await _run(tmp_path, hooks=Hooks(at=keep), total_steps=2)
    with pytest.raises(BackendError, match="the weights of step 1 have changed since"):
        await kept[0]()


async def test_several_who_ask_share_one_saving(tmp_path):
    backend = RecordingBackend()

    async def ask(step, snapshot):
        await snapshot()
        await snapshot()

    await _run(tmp_path, backend=backend, hooks=Hooks(at=ask), total_steps=1)
    assert backend.order("save_weights_for_sampler").count("submitted save_weights_for_sampler") == 1


async def test_nan_stops_the_run_naming_step_rows_and_the_last_good_checkpoint(tmp_path):
    class Poisoned(Builder):
        async def build_batch(self, step):
            batch = TrainingBatch([_datum(weight=math.nan if step == 3 else 1.0)], row_ids=["row-a", "row-b"])
            return batch

    with pytest.raises(BackendError) as caught:
        await _run(tmp_path, Poisoned(), total_steps=5, save_every=2)
    said = str(caught.value)
    assert said.startswith("step 3: loss:sum is nan") and "row-a, row-b" in said
    # Step 2's own weights have never been seen to work, so they are not called good.
    assert "last good checkpoint: none" in said
    assert CheckpointManifest.load(tmp_path / "checkpoints.json").last_complete() is None


async def test_weights_that_have_worked_since_are_good(tmp_path):
    class Poisoned(Builder):
        async def build_batch(self, step):
            return TrainingBatch([_datum(weight=math.nan if step == 4 else 1.0)])

    with pytest.raises(BackendError, match=r"last good checkpoint: .*step-000002"):
        await _run(tmp_path, Poisoned(), total_steps=5, save_every=2)


async def test_a_checkpoint_that_cannot_be_loaded_gives_way_to_the_one_before(tmp_path, capfd):
    await _run(tmp_path, total_steps=4, save_every=2)
    manifest = CheckpointManifest.load(tmp_path / "checkpoints.json")
    Path(manifest.checkpoints[-1].state).write_bytes(b"torn")
    builder = Builder()
    result, _ = await _run(tmp_path, builder, resume=True, total_steps=4)
    assert builder.steps == [3, 4] and result.steps == 4
    assert "the checkpoint of step 4 cannot be loaded" in capfd.readouterr().err


async def test_a_failing_call_is_raised_and_the_others_are_not_left_unheard(tmp_path):
    backend = RecordingBackend()
    bad = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": TensorData([1, 2], "int64")})
    with pytest.raises(BackendError, match="datum 0: loss_fn_inputs has no 'weights'"):
        await _run(tmp_path, Builder(bad), backend)
    assert "answered optim_step" in backend.order()


async def test_a_batch_without_data_moves_nothing_and_counts_as_a_step(tmp_path):
    class Sometimes(Builder):
        async def build_batch(self, step):
            return TrainingBatch([], metrics={"skipped": 1.0}) if step == 2 else self.batch

    backend = RecordingBackend()
    result, ctx = await _run(tmp_path, Sometimes(), backend, total_steps=3)
    assert backend.order("optim_step").count("submitted optim_step") == 2
    assert ctx.log_store.metrics[1][1]["skipped"] == 1.0 and "loss" not in ctx.log_store.metrics[1][1]
    assert result.steps == 3


async def test_policy_losses_are_logged_per_token_with_an_advantage(tmp_path):
    inputs = {
        "target_tokens": TensorData([1, 2, 3], "int64"),
        "logprobs": TensorData([-5.0, -5.0, -5.0]),
        "advantages": TensorData([0.0, 1.0, -1.0]),
    }
    datum = Datum(ModelInput.from_ints([1, 2, 3]), inputs)
    _, ctx = await _run(tmp_path, Builder(datum, loss_fn="importance_sampling"), total_steps=1)
    metrics = ctx.log_store.metrics[0][1]
    assert metrics["loss"] == pytest.approx(metrics["loss:sum"] / 2)


def test_a_loss_the_backend_lacks_is_refused_with_the_ones_it_has():
    batch = TrainingBatch([_datum()], loss_fn="ppo")
    with pytest.raises(BackendError, match="'ppo' is not a loss of this backend; known: cross_entropy; use one of"):
        refuse_unsupported(batch, Capabilities(losses=frozenset({"cross_entropy"})))


def test_a_custom_loss_on_a_backend_without_is_refused_with_the_remedy():
    batch = TrainingBatch([_datum()], loss_fn=lambda data, logprobs: (0, {}))
    with pytest.raises(BackendError, match=r"pip install 'evsys-sdk\[local\]'.*or use a loss it has: cross_entropy"):
        refuse_unsupported(batch, Capabilities(losses=frozenset({"cross_entropy"})))


def test_metrics_of_pieces_add_up_or_average_by_their_name():
    parts = [{"loss:sum": 1.0, "ratio": 2.0}, {"loss:sum": 3.0, "ratio": 4.0}]
    assert merge_metrics(parts, [2, 2]) == {"loss:sum": 4.0, "ratio": 3.0}
    assert merge_metrics(parts, [3, 1]) == {"loss:sum": 4.0, "ratio": 2.5}, "the mean is over the data of the calls"
    assert merge_metrics(parts, [0, 0]) == {"loss:sum": 4.0, "ratio": 3.0}
