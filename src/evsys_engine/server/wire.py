"""Between bytes on the wire and the engine's words.

In: protobuf messages and request bodies. Out: `TrainingDatum`, `SampleRequest`, and the answers as bytes. What a
client can get wrong is a `BadRequest` here or in the engine, always before anything has been changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from evsys_engine.server.schema import FLOAT32, INT32, INT64, STOP_REASONS, message
from evsys_engine.types import Array, BadRequest, LossOutput, SampleResult, TrainingDatum

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
    data = [_read_datum(datum, index, max_elements) for index, datum in enumerate(request.data)]
    return data, _read_loss_config(request)


def _read_loss_config(request: Any) -> dict[str, float]:
    if not request.loss_fn_config_v2:  # clients before 0.30 send the plain map alone
        return dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if value.text:
            raise BadRequest(f"loss_fn_config[{name!r}] is the text {value.text!r}; this server's losses take numbers")
    return {name: value.number for name, value in request.loss_fn_config_v2.items()}


def _read_datum(datum: Any, index: int, max_elements: int) -> TrainingDatum:
    try:
        tokens = [token for chunk in datum.model_input for token in _read_chunk(chunk)]
        inputs = {name: _read_input(name, tensor, max_elements) for name, tensor in datum.loss_fn_inputs.items()}
    except ValueError as exc:
        raise BadRequest(f"data[{index}]: {exc}") from exc
    return TrainingDatum(tokens=tokens, inputs=inputs)


def _read_chunk(chunk: Any) -> list[int]:
    if not chunk.HasField("encoded_text"):
        raise ValueError("model_input has a chunk that is not text; this server takes tokens only")
    tokens: list[int] = np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    return tokens


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
    if tensor.HasField("sparse_csr"):
        return _spread_out(tensor.sparse_csr, dtype, shape)
    array = np.frombuffer(tensor.dense, dtype=dtype).copy()  # torch wants memory it may write to
    return array.reshape(shape) if shape else array


def _spread_out(csr: Any, dtype: Any, shape: tuple[int, ...]) -> Array:
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
    for trailing, arrays in _runs_of_equal_width(output.logprobs):
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        _write_batch(record.fields["logprobs"], arrays, trailing)
    for name, value in output.metrics.items():
        answer.metrics[_with_reduction(name)] = float(value)
    return bytes(answer.SerializeToString())


def _runs_of_equal_width(arrays: Sequence[Array]) -> Iterator[tuple[tuple[int, ...], list[Array]]]:
    """One record holds arrays of one width only: neighbours [T] together, neighbours [T, K] of one K together."""
    for trailing, run in groupby(arrays, key=lambda array: tuple(array.shape[1:])):
        yield trailing, list(run)


def _write_batch(batch: Any, arrays: list[Array], trailing: tuple[int, ...]) -> None:
    packed = [np.ascontiguousarray(array, dtype=np.float32).tobytes() for array in arrays]
    batch.data = b"".join(packed)
    batch.offsets = np.cumsum([0, *map(len, packed)], dtype=np.int64).tobytes()
    batch.dtype = FLOAT32
    batch.trailing_shape.extend(trailing)


def _with_reduction(name: str) -> str:
    """The client folds the metrics of a batch sent in pieces by the word after the colon, and fails without one."""
    return name if name.count(":") == 1 else f"{name.replace(':', '_')}:mean"


def write_sample_result(result: SampleResult, *, last_n: int | None = None) -> bytes:
    """`last_n`: prompt logprobs of earlier tokens are left out."""
    answer = message("SampleResponse")
    for row in result.rows:
        answer.sequences.add(
            stop_reason=STOP_REASONS[row.stop_reason],
            tokens=np.asarray(row.tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(row.logprobs, dtype=np.float32).tobytes(),
        )
    if result.prompt_logprobs is not None:
        known = [math.nan if value is None else value for value in _tail(result.prompt_logprobs, last_n)]
        answer.prompt_logprobs = np.asarray(known, dtype=np.float32).tobytes()
    if result.topk_prompt_logprobs is not None:
        _write_topk(answer.topk_prompt_logprobs, _tail(result.topk_prompt_logprobs, last_n))
    return bytes(answer.SerializeToString())


def _tail(values: list[Any], last_n: int | None) -> list[Any]:
    cut = 0 if last_n is None else len(values) - last_n
    return [None] * cut + values[cut:]


def _write_topk(topk: Any, rows: list[list[tuple[int, float]] | None]) -> None:
    width = max((len(row) for row in rows if row), default=0)
    tokens = np.full((len(rows), width), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((len(rows), width), NO_LOGPROB, dtype=np.float32)
    for place, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row or ()):
            tokens[place, rank], logprobs[place, rank] = token, logprob
    topk.token_ids, topk.logprobs = tokens.tobytes(), logprobs.tobytes()
    topk.k, topk.length = width, len(rows)
