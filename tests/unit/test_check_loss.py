"""`check_loss`: a custom loss's gradient on the mock and on the local engine."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from evsys_sdk.algorithms.dpo import REFERENCE, dpo_loss
from evsys_sdk.backends.local import LocalBackend
from evsys_sdk.testing import check_loss
from evsys_sdk.training_api import Datum, ModelInput, TensorData

ROWS = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
    for asked, said in (("2+2?", "four"), ("red?", "yes it is"), ("x", "y"))
]


def weights(datum):
    return datum.loss_fn_inputs["weights"].to_torch()


def cross_entropy(data, logprobs):
    return -sum((weights(d).to(lp) * lp).sum() for d, lp in zip(data, logprobs, strict=True)), {"n": len(data)}


def focal(data, logprobs):
    every = zip(data, logprobs, strict=True)
    return -sum((weights(d).to(lp) * (1 - lp.exp()) ** 2 * lp).sum() for d, lp in every), {}


def mean(data, logprobs):
    return cross_entropy(data, logprobs)[0] / len(data), {}


@pytest.fixture(params=["mock", "local"])
def where(request):
    if request.param == "mock":
        return {}
    return {"backend": LocalBackend(threads=1, dtype="float32"), "model_name": "tiny-random"}


@pytest.mark.parametrize(("loss", "adds_up"), [(cross_entropy, True), (focal, True), (mean, False)])
def test_a_right_loss_passes_and_a_mean_is_seen_not_to_add_up(where, loss, adds_up):
    found = check_loss(loss, ROWS, **where)
    assert found.adds_up is adds_up
    assert found.gradient_error < 1e-6
    assert found.measured_change == pytest.approx(found.expected_change, rel=0.05)
    assert found.measured_change < 0 < found.loss


def test_pairs_are_kept_together():
    data = []
    for tokens in ([5, 6, 7, 8], [5, 9, 9, 3], [70, 71, 72], [70, 80, 81]):
        many = len(tokens) - 1
        inputs = {
            "target_tokens": TensorData(tokens[1:], "int64"),
            "weights": TensorData([1.0] * many),
            REFERENCE: TensorData([-5.0] * many),
        }
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    found = check_loss(dpo_loss(beta=0.5, label_smoothing=0.0, pairs=2), data, keep_together=2)
    assert found.adds_up and set(found.metrics) >= {"margin", "accuracy"}


def test_a_loss_that_cuts_its_gradient_is_found(where):
    def cut(data, logprobs):
        return cross_entropy(data, [lp.detach() * lp for lp in logprobs])

    with pytest.raises(AssertionError, match="autograd's slopes differ"):
        check_loss(cut, ROWS, **where)


def test_a_loss_that_is_not_the_same_twice_is_found():
    calls = []

    def drifting(data, logprobs):
        calls.append(1)
        loss, metrics = cross_entropy(data, logprobs)
        return loss * len(calls), metrics

    with pytest.raises(AssertionError, match="keeps something from call to call"):
        check_loss(drifting, ROWS)


def test_a_loss_without_a_gradient_is_found():
    with pytest.raises(AssertionError, match="the gradient is zero"):
        check_loss(lambda data, logprobs: (sum((lp * 0).sum() for lp in logprobs), {}), ROWS)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(("factor", "said"), [(float("nan"), "the loss is nan"), (float("inf"), "the loss is inf")])
def test_a_loss_that_is_not_finite_is_called_so(where, factor, said):
    with pytest.raises(AssertionError, match=said):
        check_loss(lambda data, logprobs: (cross_entropy(data, logprobs)[0] * factor, {}), ROWS, **where)


def test_a_gradient_that_is_not_finite_is_called_so(where):
    def rooted(data, logprobs):
        loss, metrics = cross_entropy(data, logprobs)
        return loss + ((loss - loss.detach()) ** 2).sqrt(), metrics

    with pytest.raises(AssertionError, match="gradient's norm is nan"):
        check_loss(rooted, ROWS, **where)


def test_a_loss_in_numpy_is_refused_by_the_backend(where):
    from evsys_sdk.errors import BackendError

    with pytest.raises(BackendError, match="custom loss"):
        check_loss(lambda data, logprobs: (torch.tensor(1.0), {}), ROWS, **where)


@pytest.mark.parametrize("metrics", [{"kl": "high"}, {"kl": None}, {"kl": torch.ones(2)}, [0.1]])
def test_metrics_that_are_no_numbers_are_named(where, metrics):
    from evsys_sdk.errors import BackendError

    with pytest.raises(BackendError, match=r"metric 'kl' of the custom loss must be one number|a mapping as metrics"):
        check_loss(lambda data, logprobs: (cross_entropy(data, logprobs)[0], metrics), ROWS, **where)
