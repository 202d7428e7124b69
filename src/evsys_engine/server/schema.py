"""The protocol's protobuf messages, as far as this server reads or writes them.

In: the table below. Out: message classes (`ForwardBackwardRequest()`, ...) made by the `protobuf` library. The table
repeats field numbers of Tinker's public schema, so the server needs no `tinker` package; fields it does not name are
skipped when read. A test compares every row with the schema inside the installed client.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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
        _describe(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(found[name]) for name in MESSAGES}


def _describe(message_type: Any, fields: dict[str, tuple[int, str]]) -> None:
    for name, (number, kind) in fields.items():
        kind, _, many = kind.partition(" ")
        if many == "map":
            kind = f"{message_type.name}.{_add_map_entry(message_type, name, kind)}"
        _add_field(message_type, name, number, kind, repeated=bool(many))


def _add_map_entry(message_type: Any, field: str, kind: str) -> str:
    entry = message_type.nested_type.add(name="".join(word.title() for word in field.split("_")) + "Entry")
    entry.options.map_entry = True
    _add_field(entry, "key", 1, "string")
    _add_field(entry, "value", 2, kind)
    return str(entry.name)


def _add_field(message_type: Any, name: str, number: int, kind: str, *, repeated: bool = False) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

    field = message_type.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
    if kind[0].isupper():
        field.type, field.type_name = Field.TYPE_MESSAGE, f".evsys_engine.{kind}"
    else:
        field.type = Field.Type.Value(f"TYPE_{kind.upper()}")
