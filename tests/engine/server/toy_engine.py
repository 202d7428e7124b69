"""An engine of a hundred lines for tests of the server: a bigram model whose every answer can be worked out by hand.

The next token's logits are a row of a fixed table plus a trainable one. It fulfils `EngineApi` and keeps its rules: a
bad call changes nothing, calls of an adapter run one after another.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evsys_engine.losses import LOSSES
from evsys_engine.types import (
    AdamParams,
    BadRequest,
    LoraSettings,
    LossOutput,
    ModelInfo,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TrainingDatum,
)

VOCABULARY = 32
EOS = 1
MAX_LENGTH = 64


def save_tokenizer(folder: Path) -> Path:
    """A word-level tokenizer that `AutoTokenizer` loads from the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": EOS} | {f"w{number}": number for number in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    return folder


class ToyEngine:
    """`log` has the name of every call in the order they ran, `done` of those that ended: none while `gate` is shut."""

    def __init__(self, folder: Path, *, name: str | None = None, shut: bool = False) -> None:
        self.info = ModelInfo(
            name=name or str(folder), path=folder, vocab_size=VOCABULARY, max_length=MAX_LENGTH,
            parameters=VOCABULARY**2, device="cpu", dtype="float32",
        )  # fmt: skip
        self.tokenizer = None  # the server has no use for it
        self.base = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.gate = threading.Event()
        if not shut:
            self.gate.set()
        self.log: list[str] = []
        self.done: list[str] = []
        self.closed = 0
        self.batches: list[int] = []

    def create_adapter(self, settings: LoraSettings) -> ToyAdapter:
        return ToyAdapter(self, settings)

    def load_sampler(self, folder: Path | None) -> ToySampler:
        delta = torch.zeros_like(self.base) if folder is None else _read(folder / "delta.json")
        return ToySampler(self, self.base + delta)

    def work(self, name: str) -> None:
        self.log.append(name)
        assert self.gate.wait(300), "nobody opened the gate"
        self.done.append(name)


class ToyAdapter:
    def __init__(self, engine: ToyEngine, settings: LoraSettings) -> None:
        self.engine, self.settings = engine, settings
        self.lock = threading.Lock()
        self.delta = torch.zeros_like(engine.base, requires_grad=True)
        self.moments = torch.zeros_like(engine.base), torch.zeros_like(engine.base)
        self.steps = 0

    def forward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        with self.lock, torch.no_grad():
            self.engine.work("forward")
            return self._loss(data, loss_fn)[1]

    def forward_backward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        with self.lock:
            loss, output = self._loss(data, loss_fn)
            self.engine.work("forward_backward")
            loss.backward()
            return output

    def forward_backward_custom(self, data: Sequence[TrainingDatum], loss_fn: Any) -> LossOutput:
        raise NotImplementedError

    def _loss(self, data: Sequence[TrainingDatum], loss_fn: str) -> tuple[torch.Tensor, LossOutput]:
        if loss_fn not in LOSSES:
            raise BadRequest(f"loss {loss_fn!r} is unknown; known: {', '.join(LOSSES)}")
        for datum in data:
            _check(datum)
        logprobs = [self._target_logprobs(datum) for datum in data]
        loss = sum((_token_loss(loss_fn, d, lp).sum() for d, lp in zip(data, logprobs, strict=True)), torch.zeros(()))
        found = [lp.detach().numpy() for lp in logprobs]
        return loss, LossOutput(metrics={"loss:sum": float(loss.detach()), "tokens": 1.0}, logprobs=found)

    def _target_logprobs(self, datum: TrainingDatum) -> torch.Tensor:
        tokens = torch.tensor(datum.tokens)
        logprobs = torch.log_softmax((self.engine.base + self.delta)[tokens], dim=-1)
        targets = torch.as_tensor(datum.inputs["target_tokens"])
        if targets.ndim == 2:
            return logprobs.gather(1, targets)
        return logprobs.gather(1, targets[:, None])[:, 0]

    def optim_step(self, settings: AdamParams) -> dict[str, float]:
        with self.lock:
            self.engine.work("optim_step")
            if self.delta.grad is None:
                self.delta.grad = torch.zeros_like(self.delta)
            grad, self.delta.grad = self.delta.grad, None
            self.steps += 1
            first = settings.beta1 * self.moments[0] + (1 - settings.beta1) * grad
            second = settings.beta2 * self.moments[1] + (1 - settings.beta2) * grad**2
            self.moments = first, second
            step = first / (1 - settings.beta1**self.steps)
            scale = (second / (1 - settings.beta2**self.steps)).sqrt() + settings.eps
            with torch.no_grad():
                self.delta -= settings.learning_rate * step / scale
            return {"grad_norm": float(grad.norm())}

    def save_state(self, folder: Path) -> None:
        with self.lock:
            folder.mkdir()
            for name, tensor in [("delta", self.delta), ("first", self.moments[0]), ("second", self.moments[1])]:
                _write(folder / f"{name}.json", tensor)
            (folder / "steps.json").write_text(str(self.steps))

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        with self.lock:
            self.delta = _read(folder / "delta.json").requires_grad_()
            if optimizer:
                self.moments = _read(folder / "first.json"), _read(folder / "second.json")
                self.steps = int((folder / "steps.json").read_text())

    def save_weights(self, folder: Path) -> None:
        with self.lock:
            folder.mkdir()
            _write(folder / "delta.json", self.delta)

    def close(self) -> None:
        self.engine.closed += 1


