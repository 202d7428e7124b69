"""Drawing from the mock's model."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from evsys_sdk.backends.mock_tokenizer import END_OF_TEXT, IM_START
from evsys_sdk.errors import BackendError
from evsys_sdk.training_api import Datum, ModelInput, SamplingParams, TensorData, text_of

PROMPT = ModelInput.from_ints([IM_START, *b"user\nhello", IM_START, *b"assistant\n"])


@pytest.fixture
async def sampler(service):
    return await service.create_sampling_client()


@pytest.fixture
async def taught(service, imitate, learn):
    """A sampler that answers `sky` with a known sentence, and its prompt."""
    client = await service.create_training_client(rank=8, seed=1)
    await learn(client, [imitate("sky", "it is blue\nQ: next")], steps=30)
    sampler = await service.create_sampling_client(await client.save_weights_for_sampler("x"))
    chat = [{"role": "user", "content": "sky"}]
    prompt = service.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True)
    return sampler, ModelInput.from_ints(prompt)


async def _one(sampler, prompt, **params):
    return (await sampler.sample(prompt, 1, SamplingParams(**params))).sequences[0]


async def test_what_was_taught_is_said_greedily_and_ends_with_the_end_of_the_turn(service, taught):
    sequence = await _one(*taught, temperature=0.0)
    tokenizer = service.get_tokenizer()
    assert text_of(sequence.tokens, tokenizer) == "it is blue\nQ: next"
    assert sequence.tokens[-1] == tokenizer.eos_token_id and sequence.stop_reason == "stop"


async def test_a_temperature_near_zero_is_zero(sampler):
    cold = await _one(sampler, PROMPT, temperature=1e-320, seed=1, max_tokens=8)
    assert cold == await _one(sampler, PROMPT, temperature=0.0, max_tokens=8)


async def test_a_completion_that_uses_up_its_length_says_so(taught):
    sequence = await _one(*taught, temperature=0.0, max_tokens=5)
    assert bytes(sequence.tokens) == b"it is" and sequence.stop_reason == "length"


async def test_a_stop_string_ends_the_completion_and_is_not_part_of_it(taught):
    sequence = await _one(*taught, temperature=0.0, stop=("\nQ:", "never"))
    assert bytes(sequence.tokens) == b"it is blue" and sequence.stop_reason == "stop"
    assert len(sequence.logprobs) == len(sequence.tokens)


async def test_a_stop_id_ends_the_completion_as_its_last_token(taught):
    sequence = await _one(*taught, temperature=0.0, stop=(ord("b"),))
    assert bytes(sequence.tokens) == b"it is b"


async def test_a_mark_given_as_a_stop_string_is_cut_off(taught):
    sequence = await _one(*taught, temperature=0.0, stop=("<|im_end|>",))
    assert bytes(sequence.tokens) == b"it is blue\nQ: next"


async def test_the_same_seed_repeats_and_another_differs(sampler):
    first, again, other = [await sampler.sample(PROMPT, 2, SamplingParams(seed=seed)) for seed in (1, 1, 2)]
    assert first == again and first != other


async def test_no_seed_draws_afresh(sampler):
    assert await sampler.sample(PROMPT, 1, SamplingParams()) != await sampler.sample(PROMPT, 1, SamplingParams())


async def test_a_rows_draw_does_not_depend_on_its_batch_mates(sampler):
    params = SamplingParams(seed=7, max_tokens=200)
    many = (await sampler.sample(PROMPT, 16, params)).sequences
    for count in (1, 3, 10):
        assert (await sampler.sample(PROMPT, count, params)).sequences == many[:count]
    assert len({tuple(sequence.tokens) for sequence in many}) == 16


async def test_a_mate_that_ends_early_changes_nothing_for_the_others(sampler):
    free = (await sampler.sample(PROMPT, 12, SamplingParams(seed=7, max_tokens=80))).sequences
    stop = free[0].tokens[2]
    stopped = (await sampler.sample(PROMPT, 12, SamplingParams(seed=7, max_tokens=80, stop=(stop,)))).sequences
    for whole, cut in zip(free, stopped, strict=True):
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else len(whole.tokens)
        assert cut.tokens == whole.tokens[:end]


async def test_logprobs_of_sampled_tokens_are_the_models_own_whatever_the_temperature(sampler):
    for params in (
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=0.3),
        SamplingParams(seed=1, temperature=2.0, top_k=5, top_p=0.5),
    ):
        for sequence in (await sampler.sample(PROMPT, 3, params)).sequences:
            whole = ModelInput.from_ints(PROMPT.to_ints() + sequence.tokens)
            assert sequence.logprobs == pytest.approx((await sampler.compute_logprobs(whole))[PROMPT.length :])


async def test_token_by_token_context_is_the_same_as_the_whole_sequences(service, learn):
    """Also after the model itself has opened new turns, which changes what it looks at."""
    client = await service.create_training_client(rank=8, seed=1)
    tokens = [IM_START, *b"user\nab cd", IM_START, *b"bot\nxy", IM_START, *b"user\nef gh", END_OF_TEXT]
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData([1.0] * (len(tokens) - 1))}
    await learn(client, [Datum(ModelInput.from_ints(tokens[:-1]), inputs)], steps=40)
    sampler = await service.create_sampling_client(await client.save_weights_for_sampler("x"))
    sequence = await _one(sampler, ModelInput.from_ints(tokens[:6]), temperature=0.0)
    assert sequence.tokens == tokens[6:]
    whole = await sampler.compute_logprobs(ModelInput.from_ints(tokens[:6] + sequence.tokens))
    assert sequence.logprobs == pytest.approx(whole[6:], abs=1e-6)


async def test_draws_follow_the_models_probabilities(sampler):
    """A thousand first tokens: the likeliest ones occur as often as they should, within four deviations."""
    params = SamplingParams(seed=3, max_tokens=1)
    n = 1000
    drawn = Counter(s.tokens[0] for s in (await sampler.sample(PROMPT, n, params)).sequences)
    longer = ModelInput.from_ints([*PROMPT.tokens, 0])
    top = (await sampler.sample(longer, 1, params, topk_prompt_logprobs=20)).topk_prompt_logprobs[-1]
    for token, logprob in top:
        p = math.exp(logprob)
        assert abs(drawn[token] - n * p) < 4 * math.sqrt(n * p * (1 - p)) + 1


async def test_top_k_and_top_p_leave_only_the_likeliest(sampler):
    longer = ModelInput.from_ints([*PROMPT.tokens, 0])
    top = (await sampler.sample(longer, 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=259)).topk_prompt_logprobs
    ranked = top[-1]
    draws = await sampler.sample(PROMPT, 300, SamplingParams(max_tokens=1, seed=1, top_k=3))
    assert {s.tokens[0] for s in draws.sequences} == {token for token, _ in ranked[:3]}
    nucleus, mass = set(), 0.0
    for token, logprob in ranked:
        nucleus.add(token)
        mass += math.exp(logprob)
        if mass >= 0.2:
            break
    draws = await sampler.sample(PROMPT, 500, SamplingParams(max_tokens=1, seed=1, top_p=0.2))
    assert {s.tokens[0] for s in draws.sequences} == nucleus


async def test_prompt_logprobs_have_the_prompts_length_and_no_first(sampler):
    output = await sampler.sample(
        PROMPT, 1, SamplingParams(seed=1), include_prompt_logprobs=True, topk_prompt_logprobs=2
    )
    assert len(output.prompt_logprobs) == PROMPT.length and output.prompt_logprobs[0] is None
    assert output.prompt_logprobs == await sampler.compute_logprobs(PROMPT)
    assert output.topk_prompt_logprobs[0] is None
    assert all(len(best) == 2 and best[0][1] >= best[1][1] for best in output.topk_prompt_logprobs[1:])


async def test_prompt_logprobs_come_only_when_asked_for(sampler):
    output = await sampler.sample(PROMPT, 1, SamplingParams(seed=1))
    assert output.prompt_logprobs is None and output.topk_prompt_logprobs is None


async def test_the_logprob_of_a_prompt_token_is_that_of_training(service, sampler, imitate):
    """compute_logprobs and forward_backward speak of the same model."""
    client = await service.create_training_client(rank=8, seed=1)
    datum = imitate("q", "an answer")
    trained = (await client.forward_backward([datum], "cross_entropy")).logprobs[0]
    snapshot = await service.create_sampling_client(await client.save_weights_for_sampler("x"))
    tokens = [*datum.model_input.tokens, datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    assert (await snapshot.compute_logprobs(ModelInput.from_ints(tokens)))[1:] == pytest.approx(trained)


async def test_later_training_does_not_change_a_snapshot(service, imitate, learn):
    client = await service.create_training_client(rank=8, seed=1)
    data = [imitate("sky", "blue")]
    await learn(client, data, steps=2)
    snapshot = await service.create_sampling_client(await client.save_weights_for_sampler("x"))
    before = await snapshot.compute_logprobs(data[0].model_input)
    await learn(client, data, steps=5)
    assert await snapshot.compute_logprobs(data[0].model_input) == before
    later = await service.create_sampling_client(await client.save_weights_for_sampler("x"))
    assert await later.compute_logprobs(data[0].model_input) != before


async def test_the_untrained_model_is_there_without_a_path(service, imitate):
    """It mostly writes readable characters and comes to an end by itself now and then."""
    sampler = await service.create_sampling_client()
    sequences = (await sampler.sample(PROMPT, 50, SamplingParams(seed=1, max_tokens=200))).sequences
    tokens = [token for sequence in sequences for token in sequence.tokens]
    assert sum(32 <= token < 127 for token in tokens) > 0.8 * len(tokens)
    assert sum(sequence.stop_reason == "stop" for sequence in sequences) > 25


@pytest.mark.parametrize(
    ("prompt", "count", "params", "said"),
    [
        ([], 1, {}, "prompt is empty"),
        ([999], 1, {}, "prompt has token 999"),
        ([1], 0, {}, "num_samples is 0"),
        ([1], 1, {"max_tokens": 0}, "max_tokens is 0"),
        ([1], 1, {"temperature": -1.0}, r"temperature is -1\.0"),
        ([1], 1, {"temperature": float("inf")}, "temperature is inf"),
        ([1], 1, {"top_p": 0.0}, r"top_p is 0\.0"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_when_awaited(sampler, prompt, count, params, said):
    call = sampler.sample(ModelInput.from_ints(prompt), count, SamplingParams(**params))
    with pytest.raises(BackendError, match=said):
        await call
