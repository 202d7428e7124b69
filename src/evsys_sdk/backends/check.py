"""The capability card: golden calls that show what a backend really does, whatever it says of itself.

In: a prepared training service. Out: one `Finding` per question. A server that answers but computes something else
(a gradient divided by its weights, a sampler that is no snapshot) is caught here, before a run is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from evsys_sdk.errors import BackendUnavailable, EvsysError
from evsys_sdk.training_api import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingParams,
    TensorData,
    TrainingClient,
    TrainingService,
)

RANK = 4
ADAM = AdamParams(learning_rate=1e-3)
FORGET = AdamParams(learning_rate=0.0)
"""Ends a round of looking: the gradient goes, the weights stay."""
GENTLE = AdamParams(learning_rate=0.1, eps=1.0)
"""Steps as long as the gradient is large: where it is rounding alone, Adam would make a whole step of it."""
CLOSE = 1e-4
"""How far logprobs of the same weights may lie apart: servers batch, and round, as they like."""
NOT_OFFERED = "not offered"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The answer to one question."""

    question: str
    ok: bool
    detail: str = ""
    lacks: tuple[str, ...] = ()
    """What to write into `lacks` of the tinker backend, so that recipes that need it are refused."""


class Mismatch(Exception):
    """The backend answered something else than the surface promises."""

    def __init__(self, message: str, *lacks: str):
        super().__init__(message)
        self.lacks = lacks


@dataclass(slots=True)
class BackendCheck:
    """One backend on trial. Its clients are few, because servers limit them."""

    service: TrainingService
    seed: int
    sampler_path: str | None = None
    """Weights saved for sampling before the server was last started."""
    saved_path: str = ""
    """Weights saved for sampling in this trial."""
    _client: TrainingClient | None = field(default=None)

    async def client(self) -> TrainingClient:
        """The one that most questions share."""
        if self._client is None:
            self._client = await self.fresh_client()
        return self._client

    async def fresh_client(self, offset: int = 0) -> TrainingClient:
        return await self.service.create_training_client(rank=RANK, seed=self.seed + offset)

    async def draw_from(self, path: str) -> None:
        sampler = await self.service.create_sampling_client(path)
        await sampler.sample(ModelInput.from_ints(self.prompt), 1, SamplingParams(max_tokens=1))

    @property
    def prompt(self) -> list[int]:
        chat = [{"role": "user", "content": "What colour is the sky?"}]
        return self.service.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True)

    def imitation(self, weight: float = 1.0, *, answer: str = "blue as always") -> Datum:
        tokenizer, prompt = self.service.get_tokenizer(), self.prompt
        written = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        tokens, weights = [*prompt, *written], [0.0] * (len(prompt) - 1) + [weight] * len(written)
        inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData(weights)}
        return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


Question = Callable[[BackendCheck], Awaitable[str]]
QUESTIONS: dict[str, tuple[Question, str]] = {}
"""What is asked, in this order, and what a backend lacks that breaks on it."""


def _question(text: str, *, lack: str = "") -> Callable[[Question], Question]:
    def register(check: Question) -> Question:
        QUESTIONS[text] = (check, lack)
        return check

    return register


async def check_service(
    service: TrainingService, *, seed: int = 0, sampler_path: str | None = None
) -> list[CheckResult]:
    """Ask every question; one that breaks does not keep the others from being asked."""
    trial, findings = BackendCheck(service, seed, sampler_path), []
    for question, (ask, lack) in QUESTIONS.items():
        try:
            findings.append(CheckResult(question=question, ok=True, detail=await ask(trial)))
        except BackendUnavailable:
            raise
        except Mismatch as exc:
            findings.append(CheckResult(question=question, ok=False, detail=str(exc), lacks=exc.lacks))
        except Exception as exc:
            detail = str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
            findings.append(CheckResult(question=question, ok=False, detail=detail, lacks=(lack,) if lack else ()))
    return findings


async def _look(client: TrainingClient, datum: Datum) -> tuple[float, list[float]]:
    """Loss and logprobs; nothing is learnt from looking."""
    output = await client.forward_backward([datum], "cross_entropy")
    await client.optim_step(FORGET)
    return output.metrics["loss:sum"], output.logprobs[0]


async def _learn(client: TrainingClient, datum: Datum, adam: AdamParams = ADAM) -> float:
    output, step = client.forward_backward([datum], "cross_entropy"), client.optim_step(adam)
    loss = (await output).metrics["loss:sum"]
    await step
    return loss


