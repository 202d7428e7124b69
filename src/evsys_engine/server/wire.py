"""Between bytes on the wire and the engine's words.

In: protobuf messages and request bodies. Out: `TrainingDatum`, `SampleRequest`, and the answers as bytes. What a
client can get wrong is a `BadRequest` here or in the engine, always before anything has been changed.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from evsys_engine.types import Array, BadRequest, LossOutput, SampleOutput, TrainingDatum

# The protocol's protobuf messages, as far as this server reads or writes them.
#
# In: the table below. Out: message classes (`ForwardBackwardRequest()`, ...) made by the `protobuf` library. The
# table repeats field numbers of Tinker's public schema, so the server needs no `tinker` package; fields it does not
# name are skipped when read. A test compares every row with the schema inside the installed client.


# name: (number, type); "*" repeats, "map" is string -> type. Enums travel as int32.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum *"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "double map"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "LossConfigValue map"),
    },
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "Datum": {"model_input": (1, "Chunk *"), "loss_fn_inputs": (2, "Tensor map")},
    # Pictures and sound are recognised in order to be refused; what is in them is not read.
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "ImageChunk"), "dmel": (3, "DmelChunk")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "ImageChunk": {},
    "DmelChunk": {},
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "SparseCsr"),
        "dtype": (3, "int32"),
        "shape": (4, "int64 *"),
    },
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord *"),
        "metrics": (3, "double map"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "BatchedTensor map"), "num_datums": (3, "int64")},
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "int64 *"),
    },
    "SampleResponse": {
        "sequences": (1, "SampledSequence *"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
    },
    "SampledSequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "uint32"),
        "length": (4, "uint32"),
    },
}

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of the schema's `DType`."""
STOP_REASONS = {"stop": 0, "length": 1}


def message(name: str) -> Any:
    """An empty message of the named kind."""
    return _classes()[name]()


@cache
def _classes() -> dict[str, Any]:
    # A pool of our own: the client's schema may be loaded in the same process under the same names.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="evsys_engine.proto", package="evsys_engine", syntax="proto3")
    for name, fields in MESSAGES.items():
        message_type = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            kind, _, many = kind.partition(" ")
            if many == "map":  # protobuf's own form of a map: repeated entries of a nested message
                entry = message_type.nested_type.add(name="".join(word.title() for word in field.split("_")) + "Entry")
                entry.options.map_entry = True
                _add_field(entry, "key", 1, "string")
                _add_field(entry, "value", 2, kind)
                kind = f"{name}.{entry.name}"
            _add_field(message_type, field, number, kind, repeated=bool(many))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(found[name]) for name in MESSAGES}


def _add_field(message_type: Any, name: str, number: int, kind: str, *, repeated: bool = False) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

    field = message_type.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
    if kind[0].isupper():
        field.type, field.type_name = Field.TYPE_MESSAGE, f".evsys_engine.{kind}"
    else:
        field.type = Field.Type.Value(f"TYPE_{kind.upper()}")


