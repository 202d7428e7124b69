"""Learning from preferences on the mock backend."""

from __future__ import annotations

import asyncio
import importlib.util
import math

import pytest

from evsys_sdk.algorithms.dpo import DPO, whole_sequence
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.errors import BackendError, DataError
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training.teachers import completion_logprobs
from evsys_sdk.training_api import Capabilities

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the loss is written in torch")
CAPITALS = {"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Norway": "Oslo", "Japan": "Tokyo"}
FAST = {"batch_size": 4, "learning_rate": 2e-4}


def _rows():
    return [
        {"id": land, "prompt": f"Capital of {land}?", "chosen": capital, "rejected": capital[::-1]}
        for land, capital in CAPITALS.items()
    ]


def _answer_logprobs(ctx, result, land, answers):
    """What the trained weights think of each answer, in nats."""

    async def ask():
        service = ctx.extras["backend_handles"]["service"]
        sampler = await service.create_sampling_client(result.artifacts["final_sampler"])
        tokenizer = service.get_tokenizer()
        asked = [{"role": "user", "content": f"Capital of {land}?"}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        told = [await completion_logprobs(sampler, prompt, tokenizer.encode(answer)) for answer in answers]
        return [sum(logprobs) for logprobs in told]

    return asyncio.run(ask())


def test_the_weights_really_move_and_the_chosen_answer_overtakes_the_rejected_one(tmp_path):
    ctx = training_context(tmp_path, _rows())
    result = DPO(max_steps=20, **FAST).train(ctx)
    margin, accuracy = ctx.log_store.curve("margin"), ctx.log_store.curve("accuracy")
    assert margin[0] == pytest.approx(0.0, abs=1e-5) and margin[-1] > 2.0 and accuracy[-1] == 1.0
    for land, capital in CAPITALS.items():
        chosen, rejected = _answer_logprobs(ctx, result, land, [capital, capital[::-1]])
        assert chosen > rejected + 5


def test_the_first_loss_is_that_of_a_coin_since_the_start_is_the_reference(tmp_path):
    first = DPO(max_steps=5, **FAST).train(training_context(tmp_path, _rows()))
    ctx = training_context(tmp_path, _rows(), start_from=first.artifacts["final_checkpoint"])
    DPO(max_steps=1, **FAST).train(ctx)
    assert first.metrics["first_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert ctx.log_store.curve("loss") == [pytest.approx(math.log(2), abs=1e-5)], "also where a stage starts"


def test_the_margin_of_a_step_in_several_calls_is_the_mean_over_its_pairs(tmp_path):
    """Five pairs in two calls of different sizes, as in one call of five."""
    curves = []
    for number, settings in enumerate(({"batch_size": 5}, {"batch_size": 3, "grad_accumulation": 2})):
        ctx = training_context(tmp_path / str(number), _rows())
        DPO(max_steps=6, learning_rate=2e-4, **settings).train(ctx)
        curves.append({name: ctx.log_store.curve(name) for name in ("margin", "accuracy", "reward/chosen", "loss")})
    for name, curve in curves[0].items():
        assert curves[1][name] == pytest.approx(curve, abs=1e-4), name


def test_beta_says_how_far_a_margin_counts(tmp_path):
    margins = {}
    for beta in (0.1, 1.0):
        ctx = training_context(tmp_path, _rows())
        DPO(max_steps=2, beta=beta, **FAST).train(ctx)
        margins[beta] = ctx.log_store.curve("margin")[1]
    assert margins[1.0] == pytest.approx(10 * margins[0.1], rel=0.05)


def test_label_smoothing_keeps_the_margin_finite(tmp_path):
    margins = {}
    for smoothing in (0.0, 0.4):
        ctx = training_context(tmp_path, _rows())
        DPO(max_steps=20, label_smoothing=smoothing, **FAST).train(ctx)
        margins[smoothing] = ctx.log_store.curve("margin")[-1]
    assert margins[0.4] < 0.5 * margins[0.0]


def test_accumulation_never_tears_a_pair_apart_and_changes_nothing_else(tmp_path):
    curves = []
    for size, pieces in ((6, 1), (2, 3), (1, 6), (3, 2)):
        backend = RecordingBackend()
        ctx = training_context(tmp_path, _rows(), backend=backend)
        DPO(max_steps=4, batch_size=size, grad_accumulation=pieces, learning_rate=2e-4).train(ctx)
        calls = [e.args[0] for e in backend.events if e.what == "submitted" and e.call == "forward_backward_custom"]
        assert len(calls) == 4 * min(pieces, len(CAPITALS)), "four steps of five pairs"
        for data in calls:
            for chosen, rejected in zip(data[0::2], data[1::2], strict=True):
                assert sorted(whole_sequence(chosen)) == sorted(whole_sequence(rejected)), "an anagram of its mate"
        curves.append(ctx.log_store.curve("loss"))
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], rel=1e-3)


def test_the_reference_is_asked_once_per_answer(tmp_path):
    backend = RecordingBackend()
    DPO(num_epochs=3, batch_size=2).train(training_context(tmp_path, _rows(), backend=backend))
    asked = [e for e in backend.events if e.what == "submitted" and e.call == "compute_logprobs"]
    assert len(asked) == 2 * len(CAPITALS)


def test_one_seed_repeats_exactly_and_another_differs(tmp_path):
    names = []
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = DPO(max_steps=3, **FAST).train(training_context(tmp_path / place, _rows(), seed=seed))
        names.append(result.artifacts["final_checkpoint"].rpartition("/")[2])
    assert names[0] == names[1] != names[2]


def test_pairs_that_are_too_long_are_left_out_counted_and_named(tmp_path):
    rows = [*_rows(), {"id": "far", "prompt": "x", "chosen": "y" * 300, "rejected": "z"}]
    result = DPO(max_steps=1, max_length=100).train(training_context(tmp_path, rows))
    assert result.metrics["rows_dropped"] == 1 and result.extras["dropped_rows"] == ["far"]
    with pytest.raises(DataError, match="no pair is left to train on"):
        DPO(max_steps=1, max_length=5).train(training_context(tmp_path, rows))


def test_rows_of_another_shape_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 0: (.|\n)*dpo needs rows with `prompt`"):
        DPO(max_steps=1).train(training_context(tmp_path, [{"query": "?", "answer": "!"}]))


def test_what_the_backend_lacks_is_said_before_anything_is_made(tmp_path):
    backend = RecordingBackend(inner=Bare())
    with pytest.raises(BackendError, match=r"dpo: its loss is a callable.*pip install 'evsys-sdk\[local\]'"):
        DPO(max_steps=1).train(training_context(tmp_path, _rows(), backend=backend))
    assert backend.events == []
    some = Capabilities(losses=frozenset(), custom_loss=True)
    assert "start weights' logprobs" in DPO().needs(some)


class Bare(MockBackend):
    """The mock on a machine without torch."""

    name = "mock"

    def prepare(self, *, model, run_dir):
        handles = super().prepare(model=model, run_dir=run_dir)
        handles["service"].capabilities = Capabilities(losses=frozenset({"cross_entropy"}), prompt_logprobs=True)
        return handles


def test_every_setting_is_read(tmp_path):
    algorithm = DPO(**DPO.Config().model_dump())
    forget(algorithm.cfg)
    algorithm.train(training_context(tmp_path, _rows()))
    assert list(unread(algorithm.cfg)) == []