class ToySampler:
    def __init__(self, engine: ToyEngine, logits: torch.Tensor) -> None:
        self.engine, self.logprobs = engine, torch.log_softmax(logits.detach(), dim=-1)

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleOutput]:
        for request in requests:
            if not request.tokens or not all(0 <= token < VOCABULARY for token in request.tokens):
                raise BadRequest(f"the prompt is empty or has a token outside 0..{VOCABULARY - 1}")
        self.engine.work("sample")
        self.engine.batches.append(len(requests))
        return [self._sample(request) for request in requests]

    def _sample(self, request: SampleRequest) -> SampleOutput:
        prompt = list(request.tokens)
        rows = [self._row(request, row) for row in range(request.num_samples)]
        known = [None] + [float(self.logprobs[a, b]) for a, b in pairwise(prompt)]
        topk = [None] + [self._topk(token, request.topk_prompt_logprobs) for token in prompt[:-1]]
        return SampleOutput(
            sequences=rows,
            prompt_logprobs=known if request.prompt_logprobs else None,
            topk_prompt_logprobs=topk if request.topk_prompt_logprobs else None,
        )

    def _row(self, request: SampleRequest, row: int) -> SampledSequence:
        chance = np.random.default_rng(None if request.seed is None else [request.seed, row])
        token, tokens, logprobs = request.tokens[-1], [], []
        while len(tokens) < request.max_tokens:
            scores = self.logprobs[token].double()
            if request.temperature == 0:
                token = int(scores.argmax())
            else:
                token = int(chance.choice(VOCABULARY, p=torch.softmax(scores / request.temperature, 0).numpy()))
            tokens.append(token)
            logprobs.append(float(scores[token]))
            if token in request.stop or (token == EOS and request.end_of_text):
                return SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason="stop")
        return SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason="length")

    def _topk(self, token: int, k: int) -> list[tuple[int, float]]:
        values, ids = self.logprobs[token].topk(k)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def close(self) -> None:
        self.engine.log.append("close sampler")


def _check(datum: TrainingDatum) -> None:
    targets, length = datum.inputs["target_tokens"], len(datum.tokens)
    if not 0 < length <= MAX_LENGTH:
        raise BadRequest(f"a sequence has {length} tokens; the model takes 1 to {MAX_LENGTH}")
    if targets.shape[0] != length or any(array.shape[0] != length for array in datum.inputs.values()):
        raise BadRequest(f"loss inputs do not have the {length} places of the sequence")
    if max(datum.tokens) >= VOCABULARY or targets.max() >= VOCABULARY or min(datum.tokens) < 0 or targets.min() < 0:
        raise BadRequest(f"a token is outside 0..{VOCABULARY - 1}")


def _token_loss(loss_fn: str, datum: TrainingDatum, logprobs: torch.Tensor) -> torch.Tensor:
    if loss_fn == "cross_entropy":
        return -logprobs * torch.as_tensor(datum.inputs["weights"])
    ratio = torch.exp(logprobs - torch.as_tensor(datum.inputs["logprobs"]))
    return -ratio * torch.as_tensor(datum.inputs["advantages"])


def _write(file: Path, tensor: torch.Tensor) -> None:
    file.write_text(json.dumps(tensor.tolist()))


def _read(file: Path) -> torch.Tensor:
    return torch.tensor(json.loads(file.read_text()))
