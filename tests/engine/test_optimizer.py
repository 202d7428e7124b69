"""Our AdamW beside torch's own."""

from __future__ import annotations

import pytest
import torch

from evsys_engine.optimizer import AdamW, Gradients, check_settings
from evsys_engine.types import AdamParams, BadRequest


def make_parameters():
    chance = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=chance) for name, shape in {"a": (4, 7), "b": (3,), "c": (2, 5)}.items()}


def gradients_for(step):
    chance = torch.Generator().manual_seed(100 + step)
    return [torch.randn(value.shape, generator=chance) for value in make_parameters().values()]


def summed(tensors):
    gradients = Gradients()
    gradients.add(tensors)
    return gradients


@pytest.mark.parametrize("clip", [0.0, 0.5, 1000.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torch(clip, decay):
    ours, theirs = make_parameters(), [torch.nn.Parameter(value) for value in make_parameters().values()]
    optimizer = AdamW(ours)
    reference = torch.optim.AdamW(theirs, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay, foreach=False)
    for step in range(5):
        rate = 0.1 / (step + 1)
        settings = AdamParams(
            learning_rate=rate, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=decay, grad_clip_norm=clip
        )
        norm = optimizer.step(summed(gradients_for(step)), settings)
        for parameter, grad in zip(theirs, gradients_for(step), strict=True):
            parameter.grad = grad
        expected = torch.nn.utils.clip_grad_norm_(theirs, clip or float("inf"))
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert norm == pytest.approx(float(expected), rel=1e-6)
    for value, parameter in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(value, parameter.detach(), rtol=1e-6, atol=1e-7)


def test_without_gradients_nothing_moves_not_even_by_momentum():
    parameters = make_parameters()
    optimizer = AdamW(parameters)
    optimizer.step(summed(gradients_for(0)), AdamParams(learning_rate=0.1))
    before = {name: value.clone() for name, value in parameters.items()}
    assert optimizer.step(Gradients(), AdamParams(learning_rate=0.1)) == 0.0
    assert optimizer.steps == 1 and all(torch.equal(value, before[name]) for name, value in parameters.items())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_reported_and_spoil_nothing(poison):
    parameters, grads = make_parameters(), gradients_for(0)
    grads[1][0] = poison
    optimizer = AdamW(parameters)
    norm = optimizer.step(summed(grads), AdamParams(learning_rate=0.1))
    assert not norm < float("inf") and optimizer.steps == 0
    assert all(torch.equal(value, make_parameters()[name]) for name, value in parameters.items())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rate": float("nan")}, "learning_rate must be a number of 0 or more, not nan"),
        ({"learning_rate": 0.1, "beta2": 1.0}, "beta2 must be below 1, not 1.0"),
        ({"learning_rate": 0.1, "grad_clip_norm": -1.0}, "grad_clip_norm must be a number of 0 or more, not -1.0"),
    ],
)
def test_settings_that_would_spoil_the_weights_are_refused(given, said):
    with pytest.raises(BadRequest, match=said):
        check_settings(AdamParams(**given))
