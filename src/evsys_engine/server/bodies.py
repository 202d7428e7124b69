"""What clients send as JSON, checked.

In: bytes. Out: one record per kind of request. Keys this server does not know are left alone, so that a newer client
that says more is still understood.
"""

from __future__ import annotations

import hashlib
import json
import math

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import PydanticSerializationError

from evsys_engine.types import AdamParams, BadRequest, JsonObject, SampleRequest

SEED_BITS = 2**64
LONGEST_TTL = 100 * 366 * 86400
"""Seconds that a checkpoint may be kept: a hundred years. A date has no room for 1e12."""


class CreateSession(BaseModel):
    user_metadata: JsonObject | None = None
    display_name: str | None = None


class SessionCall(BaseModel):
    session_id: str


class LoraConfig(BaseModel):
    rank: int = Field(default=32, ge=0, le=1024)
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class OptimizerConfig(BaseModel):
    type: str = "adamw"


class CreateModel(BaseModel):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: JsonObject | None = None


class ModelCall(BaseModel):
    """A call on a model; its number says when it is due."""

    model_id: str
    seq_id: int | None = Field(default=None, ge=0)


class OptimStep(ModelCall):
    adam_params: JsonObject | None = None
    optimizer_params: JsonObject | None = None


class SaveWeights(ModelCall):
    path: str | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL)
    overwrite: bool = False
    user_metadata: JsonObject | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: int | None = Field(default=None, ge=0)


class LoadWeights(ModelCall):
    path: str
    optimizer: bool = False


class CreateSamplingSession(BaseModel):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class RetrieveFuture(BaseModel):
    request_id: str


class WeightsInfo(BaseModel):
    tinker_path: str


class SetTtl(BaseModel):
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL)


class AdamParamsBody(BaseModel, extra="forbid"):
    learning_rate: float = Field(ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, allow_inf_nan=False)


class Chunk(BaseModel):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class PromptBody(BaseModel):
    chunks: list[Chunk]


MOST_STOPS = 64
LONGEST_STOP = 1000
"""Characters. Every token that is written is compared with every stop string."""


class SamplingParamsBody(BaseModel):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)

    @field_validator("stop")
    @classmethod
    def _few_and_short(cls, stop: str | list[str] | list[int] | None) -> str | list[str] | list[int] | None:
        items = [stop] if isinstance(stop, str) else stop or []
        if len(items) > MOST_STOPS or any(isinstance(item, str) and len(item) > LONGEST_STOP for item in items):
            raise ValueError(f"at most {MOST_STOPS} stops, texts of at most {LONGEST_STOP} characters")
        return stop


class SampleBody(BaseModel):
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    prompt: PromptBody
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: object = None
    prompt_alt_tokens_k: int = 0


def read_body[Body: BaseModel](kind: type[Body], body: bytes) -> Body:
    """The body as a record; everything that is wrong with it at once otherwise."""
    try:
        value = json.loads(body or b"{}", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as exc:
        raise BadRequest(f"the body is not JSON: {exc}") from exc
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        raise BadRequest(_say(exc)) from exc


def _finite(text: str) -> float:
    """Python reads NaN and Infinity, and 1e999 as infinity; JSON has neither, and no setting here may be either."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def read_call_number(body: bytes) -> tuple[str, int] | None:
    """`(model_id, seq_id)` of a JSON body that was refused, as far as it can be read; None when it names none."""
    try:
        call = json.loads(body)
        model_id, seq_id = call["model_id"], call["seq_id"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return (model_id, seq_id) if isinstance(model_id, str) and type(seq_id) is int else None


def digest(operation: str, payload: bytes) -> str:
    """Tells whether two requests under one number are the same request."""
    return hashlib.sha256(operation.encode() + b"\0" + payload).hexdigest()


def digest_body(body: BaseModel) -> str:
    try:
        return digest(type(body).__name__, body.model_dump_json().encode())
    except PydanticSerializationError as exc:  # half of a surrogate pair, or metadata nested hundreds of levels deep
        raise BadRequest(f"the body cannot be written as JSON again: {exc}") from exc


def read_adam(call: OptimStep) -> AdamParams:
    if call.adam_params is None:
        family = (call.optimizer_params or {}).get("type", "nothing")
        raise BadRequest(f"optim_step asks for {family!r}; this server has AdamW: pass tinker.AdamParams(...)")
    try:
        params = AdamParamsBody.model_validate(call.adam_params)
    except ValidationError as exc:
        raise BadRequest(f"adam_params: {_say(exc)}") from exc
    return AdamParams(**params.model_dump())


def read_sample(call: SampleBody, *, max_length: int) -> SampleRequest:
    """As the protocol has it, an empty list of stops means that nothing stops a completion, not even the end of text,
    and a stop string is part of the completion."""
    for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
        if getattr(call, name):
            raise BadRequest(f"{name} is not offered here; prompt_logprobs and topk_prompt_logprobs are")
    tokens: list[int] = []
    for chunk in call.prompt.chunks:
        if chunk.tokens is None:
            raise BadRequest(f"the prompt has a chunk of type {chunk.type!r}; this server takes tokens only")
        tokens += chunk.tokens
    params = call.sampling_params
    if len(tokens) > max_length:
        raise BadRequest(f"the prompt has {len(tokens)} tokens; the model takes {max_length}")
    if call.prompt_logprobs_last_n is not None and not 1 <= call.prompt_logprobs_last_n < len(tokens):
        raise BadRequest(
            f"prompt_logprobs_last_n must be between 1 and {len(tokens) - 1}, the prompt's length less one"
        )
    return SampleRequest(
        tokens=tokens,
        num_samples=call.num_samples,
        max_tokens=params.max_tokens or max(1, max_length - len(tokens)),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=None if params.seed is None else params.seed % SEED_BITS,
        stop=(params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ()),
        end_of_text=params.stop != [],
        keep_stop_strings=True,
        prompt_logprobs=bool(call.prompt_logprobs),
        topk_prompt_logprobs=call.topk_prompt_logprobs,
    )


def _say(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
