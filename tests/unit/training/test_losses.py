"""The named losses: their slopes against finite differences, and their refusals."""

from __future__ import annotations

import numpy as np
import pytest

from evsys_sdk.errors import BackendError
from evsys_sdk.training.losses import LOSSES, get_loss, read_inputs, read_targets, read_tokens, settings_of
from evsys_sdk.training_api import Datum, ModelInput, TensorData


def _world(name, seed=0, size=40):
    chance = np.random.default_rng(seed)
    inputs = {
        "weights": chance.normal(size=size),
        "logprobs": -chance.gamma(2.0, size=size),
        "advantages": chance.normal(size=size),
    }
    logp = inputs["logprobs"] + chance.normal(0, 0.4, size)
    return logp, {key: inputs[key] for key in LOSSES[name].inputs}


def _value(name, logp, inputs):
    return LOSSES[name].fn(np, logp, **inputs, **LOSSES[name].config)[0].sum()


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_the_slope_is_what_finite_differences_say(name):
    logp, inputs = _world(name)
    _, slope = LOSSES[name].fn(np, logp, **inputs, **LOSSES[name].config)
    for index in range(len(logp)):
        bump = np.zeros_like(logp)
        bump[index] = 1e-6
        numeric = (_value(name, logp + bump, inputs) - _value(name, logp - bump, inputs)) / 2e-6
        assert slope[index] == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_the_slope_of_cispo_holds_the_ratio_constant():
    logp, inputs = _world("cispo")
    _, slope = LOSSES["cispo"].fn(np, logp, **inputs, **LOSSES["cispo"].config)
    held = np.exp(logp - inputs["logprobs"]).clip(0.8, 1.2)

    def with_ratio_held(values):
        return -(held * values * inputs["advantages"]).sum()

    for index in range(len(logp)):
        bump = np.zeros_like(logp)
        bump[index] = 1e-6
        numeric = (with_ratio_held(logp + bump) - with_ratio_held(logp - bump)) / 2e-6
        assert slope[index] == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_ppo_stops_pulling_where_the_ratio_left_the_clip_range():
    logp, old = np.log(np.array([0.5, 0.5])), np.log(np.array([0.25, 0.25]))  # ratio 2
    _, slope = LOSSES["ppo"].fn(
        np, logp, logprobs=old, advantages=np.array([1.0, -1.0]), clip_low_threshold=0.8, clip_high_threshold=1.2
    )
    assert slope.tolist() == [0.0, 2.0]  # a gain is capped, a loss is not


def test_losses_are_sums_not_means():
    logp = np.full(10, -2.0)
    assert LOSSES["cross_entropy"].fn(np, logp, weights=np.ones(10))[0].sum() == pytest.approx(20.0)


def test_an_unknown_loss_names_the_known_ones():
    with pytest.raises(BackendError, match="'cross_entrop' is not a loss; closest: cross_entropy; known: cispo, cross"):
        get_loss("cross_entrop")


def test_settings_override_defaults_and_a_misspelt_one_is_refused():
    assert settings_of("ppo", {"clip_high_threshold": 1.5}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    with pytest.raises(BackendError, match="loss_fn_config of ppo: 'clip_high' is not a setting"):
        settings_of("ppo", {"clip_high": 1.5})


def _datum(tokens, **inputs):
    return Datum(ModelInput.from_ints(tokens), inputs)


def test_targets_of_another_length_name_the_datum():
    datum = _datum([1, 2, 3], target_tokens=TensorData([1, 2], "int64"))
    with pytest.raises(BackendError, match=r"datum 4: target_tokens has shape \(2,\) but model_input has 3 tokens"):
        read_targets(datum, 4, 10)


def test_weights_of_another_length_name_the_datum_and_both_shapes():
    datum = _datum([1, 2], target_tokens=TensorData([1, 2], "int64"), weights=TensorData([1.0]))
    with pytest.raises(BackendError, match=r"datum 7: weights has shape \(1,\), target_tokens has \(2,\)"):
        read_inputs(datum, 7, "cross_entropy", (2,))


def test_a_missing_input_is_named():
    datum = _datum([1], target_tokens=TensorData([1], "int64"))
    with pytest.raises(BackendError, match="datum 0: loss_fn_inputs has no 'weights'; it has target_tokens"):
        read_inputs(datum, 0, "cross_entropy", (1,))


def test_an_input_that_the_loss_would_ignore_is_refused():
    datum = _datum([1], target_tokens=TensorData([1], "int64"), weights=TensorData([1.0]), mask=TensorData([0.0]))
    with pytest.raises(BackendError, match="cross_entropy does not read 'mask'; it reads weights"):
        read_inputs(datum, 0, "cross_entropy", (1,))


@pytest.mark.parametrize(("tokens", "said"), [([3, 10], "token 10; the vocabulary ends at 9"), ([-1], "token -1")])
def test_a_token_out_of_range_is_named(tokens, said):
    with pytest.raises(BackendError, match=f"prompt has {said}"):
        read_tokens(tokens, "prompt", 10)


def test_tokens_that_are_no_whole_numbers_are_refused():
    with pytest.raises(BackendError, match="prompt must hold whole numbers"):
        read_tokens([1.0, 2.0], "prompt", 10)
