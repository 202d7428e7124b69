"""Supervised fine-tuning on the mock backend, through the same code that drives real ones."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from evsys_sdk import register_algorithm
from evsys_sdk.algorithms.sft import SFT, MockSFT
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.errors import BackendError, DataError
from evsys_sdk.registry import algorithms
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import ModelInput, SamplingParams, text_of

CAPITALS = {"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Norway": "Oslo", "Japan": "Tokyo"}


def _rows():
    return [
        {
            "messages": [{"role": "user", "content": f"Capital of {land}?"}],
            "target_assistant": capital,
            "metadata": {"id": land},
        }
        for land, capital in CAPITALS.items()
    ]


def _timeless(log):
    timed = ("step_seconds", "tokens_per_second")
    return [{key: value for key, value in metrics.items() if key not in timed} for _, metrics in log.metrics]


def _ask(ctx, result, question):
    async def ask():
        service = ctx.extras["backend_handles"]["service"]
        sampler = await service.create_sampling_client(result.artifacts["final_sampler"])
        tokenizer = service.get_tokenizer()
        chat = [{"role": "user", "content": question}]
        prompt = ModelInput.from_ints(tokenizer.apply_chat_template(chat, add_generation_prompt=True))
        output = await sampler.sample(prompt, 1, SamplingParams(temperature=0.0))
        return text_of(output.sequences[0].tokens, tokenizer)

    return asyncio.run(ask())


def test_the_trained_model_says_what_it_was_taught(tmp_path):
    ctx = training_context(tmp_path, _rows())
    result = SFT(num_epochs=40, batch_size=2, learning_rate=1e-3).train(ctx)
    assert result.metrics["final_loss"] < 0.1 * result.metrics["first_loss"]
    for land, capital in CAPITALS.items():
        assert _ask(ctx, result, f"Capital of {land}?") == capital


def test_the_default_recipe_lowers_the_loss(tmp_path):
    ctx = training_context(tmp_path, _rows() * 8)
    result = SFT().train(ctx)
    assert result.metrics["steps"] == 5 and result.metrics["final_loss"] < result.metrics["first_loss"]


def test_one_seed_repeats_exactly_and_another_differs(tmp_path):
    runs = []
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        ctx = training_context(tmp_path / place, _rows(), seed=seed)
        result = SFT(num_epochs=3, batch_size=2).train(ctx)
        name = result.artifacts["final_checkpoint"].rpartition("/")[2]  # named after the content
        runs.append((name, _timeless(ctx.log_store), result.metrics))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0] and runs[0][1] != runs[2][1]


def _batches(tmp_path, seed=42, **params):
    """The row ids of every step of a run."""
    seen = []

    class Watched(SFT):
        async def build_batch(self, step):
            batch = await super().build_batch(step)
            seen.append(batch.row_ids)
            return batch

    Watched(**params).train(training_context(tmp_path, _rows(), seed=seed))
    return seen


def test_every_epoch_sees_every_row_once(tmp_path):
    seen = _batches(tmp_path, num_epochs=2, batch_size=2)
    assert [len(ids) for ids in seen] == [2, 2, 1, 2, 2, 1]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(name for ids in epoch for name in ids) == sorted(CAPITALS)


def test_the_seed_decides_the_order_of_rows(tmp_path):
    first, again, other = [_batches(tmp_path, seed=seed, batch_size=1) for seed in (1, 1, 2)]
    assert first == again != other


def test_accumulation_makes_the_step_larger_not_the_call(tmp_path):
    backend = RecordingBackend()
    SFT(batch_size=2, grad_accumulation=2).train(training_context(tmp_path, _rows(), backend=backend))
    calls = [e for e in backend.events if e.what == "submitted" and e.call in ("forward_backward", "optim_step")]
    sizes = [len(e.args[0]) if e.call == "forward_backward" else "step" for e in calls]
    assert sizes == [2, 2, "step", 1, "step"]


def test_only_the_assistants_words_are_learnt(tmp_path):
    backend = RecordingBackend()
    SFT(max_steps=1).train(training_context(tmp_path, _rows()[:1], backend=backend))
    (datum,) = next(e for e in backend.events if e.call == "forward_backward").args[0]
    pairs = zip(datum.loss_fn_inputs["target_tokens"].data, datum.loss_fn_inputs["weights"].data, strict=True)
    assert bytes(token for token, weight in pairs if weight and token < 256) == b"Paris"


def test_rows_of_another_shape_are_refused_with_the_transform_to_add(tmp_path):
    with pytest.raises(DataError, match=r"row 1 is unknown, not chat_messages(.|\n)*jsonl_to_chat"):
        SFT().train(training_context(tmp_path, [_rows()[0], {"query": "q", "answer": "a"}]))


@pytest.mark.parametrize("rows", [[], None])
def test_no_rows_are_refused(tmp_path, rows):
    ctx = training_context(tmp_path, [])
    ctx.extras["train_rows"] = rows
    with pytest.raises(DataError, match="there are no training rows"):
        SFT().train(ctx)


def test_a_row_without_an_assistant_is_named(tmp_path):
    rows = [*_rows(), {"messages": [{"role": "user", "content": "?"}], "metadata": {"id": "lonely"}}]
    with pytest.raises(DataError, match="row lonely has nothing to learn from"):
        SFT().train(training_context(tmp_path, rows))


def _with_long_row():
    long = {"messages": [{"role": "user", "content": "x" * 300}], "target_assistant": "y", "metadata": {"id": "far"}}
    half = {"messages": [{"role": "user", "content": "x"}], "target_assistant": "y" * 300, "metadata": {"id": "half"}}
    return [*_rows(), long, half]


def test_long_rows_are_cut_counted_and_named(tmp_path, caplog):
    ctx = training_context(tmp_path, _with_long_row())
    result = SFT(max_length=100).train(ctx)
    assert result.metrics["rows_truncated"] == 2 and result.metrics["rows_dropped"] == 1
    assert result.extras["truncated_rows"] == ["far", "half"] and result.extras["dropped_rows"] == ["far"]
    assert result.metrics["tokens"] > 99


def test_long_rows_are_left_out_when_asked(tmp_path):
    result = SFT(max_length=100, on_truncate="drop").train(training_context(tmp_path, _with_long_row()))
    assert result.extras["dropped_rows"] == ["far", "half"]


def test_long_rows_are_an_error_when_asked(tmp_path):
    with pytest.raises(DataError, match=r"2 rows are longer than max_length 100 .*: far, half; raise max_length"):
        SFT(max_length=100, on_truncate="error").train(training_context(tmp_path, _with_long_row()))


def test_when_nothing_is_left_it_says_so(tmp_path):
    with pytest.raises(DataError, match="no row is left to train on"):
        SFT(max_length=5).train(training_context(tmp_path, _rows()))


def test_the_last_turn_alone_can_be_learnt(tmp_path):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "FIRST"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "SECOND"},
    ]
    tokens = {}
    for train_on in ("all", "last"):
        backend = RecordingBackend()
        ctx = training_context(tmp_path, [{"messages": chat}], backend=backend)
        SFT(max_steps=1, train_on=train_on).train(ctx)
        (datum,) = next(e for e in backend.events if e.call == "forward_backward").args[0]
        tokens[train_on] = sum(datum.loss_fn_inputs["weights"].data)
    assert tokens == {"all": len("FIRST|SECOND|"), "last": len("SECOND|")}


def _long_and_short():
    """Rows of quite different lengths."""
    return [
        {"messages": [{"role": "user", "content": "?"}], "target_assistant": "ab" * size, "metadata": {"id": str(size)}}
        for size in (1, 2, 3, 5, 8, 13, 21, 34, 1, 2, 3, 5)
    ]


def _packed(tmp_path, rows, seed=42, **params):
    """The batches that a packed run trains on."""
    seen = []

    class Watched(SFT):
        async def build_batch(self, step):
            batch = await super().build_batch(step)
            seen.append(batch)
            return batch

    result = Watched(packing=True, **params).train(training_context(tmp_path, rows, seed=seed))
    return seen, result


def test_packing_fills_each_place_of_a_batch_and_sees_every_row_once(tmp_path):
    rows = _long_and_short()
    batches, result = _packed(tmp_path, rows, batch_size=1, max_length=128)
    assert result.metrics["packs"] == result.metrics["steps"] == len(batches) < len(rows) / 2
    assert sorted(name for batch in batches for name in batch.row_ids) == sorted(r["metadata"]["id"] for r in rows)
    sizes = [sum(datum.model_input.length for datum in batch.data) for batch in batches]
    assert max(sizes) <= 128 and sum(sizes) == result.metrics["tokens"]


def test_packed_rows_stay_data_of_their_own(tmp_path):
    (batch, *_), _ = _packed(tmp_path, _long_and_short(), batch_size=2, max_length=128)
    assert len(batch.data) == len(batch.row_ids) > 2
    backend = RecordingBackend()
    SFT(batch_size=64, max_steps=1).train(training_context(tmp_path, _long_and_short(), backend=backend))
    unpacked = next(e for e in backend.events if e.call == "forward_backward").args[0]
    assert all(datum in unpacked for datum in batch.data)


def test_packed_steps_repeat_with_the_seed_and_follow_from_their_number(tmp_path):
    params = {"batch_size": 1, "max_length": 128}
    runs = [_packed(tmp_path, _long_and_short(), seed, **params)[0] for seed in (1, 1, 2)]
    first, again, other = ([batch.row_ids for batch in batches] for batches in runs)
    assert first == again != other

    async def third_alone():
        algorithm = SFT(packing=True, **params)
        ctx = training_context(tmp_path, _long_and_short(), seed=1)
        algorithm.renderer = ChatRenderer(ctx.extras["backend_handles"]["service"].get_tokenizer())
        await algorithm.setup(ctx, None)
        return (await algorithm.build_batch(3)).row_ids

    assert asyncio.run(third_alone()) == first[2]


class RewritingBackend(MockBackend):
    """A model whose template shows earlier answers as dots."""

    def prepare(self, *, model, run_dir):
        handles = super().prepare(model=model, run_dir=run_dir)
        handles["service"].get_tokenizer = RewritingTokenizer
        return handles


class RewritingTokenizer(ByteTokenizer):
    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        last = len(messages) - 1
        shown = [
            {**m, "content": "..."} if m["role"] == "assistant" and i < last else m for i, m in enumerate(messages)
        ]
        return super().apply_chat_template(shown, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize(("train_on", "count"), [("all", 2), ("last", 1)])
def test_a_chat_of_a_model_that_rewrites_earlier_turns_becomes_a_datum_per_turn(tmp_path, train_on, count):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "FIRST"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "SECOND"},
    ]
    rows = [{"messages": chat, "metadata": {"id": "talk"}}] * 3
    algorithm = SFT(train_on=train_on, batch_size=2)
    result = algorithm.train(training_context(tmp_path, rows, backend=RewritingBackend()))
    assert algorithm.row_ids == ["talk"] * 3 * count
    assert result.metrics["steps"] == -(-3 * count // 2), "epochs count data"


def test_every_setting_is_read(tmp_path):
    algorithm = SFT(**SFT.Config().model_dump())
    forget(algorithm.cfg)
    algorithm.train(training_context(tmp_path, _rows()))
    assert list(unread(algorithm.cfg)) == []


def test_a_step_that_fails_fails_the_run(tmp_path):
    ctx = training_context(tmp_path, _rows(), backend=MockBackend(fail_at_step=2))
    with pytest.raises(BackendError, match="fails at step 2 as configured"):
        SFT(num_epochs=5).train(ctx)
    assert len(ctx.log_store.metrics) == 1


def test_mock_sft_is_sft_on_the_mock(tmp_path):
    runs = [cls(max_steps=3).train(training_context(tmp_path, _rows())) for cls in (SFT, MockSFT)]
    assert runs[0].metrics == runs[1].metrics


def test_mock_sft_runs_nowhere_else(tmp_path):
    class Elsewhere(MockBackend):
        name = "tinker"

    ctx = training_context(tmp_path, _rows(), backend=Elsewhere())
    with pytest.raises(BackendError, match="mock_sft runs on the mock backend only, not on 'tinker'; on 'tinker' use"):
        MockSFT(max_steps=1).train(ctx)


def test_both_are_registered():
    assert algorithms.get("sft") is SFT and algorithms.get("mock_sft") is MockSFT
    assert "train_on" in algorithms.schema("sft")["properties"]


def my_focal_loss(data, logprobs):
    """Cross-entropy that looks harder at what is not known yet."""
    loss = 0.0
    for datum, lp in zip(data, logprobs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        loss = loss - (weights * (1 - lp.exp()) ** 2 * lp).sum()
    return loss, {"focal": float(loss.detach())}


@pytest.fixture
def focal_sft(monkeypatch):
    """The walkthrough's example, as printed."""
    algorithms.names()  # built-ins are there before the copy
    # An example registers this name too, and another test of this process may have imported it.
    others = {name: entry for name, entry in algorithms.entries.items() if name != "focal_sft"}
    monkeypatch.setattr(algorithms, "entries", others)

    @register_algorithm("focal_sft")
    class FocalSFT(SFT):
        name = "focal_sft"

        async def build_batch(self, step_idx):
            batch = await super().build_batch(step_idx)
            batch.loss_fn = my_focal_loss  # a client-side LossCallable
            return batch

    return FocalSFT


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="custom losses are written in torch")
def test_the_focal_loss_example_trains(tmp_path, focal_sft):
    ctx = training_context(tmp_path, _rows())
    result = algorithms.build("focal_sft", {"max_steps": 30, "lora_rank": 8, "learning_rate": 1e-3}).train(ctx)
    focal = ctx.log_store.curve("focal")
    assert focal[-1] < 0.2 * focal[0] and result.metrics["steps"] == 30


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
def test_the_focal_loss_example_says_what_is_missing_without_torch(tmp_path, focal_sft):
    with pytest.raises(BackendError, match=r"custom losses need torch \(pip install 'evsys-sdk\[local\]'\)"):
        focal_sft(max_steps=200, lora_rank=8).train(training_context(tmp_path, _rows()))
