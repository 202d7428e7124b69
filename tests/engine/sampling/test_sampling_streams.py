"""Random streams, and the choice of a token from logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from evsys_engine import sampler
from evsys_engine.sampler import STREAM_BLOCK, RowStream, Settings, TokenSampler, fresh_seed

CPU = torch.device("cpu")
PLAIN = Settings(1.0, -1, 1.0)


def pick(logits, settings, uniforms):
    return TokenSampler(settings, CPU).sample(logits, uniforms)[0]


def support(logits, settings, points):
    """Every token that some uniform number leads to."""
    uniforms = np.linspace(0, 1, points, endpoint=False).tolist()
    return set(pick(logits.expand(points, -1), [settings] * points, uniforms))


def kept_by_hand(logits, temperature, top_k, top_p):
    """Temperature, then top-k, then the fewest tokens that hold top_p."""
    order = (logits / temperature).softmax(-1).sort(descending=True)
    probs, tokens = order.values.double(), order.indices
    if top_k > 0:
        probs = probs[:top_k] / probs[:top_k].sum()
    count = int((probs.cumsum(-1) - probs < top_p - 1e-12).sum())
    return set(tokens[:count].tolist())


def test_a_stream_is_made_of_seed_and_row_alone():
    def numbers(seed, row):
        stream = RowStream(seed, row)
        return [stream.draw() for _ in range(STREAM_BLOCK + 5)]

    assert numbers(3, 1) == numbers(3, 1)
    assert len({tuple(numbers(seed, row)) for seed in (-3, 0, 1, 3, 2**70) for row in (0, 1, 3)}) == 15
    assert all(0 <= number < 1 for number in numbers(3, 1)) and len(set(numbers(3, 1))) == STREAM_BLOCK + 5
    assert fresh_seed() != fresh_seed()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.8])
def test_draws_follow_the_models_probabilities(temperature):
    torch.manual_seed(0)
    logits = torch.randn(300) * 2
    uniforms = ((np.arange(20000) + 0.5) / 20000).tolist()
    drawn = pick(logits.expand(20000, -1), [Settings(temperature, -1, 1.0)] * 20000, uniforms)
    shares = np.bincount(drawn, minlength=300) / 20000
    np.testing.assert_allclose(shares, (logits / temperature).softmax(-1).numpy(), atol=2e-4)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(1.0, 5, 1.0),
        Settings(0.7, 1, 1.0),
        Settings(1.0, -1, 0.5),
        Settings(1.5, 0, 0.8),
        Settings(1.0, 20, 0.6),
        Settings(1.0, -1, 1e-9),
        Settings(1.0, 10_000, 1.0),
    ],
)
def test_top_k_and_top_p_keep_what_they_say(settings):
    torch.manual_seed(1)
    logits = torch.randn(40) * 2.5
    expected = kept_by_hand(logits, settings.temperature, settings.top_k, settings.top_p)
    found = support(logits, settings, points=5000)
    rare = {token for token in expected if (logits / settings.temperature).softmax(-1)[token] < 1 / 2500}
    assert found - expected == set() and expected - found <= rare


def test_top_p_of_a_flat_distribution_reaches_beyond_the_first_candidates():
    torch.manual_seed(2)
    logits = torch.randn(4 * sampler.LIKELIEST) * 0.1
    kept = kept_by_hand(logits, 1.0, 0, 0.6)
    assert len(kept) > sampler.LIKELIEST
    floor = sampler.floors((logits - logits.max())[None], [Settings(1.0, -1, 0.6)])
    assert set(((logits - logits.max()) >= floor[0]).nonzero()[:, 0].tolist()) == kept


def test_each_row_has_its_own_settings():
    torch.manual_seed(3)
    logits = torch.randn(5, 300) * 2
    settings = [PLAIN, Settings(0.0, -1, 1.0), Settings(0.3, 3, 1.0), Settings(1.0, -1, 0.4), Settings(2.0, 7, 0.9)]
    together = pick(logits, settings, [0.3, 0.9, 0.5, 0.7, 0.1])
    alone = [pick(logits[i : i + 1], [settings[i]], [u])[0] for i, u in enumerate([0.3, 0.9, 0.5, 0.7, 0.1])]
    assert together == alone
    assert together[1] == int(logits[1].argmax())


def test_logprobs_are_the_models_own_whatever_the_settings():
    torch.manual_seed(4)
    logits = torch.randn(3, 300) * 4
    settings = [PLAIN, Settings(0.0, -1, 1.0), Settings(0.5, 4, 0.9)]
    tokens, logprobs = TokenSampler(settings, CPU).sample(logits, [0.2, 0.2, 0.2])
    truth = logits.double().log_softmax(-1)
    assert logprobs == pytest.approx([float(truth[i, token]) for i, token in enumerate(tokens)], abs=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_an_impossible_token_is_never_drawn(uniform):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 137], logits[0, 500] = 0.0, 0.0
    assert pick(logits, [PLAIN], [uniform]) in ([137], [500])
    assert pick(logits, [Settings(1.0, -1, 0.9)], [uniform]) in ([137], [500])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_told_apart_and_spoils_no_neighbour(poison):
    torch.manual_seed(6)
    good, bad = torch.randn(1, 500), torch.randn(1, 500)
    bad[0, 3] = poison
    for settings in (PLAIN, Settings(0.7, 5, 0.9), Settings(0.0, -1, 1.0)):
        tokens, logprobs = TokenSampler([settings] * 2, CPU).sample(torch.cat([bad, good]), [0.4, 0.4])
        assert math.isnan(logprobs[0])
        assert (tokens[1:], logprobs[1:]) == TokenSampler([settings], CPU).sample(good, [0.4])


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-45, 1e-39, 1e-38, 1e-10, 1e300, 1.7e308])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (-1, 0.9), (3, 5e-324)])
def test_an_odd_temperature_makes_no_nan_and_changes_nothing_for_a_neighbour(temperature, top_k, top_p):
    torch.manual_seed(7)
    logits = torch.randn(2, 500) * 4
    odd = Settings(temperature, top_k, top_p)
    tokens, logprobs = TokenSampler([odd, PLAIN], CPU).sample(logits, [0.6, 0.6])
    assert all(math.isfinite(logprob) for logprob in logprobs)
    assert (tokens[1], logprobs[1]) == tuple(found[0] for found in TokenSampler([PLAIN], CPU).sample(logits[1:], [0.6]))
    if temperature < 1:
        assert tokens[0] == int(logits[0].argmax())
