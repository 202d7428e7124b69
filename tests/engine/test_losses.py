"""The engine's losses beside the SDK's numpy ones: the same numbers, so that a recipe does not care where it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evsys_engine.losses import LOSSES, get_loss, settings_of
from evsys_engine.types import LOSSES as NAMES
from evsys_engine.types import BadRequest
from evsys_sdk.training import losses as sdk


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_and_its_slope_are_those_of_the_sdk(name):
    chance = np.random.default_rng(3)
    arrays = {
        "weights": chance.normal(size=200),
        "logprobs": -chance.gamma(2.0, size=200),
        "advantages": chance.normal(size=200),
    }
    logp = arrays["logprobs"] + chance.normal(0, 0.4, 200)
    given = {key: arrays[key] for key in LOSSES[name].inputs}
    loss, slope = LOSSES[name].fn(
        torch.tensor(logp), **{key: torch.tensor(value) for key, value in given.items()}, **LOSSES[name].config
    )
    expected, expected_slope = sdk.LOSSES[name].fn(logp, **given, **sdk.LOSSES[name].config)
    assert float(loss.sum()) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(slope.numpy(), expected_slope, rtol=1e-12)


def test_names_inputs_and_defaults_are_those_of_the_sdk():
    assert set(LOSSES) == set(NAMES) == set(sdk.LOSSES)
    for name, loss in LOSSES.items():
        assert (loss.inputs, dict(loss.config)) == (sdk.LOSSES[name].inputs, dict(sdk.LOSSES[name].config))


@pytest.mark.parametrize("name", [name for name in NAMES if LOSSES[name].silent_where_zero])
def test_a_token_whose_weight_is_zero_neither_costs_nor_pulls(name):
    loss = LOSSES[name]
    given = {key: torch.tensor([0.0 if key == loss.silent_where_zero else -1.0]) for key in loss.inputs}
    cost, slope = loss.fn(torch.tensor([-2.0]), **given, **loss.config)
    assert float(cost) == 0 and float(slope) == 0


def test_an_unknown_loss_offers_the_nearest():
    with pytest.raises(BadRequest, match="'cross_entrop' is not a loss; closest: cross_entropy; known: cispo, cross"):
        get_loss("cross_entrop")


def test_a_setting_that_the_loss_does_not_have_is_refused():
    assert settings_of("ppo", {"clip_high_threshold": 1.5})["clip_high_threshold"] == 1.5
    with pytest.raises(BadRequest, match="config of ppo: 'clip_high' is not a setting"):
        settings_of("ppo", {"clip_high": 1.5})
    with pytest.raises(BadRequest, match="config of dro: beta must be a finite number, not nan"):
        settings_of("dro", {"beta": float("nan")})
