"""The named losses: the same numbers over torch and numpy, so that a recipe does not care where it runs."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from evsys_engine.losses import LOSSES, get_loss, settings_of
from evsys_engine.types import BadRequest
from evsys_sdk.backends.local import LocalBackend
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.backends.tinker import Lack


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_slope_are_the_same_over_torch_and_numpy(name):
    chance = np.random.default_rng(3)
    arrays = {
        "weights": chance.normal(size=200),
        "logprobs": -chance.gamma(2.0, size=200),
        "advantages": chance.normal(size=200),
    }
    logp = arrays["logprobs"] + chance.normal(0, 0.4, 200)
    given = {key: arrays[key] for key in LOSSES[name].inputs}
    tensors = {key: torch.tensor(value) for key, value in given.items()}
    loss, slope = LOSSES[name].fn(torch, torch.tensor(logp), **tensors, **LOSSES[name].config)
    expected, expected_slope = LOSSES[name].fn(np, logp, **given, **LOSSES[name].config)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(slope.numpy(), expected_slope, rtol=1e-12)


def test_every_backend_offers_every_loss():
    assert LocalBackend().offers().losses == MockBackend().offers().losses == set(LOSSES)
    assert set(LOSSES) - set(get_args(Lack)) == {"cross_entropy"}, "a server may lack any loss but cross_entropy"


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].silent_where_zero])
def test_a_token_whose_weight_is_zero_neither_costs_nor_pulls(name):
    loss = LOSSES[name]
    given = {key: torch.tensor([0.0 if key == loss.silent_where_zero else -1.0]) for key in loss.inputs}
    cost, slope = loss.fn(torch, torch.tensor([-2.0]), **given, **loss.config)
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