def _apart(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    pairs = zip(first, second, strict=True)
    return any(a is not None and b is not None and not math.isclose(a, b, abs_tol=CLOSE) for a, b in pairs)


@_question("does it learn")
async def check_learning(trial: BackendCheck) -> str:
    client, datum = await trial.client(), trial.imitation()
    losses = [await _learn(client, datum) for _ in range(3)]
    if not losses[-1] < losses[0]:
        raise Mismatch(f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    return f"{losses[0]:.3f} -> {losses[-1]:.3f} in 3 steps"


@_question("are losses sums with signed weights")
async def check_signed_weights(trial: BackendCheck) -> str:
    client = await trial.fresh_client()  # untouched before this, and perhaps spoilt after it
    plus, minus = [await client.forward_backward([trial.imitation(w)], "cross_entropy") for w in (1.0, -1.0)]
    await client.optim_step(GENTLE)
    if _apart((await _look(client, trial.imitation()))[1], plus.logprobs[0]):
        raise Mismatch(
            "a gradient of weight 1 and one of weight -1 do not cancel out, as where it is divided by the weights: "
            "callable losses, which send weights of both signs, go wrong",
            "custom_loss",
        )
    double, _ = await _look(client, trial.imitation(2.0))
    losses = plus.metrics["loss:sum"], double, minus.metrics["loss:sum"]
    if not (math.isclose(losses[1], 2 * losses[0], rel_tol=1e-3) and math.isclose(losses[2], -losses[0], rel_tol=1e-3)):
        said = ", ".join(f"{loss:.4f}" for loss in losses)
        raise Mismatch(f"weights 1, 2, -1 give losses {said}: no sum with signed weights, so curves cannot be compared")
    return "weights scale and sign loss and gradient"


@_question("which losses")
async def check_named_losses(trial: BackendCheck) -> str:
    client, datum = await trial.client(), trial.imitation()
    inputs = {
        "target_tokens": datum.loss_fn_inputs["target_tokens"],
        "logprobs": TensorData((await _look(client, datum))[1]),
        "advantages": datum.loss_fn_inputs["weights"],
    }
    worked, failed = ["cross_entropy"], {}
    for name in sorted(trial.service.capabilities.losses - {"cross_entropy"}):
        try:
            result = await client.forward_backward([Datum(datum.model_input, inputs)], name)
            if not math.isfinite(result.metrics["loss:sum"]):
                raise Mismatch(f"it gives {result.metrics['loss:sum']}")
            worked.append(name)
        except BackendUnavailable:
            raise
        except Exception as exc:
            failed[name] = str(exc)
    await client.optim_step(FORGET)
    if failed:
        said = "; ".join(f"not {name}: {why}" for name, why in failed.items())
        raise Mismatch(f"{', '.join(worked)}; {said}", *failed)
    return ", ".join(worked)


@_question("callable loss", lack="custom_loss")
async def check_custom_loss(trial: BackendCheck) -> str:
    if not trial.service.capabilities.custom_loss:
        return NOT_OFFERED
    client, datum = await trial.client(), trial.imitation()

    def imitate(data: list[Datum], logprobs: list[object]) -> tuple[object, dict[str, float]]:
        weights = data[0].loss_fn_inputs["weights"].to_torch()
        return -(logprobs[0] * weights).sum(), {}

    before = (await _look(client, datum))[0]
    for _ in range(3):
        await client.forward_backward_custom([datum], imitate)
        await client.optim_step(ADAM)
    after = (await _look(client, datum))[0]
    if not after < before:
        raise Mismatch(f"a callable loss did not move the weights: {before:.4f} -> {after:.4f}", "custom_loss")
    return f"{before:.3f} -> {after:.3f} in 3 steps"


@_question("is a sampler a snapshot")
async def check_snapshot(trial: BackendCheck) -> str:
    client, datum = await trial.client(), trial.imitation(answer="grey in the end")  # new, so that it changes much
    trial.saved_path = await client.save_weights_for_sampler("check-snapshot")
    sampler = await trial.service.create_sampling_client(trial.saved_path)
    before = await sampler.compute_logprobs(datum.model_input)
    await _learn(client, datum, AdamParams(learning_rate=1e-2))
    if _apart(await sampler.compute_logprobs(datum.model_input), before):
        raise Mismatch(
            "training changed a sampler that was made before, so in-loop scores and rollouts mix steps: "
            "make a new sampler for each step, and let no evaluation overlap with training"
        )
    return "a sampler keeps its weights"


@_question("does sampling leave training alone")
async def check_undisturbed_training(trial: BackendCheck) -> str:
    client, datum = await trial.client(), trial.imitation(answer="dark tonight")
    older = await client.save_weights_for_sampler("check-older")
    await _learn(client, datum, AdamParams(learning_rate=1e-2))
    newer = await client.save_weights_for_sampler("check-newer")
    before = (await _look(client, datum))[1]
    for path in (newer, older):
        await trial.draw_from(path)
    if _apart((await _look(client, datum))[1], before):
        raise Mismatch(
            "sampling from older weights overwrote those in training: evaluate and sample only the newest weights here"
        )
    return "sampling from older weights changes nothing"


@_question("resume with optimiser", lack="resume")
async def check_resume(trial: BackendCheck) -> str:
    if not trial.service.capabilities.resume:
        return NOT_OFFERED
    datum, first = trial.imitation(), await trial.client()
    await _learn(first, datum)
    path = await first.save_state("check-resume")
    second = await trial.fresh_client(offset=1)
    await second.load_state(path)
    for client in (first, second):
        await _learn(client, datum)
    losses = [(await _look(client, datum))[0] for client in (first, second)]
    if not math.isclose(*losses, rel_tol=1e-5):
        raise Mismatch(f"a resumed client goes another way: {losses[0]:.6f} and {losses[1]:.6f}", "resume")
    return "bit-equal" if losses[0] == losses[1] else "equal to 1e-5"


@_question("sampling")
async def check_sampling(trial: BackendCheck) -> str:
    sampler = await trial.service.create_sampling_client(None)
    prompt = ModelInput.from_ints(trial.prompt)
    params = SamplingParams(max_tokens=8, seed=trial.seed + 1)
    first, again = await sampler.sample(prompt, 2, params), await sampler.sample(prompt, 2, params)
    for row in first.sequences:
        if len(row.tokens) != len(row.logprobs) or not row.tokens:
            raise Mismatch("a completion has no tokens, or not one logprob per token")
    repeats = [r.tokens for r in first.sequences] == [r.tokens for r in again.sequences]
    return "a seed repeats" if repeats else "works; a seed does not repeat"


@_question("prompt logprobs", lack="prompt_logprobs")
async def check_prompt_logprobs(trial: BackendCheck) -> str:
    if not trial.service.capabilities.prompt_logprobs:
        return NOT_OFFERED
    sampler, read = await trial.service.create_sampling_client(None), trial.imitation().model_input
    found = await sampler.compute_logprobs(read)
    if len(found) == read.length - 1:
        raise Mismatch(
            "compute_logprobs leaves out the leading None, so each logprob belongs to the token before: "
            "KL penalties and teachers read the wrong ones",
            "prompt_logprobs",
        )
    if len(found) != read.length or found[0] is not None or None in found[1:]:
        raise Mismatch(f"{len(found)} logprobs for {read.length} tokens, the first {found[0]}", "prompt_logprobs")
    return "one per token, the first None"


@_question("top-k prompt logprobs", lack="topk_prompt_logprobs")
async def check_topk(trial: BackendCheck) -> str:
    if not trial.service.capabilities.topk_prompt_logprobs:
        return NOT_OFFERED
    sampler, prompt = await trial.service.create_sampling_client(None), ModelInput.from_ints(trial.prompt)
    output = await sampler.sample(prompt, 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=3)
    found = output.topk_prompt_logprobs or []
    if len(found) != prompt.length or any(len(row or []) != 3 for row in found[1:]):
        said = f"asked for 3 per token of {prompt.length}, got {len(found)} rows"
        raise Mismatch(said, "topk_prompt_logprobs")
    return "k per token"


@_question("do saved weights survive a restart")
async def check_restart(trial: BackendCheck) -> str:
    if trial.sampler_path is None and "://" not in trial.saved_path:
        return "there is no server: they are files of this machine"
    if trial.sampler_path is None:
        return f"not asked: start the server again, then check with --sampler-path {trial.saved_path}"
    try:
        await trial.draw_from(trial.sampler_path)
    except BackendUnavailable:
        raise
    except Exception as exc:
        raise Mismatch(
            f"weights saved for sampling are gone after a restart; score before it, or not at all: {exc}"
        ) from exc
    return f"{trial.sampler_path} can be sampled"