PROTOBUF = "application/x-protobuf"
NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""How the protocol fills an empty place in a top-k matrix."""

_DTYPES: dict[int, Any] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}


def parse_training_request(body: bytes) -> Any:
    """The protobuf request, its tensors still packed."""
    from google.protobuf.message import DecodeError

    request = message("ForwardBackwardRequest")
    try:
        request.ParseFromString(body)
    except DecodeError as exc:
        raise BadRequest("the body is not a ForwardBackwardRequest") from exc
    return request


def read_call_number(body: bytes) -> tuple[str, int] | None:
    """`(model_id, seq_id)` of a training request that was refused, even if only its beginning was read.

    The two are fields 1 and 2, and every protobuf library writes fields in the order of their numbers.
    """
    if len(body) < 2 or body[0] != 0x0A or body[1] >= 0x80:  # field 1, a string of less than 128 bytes
        return None
    end = 2 + body[1]
    if body[end : end + 1] != b"\x10":  # field 2, a varint: 7 bits per byte, the lowest first
        return None
    number = 0
    for place, byte in enumerate(body[end + 1 : end + 6]):
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return body[2:end].decode("utf-8", "replace"), number
    return None


def read_training_data(request: Any, max_elements: int) -> tuple[list[TrainingDatum], dict[str, float]]:
    """The batch and the loss settings of a request."""
    data = []
    for index, datum in enumerate(request.data):
        try:
            tokens: list[int] = []
            for chunk in datum.model_input:
                if not chunk.HasField("encoded_text"):
                    raise ValueError("model_input has a chunk that is not text; this server takes tokens only")
                tokens += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
            inputs = {name: _read_input(name, tensor, max_elements) for name, tensor in datum.loss_fn_inputs.items()}
        except ValueError as exc:
            raise BadRequest(f"data[{index}]: {exc}") from exc
        data.append(TrainingDatum(tokens=tokens, inputs=inputs))
    # Clients before 0.30 send the plain map alone.
    config = {} if request.loss_fn_config_v2 else dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if value.text:
            raise BadRequest(f"loss_fn_config[{name!r}] is the text {value.text!r}; this server's losses take numbers")
        config[name] = value.number
    return data, config


def _read_input(name: str, tensor: Any, max_elements: int) -> Array:
    try:
        array = read_tensor(tensor, max_elements)
    except ValueError as exc:
        raise ValueError(f"loss_fn_inputs[{name!r}]: {exc}") from exc
    if name != "target_tokens":
        return array.astype(np.float32, copy=False)
    if array.dtype == np.float32:
        raise ValueError("loss_fn_inputs['target_tokens'] must hold int64 token ids, not floats")
    return array.astype(np.int64, copy=False)


def read_tensor(tensor: Any, max_elements: int) -> Array:
    """A dense array; a sparse one is spread out with zeros."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"dtype {tensor.dtype} is unknown; known: float32 (1), int64 (2), int32 (3)")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > max_elements:
        raise ValueError(f"shape {shape} is negative or has more than {max_elements} elements")
    if not tensor.HasField("sparse_csr"):
        array = np.frombuffer(tensor.dense, dtype=dtype).copy()  # torch wants memory it may write to
        return array.reshape(shape) if shape else array
    csr = tensor.sparse_csr
    values = np.frombuffer(csr.values, dtype=dtype)
    starts = np.frombuffer(csr.crow_indices, dtype=np.int64)
    columns = np.frombuffer(csr.col_indices, dtype=np.int64)
    if len(shape) != 2 or len(starts) != shape[0] + 1 or len(columns) != len(values):
        raise ValueError(f"a sparse tensor of shape {shape} does not fit its indices")
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(values) or (counts < 0).any():
        raise ValueError("the row pointers of a sparse tensor must rise from 0 to the number of values")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise ValueError(f"a sparse tensor of shape {shape} has a column outside it")
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def write_loss_output(output: LossOutput) -> bytes:
    answer = message("ForwardBackwardOutput")
    answer.loss_fn_output_type = "ArrayRecord"
    # One record holds arrays of one width only: neighbours [T] together, neighbours [T, K] of one K together.
    for trailing, run in groupby(output.logprobs, key=lambda array: tuple(array.shape[1:])):
        packed = [np.ascontiguousarray(array, dtype=np.float32).tobytes() for array in run]
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(packed))
        batch = record.fields["logprobs"]
        batch.data = b"".join(packed)
        batch.offsets = np.cumsum([0, *map(len, packed)], dtype=np.int64).tobytes()
        batch.dtype = FLOAT32
        batch.trailing_shape.extend(trailing)
    for name, value in output.metrics.items():
        # The client folds the metrics of a batch sent in pieces by the word after the colon, and fails without one.
        answer.metrics[name if name.count(":") == 1 else f"{name.replace(':', '_')}:mean"] = float(value)
    return bytes(answer.SerializeToString())


def write_sample_result(result: SampleOutput, *, last_n: int | None = None) -> bytes:
    """`last_n`: prompt logprobs of earlier tokens are left out."""
    answer = message("SampleResponse")
    for row in result.sequences:
        answer.sequences.add(
            stop_reason=STOP_REASONS[row.stop_reason],
            tokens=np.asarray(row.tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(row.logprobs, dtype=np.float32).tobytes(),
        )
    if result.prompt_logprobs is not None:
        known = [math.nan if value is None else value for value in _tail(result.prompt_logprobs, last_n)]
        answer.prompt_logprobs = np.asarray(known, dtype=np.float32).tobytes()
    if result.topk_prompt_logprobs is not None:
        rows = _tail(result.topk_prompt_logprobs, last_n)
        width = max((len(row) for row in rows if row), default=0)
        tokens = np.full((len(rows), width), NO_TOKEN, dtype=np.int32)
        logprobs = np.full((len(rows), width), NO_LOGPROB, dtype=np.float32)
        for place, likeliest in enumerate(rows):
            for rank, (token, logprob) in enumerate(likeliest or ()):
                tokens[place, rank], logprobs[place, rank] = token, logprob
        topk = answer.topk_prompt_logprobs
        topk.token_ids, topk.logprobs = tokens.tobytes(), logprobs.tobytes()
        topk.k, topk.length = width, len(rows)
    return bytes(answer.SerializeToString())


def _tail[T](values: list[T | None], last_n: int | None) -> list[T | None]:
    # `bodies.read_sample` keeps `last_n` below the prompt's length: a negative cut would drop values.
    cut = 0 if last_n is None else len(values) - last_n
    return [None] * cut + values[cut:]
