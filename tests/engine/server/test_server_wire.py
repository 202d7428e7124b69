"""Bytes in and out, against the schema and the converters inside the installed client."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evsys_engine.server import wire
from evsys_engine.server.bodies import SampleBody, read_body, read_sample
from evsys_engine.server.wire import FLOAT32, INT64, MESSAGES, message
from evsys_engine.types import BadRequest, LossOutput, SampledSequence, SampleOutput

MANY = 2**20


def test_every_message_is_numbered_as_in_the_clients_schema():
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2")
    for name, fields in MESSAGES.items():
        found = theirs.DESCRIPTOR.message_types_by_name[name].fields_by_name
        ours = message(name).DESCRIPTOR.fields_by_name
        for field, (number, kind) in fields.items():
            assert found[field].number == number, f"{name}.{field}"
            assert found[field].is_repeated == bool(kind.partition(" ")[2]), f"{name}.{field}"
            wire_kind = ours[field].type if found[field].enum_type is None else found[field].type
            assert found[field].type == wire_kind, f"{name}.{field}"


def test_what_the_client_packs_is_what_we_read():
    tinker = pytest.importorskip("tinker")
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

    targets = np.array([[3, 0, 0, 0, 0, 0], [0, 0, 4, 0, 0, 0]])
    datum = tinker.Datum(
        model_input=tinker.ModelInput(
            chunks=[tinker.EncodedTextChunk(tokens=[1]), tinker.EncodedTextChunk(tokens=[2**31 - 1])]
        ),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_torch_sparse(pytest.importorskip("torch").tensor(targets)),
            "weights": tinker.TensorData.from_numpy((targets / 8).astype(np.float32)),
        },
    )
    assert datum.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    inner = ForwardBackwardInput(data=[datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9})
    packed = forward_backward_request_to_proto(ForwardBackwardRequest(inner, "model", 7)).SerializeToString()
    request = wire.parse_training_request(packed)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("model", 7, "ppo")
    data, config = wire.read_training_data(request, MANY)
    assert data[0].tokens == [1, 2**31 - 1] and config == {"clip_low_threshold": 0.9}
    np.testing.assert_array_equal(data[0].inputs["target_tokens"], targets)
    np.testing.assert_array_equal(data[0].inputs["weights"], targets / 8)
    assert data[0].inputs["target_tokens"].dtype == np.int64 and data[0].inputs["weights"].dtype == np.float32


def test_what_we_pack_is_what_the_client_reads():
    pytest.importorskip("tinker")
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    logprobs = [np.arange(3.0), np.arange(8.0).reshape(4, 2), np.arange(6.0).reshape(2, 3), np.arange(2.0)]
    metrics = {"loss:sum": 1.5, "plain": 2.0, "a:b:c": 3.0, "nan:mean": math.nan}
    read = deserialize_forward_backward_output(wire.write_loss_output(LossOutput(metrics=metrics, logprobs=logprobs)))
    for out, expected in zip(read.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(out["logprobs"].to_numpy(), expected)
    assert read.metrics.pop("nan:mean") != read.metrics
    assert read.metrics == {"loss:sum": 1.5, "plain:mean": 2.0, "a_b_c:mean": 3.0}

    rows = [
        SampledSequence(tokens=[5, 6], logprobs=[-1.0, -2.0]),
        SampledSequence(tokens=[], logprobs=[], stop_reason="length"),
    ]
    topk = [None, [(3, -0.5), (4, -0.75)], [(0, -1.0)]]
    result = SampleOutput(sequences=rows, prompt_logprobs=[None, -0.5, -1.0], topk_prompt_logprobs=topk)
    read = deserialize_sample_response(wire.write_sample_result(result))
    assert [(row.tokens, row.stop_reason) for row in read.sequences] == [([5, 6], "stop"), ([], "length")]
    assert read.sequences[0].logprobs == [-1.0, -2.0]
    assert read.prompt_logprobs == [None, -0.5, -1.0] and read.topk_prompt_logprobs == topk
    read = deserialize_sample_response(wire.write_sample_result(result, last_n=1))
    assert read.prompt_logprobs == [None, None, -1.0] and read.topk_prompt_logprobs == [None, None, topk[2]]


def tensor(values, dtype=FLOAT32, shape=()):
    made = message("Tensor")
    made.dense, made.dtype = np.asarray(values, dtype=np.float32 if dtype == FLOAT32 else np.int64).tobytes(), dtype
    made.shape.extend(shape)
    return made


def sparse(values, starts, columns, shape):
    made = message("Tensor")
    made.dtype = INT64
    made.shape.extend(shape)
    made.sparse_csr.values = np.asarray(values, dtype=np.int64).tobytes()
    made.sparse_csr.crow_indices = np.asarray(starts, dtype=np.int64).tobytes()
    made.sparse_csr.col_indices = np.asarray(columns, dtype=np.int64).tobytes()
    return made


def cut_short():
    made = tensor([1.0, 2.0])
    made.dense = made.dense[:-1]
    return made


@pytest.mark.parametrize(
    "broken",
    [
        tensor([1.0, 2.0], shape=[3]),
        tensor([1.0, 2.0], shape=[-1, 2]),
        tensor([1.0], dtype=9),
        cut_short(),
        sparse([1], [0, 1], [0], [2**40, 2**40]),
        sparse([1], [0, 1, 1], [5], [2, 3]),
        sparse([1], [0, 1, 1], [-1], [2, 3]),
        sparse([1, 2], [0, 2], [0, 1], [2, 3]),
        sparse([1, 2], [0, 2, 1], [0, 1], [2, 3]),
        sparse([1, 2], [1, 1, 2], [0, 1], [2, 3]),
        sparse([1], [0, 1], [0], [1]),
    ],
    ids=range(11),
)
def test_a_broken_tensor_is_the_senders_mistake(broken):
    request = message("ForwardBackwardRequest")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], dtype=np.int32).tobytes()
    datum.loss_fn_inputs["weights"].CopyFrom(broken)
    with pytest.raises(BadRequest, match=r"data\[0\]: loss_fn_inputs\['weights'\]"):
        wire.read_training_data(request, MANY)


def test_token_ids_are_whole_numbers():
    request = message("ForwardBackwardRequest")
    request.data.add().loss_fn_inputs["target_tokens"].CopyFrom(tensor([1.5]))
    with pytest.raises(BadRequest, match="int64"):
        wire.read_training_data(request, MANY)


def sample(**changes):
    params = {"max_tokens": 4, **changes.pop("sampling_params", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]}
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": prompt, "sampling_params": params, **changes}
    return read_sample(SampleBody.model_validate(body), max_length=10)


def test_a_sample_request_is_read_whole():
    request = sample(num_samples=3, sampling_params={"stop": ["a", "b"], "seed": 2**65 + 1, "top_p": 0.5})
    assert request.tokens == [1, 2, 3] and request.num_samples == 3 and request.stop == ("a", "b")
    assert request.seed == (2**65 + 1) % 2**64 and request.top_p == 0.5 and not request.prompt_logprobs
    assert sample(sampling_params={"stop": "x"}).stop == ("x",)
    assert sample(sampling_params={"stop": [7, 8]}).stop == (7, 8)
    assert sample(sampling_params={"max_tokens": None}).max_tokens == 7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "'image'"),
        ({"prompt": {"chunks": [{"tokens": [1] * 11}]}}, "takes 10"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "between 1 and 2"),
    ],
)
def test_what_cannot_be_sampled_is_refused(change, said):
    with pytest.raises(BadRequest, match=said):
        sample(**change)


def test_everything_wrong_with_a_body_is_said_at_once():
    with pytest.raises(BadRequest) as refused:
        read_body(SampleBody, b'{"num_samples": 0, "prompt": {}, "sampling_session_id": "s"}')
    assert all(word in str(refused.value) for word in ("num_samples", "prompt.chunks", "seq_id"))
