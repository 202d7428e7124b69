"""The capability card: golden calls that show what a backend really does, whatever it says of itself.

In: a prepared training service. Out: one `Finding` per question. A server that answers but computes something else
(a loss
divided by its weights, a sampler that is no snapshot) is caught here, before a run is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from evsys_sdk.surface import AdamParams, Datum, ModelInput, SamplingParams, TensorData, TrainingClient, TrainingService

RANK = 4
ADAM = AdamParams(learning_rate=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one question."""

    question: str
    ok: bool
    detail: str = ""


class Mismatch(Exception):
    """The backend answered something else than the surface promises."""


async def check_service(service: TrainingService, *, seed: int = 0) -> list[Finding]:
    """Ask every question; one that breaks does not keep the others from being asked."""
    findings = []
    for question, ask in QUESTIONS.items():
        try:
            detail = await ask(service, seed)
            findings.append(Finding(question=question, ok=True, detail=detail))
        except Mismatch as exc:
            findings.append(Finding(question=question, ok=False, detail=str(exc)))
        except Exception as exc:
            findings.append(Finding(question=question, ok=False, detail=f"{type(exc).__name__}: {exc}"))
    return findings


def _tokens(service: TrainingService) -> tuple[list[int], list[int]]:
    tokenizer = service.get_tokenizer()
    chat = [{"role": "user", "content": "What colour is the sky?"}]
    return (
        tokenizer.apply_chat_template(chat, add_generation_prompt=True),
        [*tokenizer.encode("blue as always"), tokenizer.eos_token_id],
    )


def _imitation(service: TrainingService, weight: float = 1.0) -> Datum:
    prompt, answer = _tokens(service)
    tokens = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [weight] * len(answer)
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData(weights)}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


async def _client(service: TrainingService, seed: int) -> TrainingClient:
    return await service.create_training_client(rank=RANK, seed=seed)


async def _loss(client: TrainingClient, datum: Datum) -> float:
    return (await client.forward_backward([datum], "cross_entropy")).metrics["loss:sum"]


