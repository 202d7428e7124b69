"""Completions, against the model's own forward."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from tiny_models import VOCAB, new_sampler, random_lora, tiny_tokenizer

from evsys_engine import scheduler
from evsys_engine.devices import FairLock
from evsys_engine.sampler import StopRule
from evsys_engine.scheduler import snapshots_of
from evsys_engine.types import AdamParams, BadRequest, EngineError, LoraSettings, SampleRequest, TrainingDatum

PROMPT = [5, 9, 200, 31, 7]


@torch.no_grad()
def logprobs_by_hand(model, tokens):
    """[tokens, vocabulary], after every token."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


def others(count):
    """Requests of all kinds."""
    return [
        SampleRequest(
            tokens=[(i * 13 + j * 7) % VOCAB for j in range(1 + 6 * i)],
            num_samples=1 + i % 3,
            max_tokens=1 + 5 * i,
            seed=i,
            temperature=0.5 * (i % 4),
            top_k=-1 if i % 2 else 20,
            top_p=1.0 if i % 3 else 0.8,
            prompt_logprobs=i % 4 == 0,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_the_likeliest_tokens_and_their_logprobs_are_the_models_own(kind, models, sampler):
    row = sampler(kind).sample([SampleRequest(tokens=PROMPT, max_tokens=12, temperature=0)])[0].sequences[0]
    truth = logprobs_by_hand(models(kind), PROMPT + row.tokens)
    expected = truth[len(PROMPT) - 1 : -1]
    assert row.tokens == expected.argmax(-1).tolist()
    assert row.logprobs == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)
    assert row.stop_reason == "length" and len(row.tokens) == 12


def test_logprobs_are_of_the_untempered_model(models, sampler):
    request = SampleRequest(tokens=PROMPT, max_tokens=10, temperature=0.4, top_k=50, top_p=0.9, seed=1)
    row = sampler().sample([request])[0].sequences[0]
    truth = logprobs_by_hand(models("llama"), PROMPT + row.tokens)
    expected = [float(truth[len(PROMPT) - 1 + i, token]) for i, token in enumerate(row.tokens)]
    assert row.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_company_in_the_batch_changes_nothing(kind, sampler):
    one = sampler(kind)
    request = SampleRequest(tokens=PROMPT, num_samples=3, max_tokens=20, seed=42, topk_prompt_logprobs=2)
    alone = one.sample([request])[0]
    company = others(16)
    among = one.sample([*company[:7], request, *company[7:]])
    assert [row.tokens for row in among[7].sequences] == [row.tokens for row in alone.sequences]
    assert among[7].sequences[2].logprobs == pytest.approx(alone.sequences[2].logprobs, abs=1e-4)
    assert [len(among[i + (i > 6)].sequences) for i in range(16)] == [asked.num_samples for asked in company]
    for i in (3, 12):
        again = one.sample([company[i]])[0]
        assert [row.tokens for row in again.sequences] == [row.tokens for row in among[i + (i > 6)].sequences]


def test_the_same_seed_repeats_and_rows_and_seeds_differ(sampler):
    one = sampler()

    def rows(seed, count=4):
        request = SampleRequest(tokens=PROMPT, num_samples=count, max_tokens=12, seed=seed)
        return [tuple(row.tokens) for row in one.sample([request])[0].sequences]

    assert rows(1) == rows(1)
    assert rows(1, count=2) == rows(1)[:2]
    assert len({*rows(1), *rows(2), *rows(None), *rows(None)}) == 16


def test_both_decoders_draw_the_same(sampler, monkeypatch):
    requests = [request for request in others(8) if request.seed is not None]
    fast = sampler("qwen2", lora=None).sample(requests)
    monkeypatch.setattr(scheduler, "is_supported", lambda model: False)
    slow = sampler("qwen2", lora=None).sample(requests)
    assert [[row.tokens for row in result.sequences] for result in fast] == [
        [row.tokens for row in result.sequences] for result in slow
    ]
    assert fast[4].prompt_logprobs[1:] == pytest.approx(slow[4].prompt_logprobs[1:], abs=1e-4)


def test_prompt_logprobs_and_the_likeliest_alternatives(models, sampler, monkeypatch):
    monkeypatch.setattr("evsys_engine.decoder.HEAD_BYTES", 1)
    long = [(11 * i) % VOCAB for i in range(60)]
    requests = [
        SampleRequest(tokens=prompt, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=3)
        for prompt in (long, PROMPT)
    ]
    for request, result in zip(requests, sampler().sample(requests), strict=True):
        truth = logprobs_by_hand(models("llama"), list(request.tokens))
        expected = [float(truth[i, token]) for i, token in enumerate(request.tokens[1:])]
        assert result.prompt_logprobs[0] is None and result.topk_prompt_logprobs[0] is None
        assert result.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        best = truth[:-1].topk(3)
        assert [[token for token, _ in place] for place in result.topk_prompt_logprobs[1:]] == best.indices.tolist()
        assert result.topk_prompt_logprobs[-1][2][1] == pytest.approx(float(best.values[-1, 2]), abs=1e-4)
    plain = sampler().sample([SampleRequest(tokens=PROMPT, max_tokens=1)])[0]
    assert plain.prompt_logprobs is None and plain.topk_prompt_logprobs is None


def test_an_adapter_is_applied_and_later_training_does_not_reach_it(models, sampler):
    lora = random_lora(models("llama"))
    one, base = sampler(lora=lora), sampler()
    request = SampleRequest(tokens=PROMPT, max_tokens=8, temperature=0)
    before = one.sample([request])[0].sequences[0].tokens
    assert before != base.sample([request])[0].sequences[0].tokens
    for a, b, _ in lora.values():
        a.add_(1), b.add_(1)
    one._snapshots.drop(one._key)  # as if others had been used since: the weights are made again
    assert one.sample([request])[0].sequences[0].tokens == before


# --- stops ---------------------------------------------------------------------------------------------------------


def greedy(one, **settings):
    return one.sample([SampleRequest(tokens=PROMPT, max_tokens=20, temperature=0, **settings)])[0].sequences[0]


def test_a_stop_id_ends_the_row_and_stays(sampler):
    free = greedy(sampler()).tokens
    stop = free[4]
    row = greedy(sampler(), stop=(stop,))
    assert row.tokens == free[: free.index(stop) + 1] and row.stop_reason == "stop"
    assert len(row.logprobs) == len(row.tokens)


@pytest.mark.parametrize("as_list", [True, False])
def test_the_models_own_end_always_stops_unless_it_is_switched_off(sampler, as_list):
    free = greedy(sampler()).tokens
    end = free[5]
    one = sampler(end_ids=[end, 299] if as_list else end)
    row = greedy(one)
    assert row.tokens == free[: free.index(end) + 1] and row.stop_reason == "stop"
    assert greedy(one, end_of_text=False).tokens == free


def test_the_tokenizers_end_stops_too(sampler):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(greedy(sampler()).tokens[3])
    assert len(greedy(sampler(tokenizer=tokenizer)).tokens) <= 4


class Numbers:
    """A tokenizer whose tokens read <0>, <1>, ..."""

    eos_token_id = None

    def decode(self, tokens, **_):
        return "".join(f"<{token}>" for token in tokens)


def test_a_stop_string_is_cut_off_with_every_token_that_holds_a_piece_of_it(sampler):
    one = sampler(tokenizer=Numbers())
    free = greedy(one)
    stop = f"{free.tokens[5]}><{free.tokens[6]}><"  # from inside the sixth token to inside the eighth
    row = greedy(one, stop=("never there", stop))
    assert row.tokens == free.tokens[:5] and row.logprobs == pytest.approx(free.logprobs[:5], abs=1e-5)
    assert row.stop_reason == "stop"
    kept = greedy(one, stop=(stop,), keep_stop_strings=True)
    assert kept.tokens == free.tokens[:8] and kept.stop_reason == "stop"


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("one day the end of it", ("the end",), "one day"),  # a token " the" goes as a whole
        ("one day the end of it", ("it", "day"), "one"),
        ("naïve — très", ("ïve",), "na"),  # letters of several tokens
        ("the thing", ("the",), ""),
        ("a<end>b", ("<end>",), "a"),  # a special token has a text too
        ("no stop here", ("stopp",), None),
    ],
)
def test_stop_strings_are_found_as_soon_as_they_are_written(text, stop, left):
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode(text)
    rule = StopRule(stop, frozenset(), tokenizer)
    for i in range(1, len(tokens) + 1):
        kept = rule.kept(tokens[:i])
        if kept is not None:
            assert tokenizer.decode(tokens[:kept]).rstrip("\N{REPLACEMENT CHARACTER}") == left
            assert any(item in tokenizer.decode(tokens[:i]) for item in stop)
            assert not any(item in tokenizer.decode(tokens[: i - 1]) for item in stop)
            return
    assert left is None


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_row_ends_where_the_model_does(sampler):
    one = sampler()  # 128 tokens long
    prompt = [i % VOCAB for i in range(120)]
    row = one.sample([SampleRequest(tokens=prompt, max_tokens=50, seed=0, end_of_text=False)])[0].sequences[0]
    assert len(row.tokens) == 8 and row.stop_reason == "length"
    full = one.sample([SampleRequest(tokens=[1] * 128, max_tokens=5, prompt_logprobs=True)])[0]
    assert len(full.sequences[0].tokens) == 1 and len(full.prompt_logprobs) == 128


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"tokens": []}, "empty"),
        ({"tokens": [1, VOCAB]}, f"token {VOCAB} is out of range"),
        ({"tokens": [-1]}, "token -1 is out of range"),
        ({"tokens": ["a"]}, "prompt"),
        ({"tokens": [1] * 129}, "129 tokens, but tiny takes 128"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"topk_prompt_logprobs": VOCAB + 1}, "topk_prompt_logprobs"),
        ({"stop": ("",)}, "empty string"),
        ({"stop": ("x",)}, "no tokenizer"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(sampler, request_, words):
    with pytest.raises(BadRequest, match=words):
        sampler().sample([SampleRequest(tokens=PROMPT), SampleRequest(**{"tokens": PROMPT, **request_})])


def test_more_rows_than_fit_are_served_in_turn(sampler):
    one = sampler()
    requests = [SampleRequest(tokens=[i + 1], num_samples=5, max_tokens=3 + i, seed=i) for i in range(4)]
    wide = one.sample(requests)
    one.max_rows = 3
    assert [[row.tokens for row in result.sequences] for result in one.sample(requests)] == [
        [row.tokens for row in result.sequences] for result in wide
    ]


def test_a_small_cache_only_makes_rows_wait(sampler, monkeypatch):
    one = sampler()
    wide = one.sample(others(6))
    monkeypatch.setattr(scheduler, "CACHE_BYTES", 1)
    assert [[row.tokens for row in result.sequences] for result in one.sample(others(6))] == [
        [row.tokens for row in result.sequences] for result in wide
    ]


# --- memory, locks -------------------------------------------------------------------------------------------------


def test_closing_gives_the_memory_back(models, sampler):
    one = sampler(lora=random_lora(models("llama")))
    one.sample([SampleRequest(tokens=PROMPT, max_tokens=2)])
    held = weakref.ref(one._decoder())
    gc.collect()
    assert held() is not None
    one.close()
    gc.collect()
    assert held() is None
    with pytest.raises(EngineError, match="closed"):
        one.sample([SampleRequest(tokens=PROMPT)])


def test_a_closed_sampler_holds_no_weights_whoever_holds_the_sampler(sampler, models):
    full = {name: tensor.detach().clone() for name, tensor in models("llama").named_parameters()}
    held = weakref.ref(full["model.norm.weight"])
    one = sampler(full=full)
    del full
    one.close()
    gc.collect()
    assert held() is None


def test_a_sampler_that_nobody_closed_gives_its_memory_back_when_nobody_holds_it(models):
    one = new_sampler(models("llama"), lora=random_lora(models("llama")))
    one.sample([SampleRequest(tokens=PROMPT, max_tokens=2)])
    held = weakref.ref(one._decoder())
    del one
    gc.collect()
    assert held() is None


def test_a_sampler_closed_just_before_its_weights_are_made_leaves_none_behind(models, sampler, monkeypatch):
    one = sampler(lora=random_lora(models("llama")))

    def closed_meanwhile(model):
        one.close()
        return True

    monkeypatch.setattr(scheduler, "is_supported", closed_meanwhile)
    with pytest.raises(EngineError, match="closed"):
        one.sample([SampleRequest(tokens=PROMPT, max_tokens=2)])
    assert len(snapshots_of(models("llama"))) == 0


def test_training_gets_its_turn_while_a_batch_is_sampled(sampler, monkeypatch):
    monkeypatch.setattr(scheduler, "SLICE_SECONDS", 0.0)
    lock, seen = FairLock(), []
    one = sampler(lock=lock)
    job = one.job(SampleRequest(tokens=PROMPT, max_tokens=100), seen.append, seen.append)
    waiting, began = [job], threading.Event()

    def feed(room):
        began.set()
        return [waiting.pop()] if waiting else []

    def train():
        began.wait()
        with lock:
            seen.append("trained")

    trainer = threading.Thread(target=train)
    trainer.start()
    one.serve(feed)
    trainer.join()
    assert seen[0] == "trained" and len(seen[1].sequences[0].tokens) == 100


def test_what_training_saved_is_what_sampling_uses(engine, tmp_path):
    """Through the engine: the sampler's logprobs are those that the trained adapter reports."""
    adapter = engine.create_adapter(LoraSettings(rank=4, seed=3, train_unembed=True))
    zeros = {"target_tokens": torch.arange(20).numpy(), "weights": torch.ones(20).numpy()}
    for _ in range(3):
        adapter.forward_backward([TrainingDatum(tokens=list(range(1, 21)), inputs=zeros)], "cross_entropy")
        adapter.optim_step(AdamParams(learning_rate=0.02))
    adapter.save_weights(tmp_path / "weights")
    sampler = engine.load_sampler(tmp_path / "weights")
    row = sampler.sample([SampleRequest(tokens=PROMPT, max_tokens=10, seed=0, end_of_text=False)])[0].sequences[0]
    whole = PROMPT + row.tokens
    inputs = {"target_tokens": torch.tensor(whole[1:]).numpy(), "weights": torch.ones(len(whole) - 1).numpy()}
    told = adapter.forward([TrainingDatum(tokens=whole[:-1], inputs=inputs)], "cross_entropy").logprobs[0]
    assert row.logprobs == pytest.approx(told[len(PROMPT) - 1 :].tolist(), abs=1e-4)