async def _learns(service: TrainingService, seed: int) -> str:
    client, datum = await _client(service, seed), _imitation(service)
    losses = []
    for _ in range(3):
        output, step = client.forward_backward([datum], "cross_entropy"), client.optim_step(ADAM)
        losses.append((await output).metrics["loss:sum"])
        await step
    if not losses[-1] < losses[0]:
        raise Mismatch(f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    return f"{losses[0]:.3f} -> {losses[-1]:.3f} in 3 steps"


async def _sums(service: TrainingService, seed: int) -> str:
    client = await _client(service, seed)
    one = await _loss(client, _imitation(service))
    double, minus = await _loss(client, _imitation(service, 2.0)), await _loss(client, _imitation(service, -1.0))
    if not (math.isclose(double, 2 * one, rel_tol=1e-3) and math.isclose(minus, -one, rel_tol=1e-3)):
        raise Mismatch(f"weights 1, 2, -1 give {one:.4f}, {double:.4f}, {minus:.4f}: not a sum with signed weights")
    return "weights scale and sign the loss"


async def _named_losses(service: TrainingService, seed: int) -> str:
    client, datum = await _client(service, seed), _imitation(service)
    output = await client.forward_backward([datum], "cross_entropy")
    advantages = datum.loss_fn_inputs["weights"]
    inputs = {
        "target_tokens": datum.loss_fn_inputs["target_tokens"],
        "logprobs": TensorData(output.logprobs[0]),
        "advantages": advantages,
    }
    worked = ["cross_entropy"]
    for name in sorted(service.capabilities.losses - {"cross_entropy"}):
        result = await client.forward_backward([Datum(datum.model_input, inputs)], name)
        if not math.isfinite(result.metrics["loss:sum"]):
            raise Mismatch(f"{name} gives {result.metrics['loss:sum']}")
        worked.append(name)
    return ", ".join(worked)


async def _custom(service: TrainingService, seed: int) -> str:
    if not service.capabilities.custom_loss:
        return "not offered"
    client, datum = await _client(service, seed), _imitation(service)
    before = await _loss(client, datum)
    await client.optim_step(AdamParams(learning_rate=1e-12))  # drops the gradient of the look

    def imitate(data: list[Datum], logprobs: list[object]) -> tuple[object, dict[str, float]]:
        weights = data[0].loss_fn_inputs["weights"].to_torch()
        return -(logprobs[0] * weights).sum(), {}

    for _ in range(3):
        await client.forward_backward_custom([datum], imitate)
        await client.optim_step(ADAM)
    after = await _loss(client, datum)
    if not after < before:
        raise Mismatch(f"a callable loss did not move the weights: {before:.4f} -> {after:.4f}")
    return f"{before:.3f} -> {after:.3f} in 3 steps"


async def _snapshot(service: TrainingService, seed: int) -> str:
    client, datum = await _client(service, seed), _imitation(service)
    sampler = await service.create_sampling_client(await client.save_weights_for_sampler("check-snapshot"))
    before = await sampler.compute_logprobs(datum.model_input)
    await client.forward_backward([datum], "cross_entropy")
    await client.optim_step(AdamParams(learning_rate=1e-2))
    if await sampler.compute_logprobs(datum.model_input) != before:
        raise Mismatch("training changed a sampler that was made before")
    return "a sampler keeps its weights"


async def _resume(service: TrainingService, seed: int) -> str:
    if not service.capabilities.resume:
        return "not offered"
    datum, first = _imitation(service), await _client(service, seed)
    await first.forward_backward([datum], "cross_entropy")
    await first.optim_step(ADAM)
    path = await first.save_state("check-resume")
    second = await _client(service, seed + 1)
    await second.load_state(path)
    for client in (first, second):
        await client.forward_backward([datum], "cross_entropy")
        await client.optim_step(ADAM)
    losses = [await _loss(client, datum) for client in (first, second)]
    if not math.isclose(*losses, rel_tol=1e-5):
        raise Mismatch(f"a resumed client goes another way: {losses[0]:.6f} and {losses[1]:.6f}")
    return "bit-equal" if losses[0] == losses[1] else "equal to 1e-5"


async def _samples(service: TrainingService, seed: int) -> str:
    sampler = await service.create_sampling_client(None)
    prompt = ModelInput.from_ints(_tokens(service)[0])
    params = SamplingParams(max_tokens=8, seed=seed + 1)
    first, again = await sampler.sample(prompt, 2, params), await sampler.sample(prompt, 2, params)
    for row in first.sequences:
        if len(row.tokens) != len(row.logprobs) or not row.tokens:
            raise Mismatch("a completion has no tokens, or not one logprob per token")
    repeats = [r.tokens for r in first.sequences] == [r.tokens for r in again.sequences]
    return "a seed repeats" if repeats else "works; a seed does not repeat"


async def _logprobs(service: TrainingService, seed: int) -> str:
    if not service.capabilities.prompt_logprobs:
        return "not offered"
    sampler = await service.create_sampling_client(None)
    datum = _imitation(service)
    found = await sampler.compute_logprobs(datum.model_input)
    if len(found) != datum.model_input.length or found[0] is not None or None in found[1:]:
        raise Mismatch(f"{len(found)} logprobs for {datum.model_input.length} tokens, the first {found[0]}")
    return "one per token, the first None"


async def _topk(service: TrainingService, seed: int) -> str:
    if not service.capabilities.topk_prompt_logprobs:
        return "not offered"
    sampler = await service.create_sampling_client(None)
    prompt = ModelInput.from_ints(_tokens(service)[0])
    output = await sampler.sample(prompt, 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=3)
    found = output.topk_prompt_logprobs or []
    if len(found) != prompt.length or any(len(row or []) != 3 for row in found[1:]):
        raise Mismatch(f"asked for 3 per token of {prompt.length}, got {len(found)} rows")
    return "k per token"


QUESTIONS: dict[str, Callable[[TrainingService, int], Awaitable[str]]] = {
    "does it learn": _learns,
    "are losses sums with signed weights": _sums,
    "which losses": _named_losses,
    "callable loss": _custom,
    "is a sampler a snapshot": _snapshot,
    "resume with optimiser": _resume,
    "sampling": _samples,
    "prompt logprobs": _logprobs,
    "top-k prompt logprobs": _topk,
}
