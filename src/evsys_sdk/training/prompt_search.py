"""The search itself of `gepa_prompt`: gepa decides, and every call it makes is answered, graded and remembered here.

In: tasks to learn from and to rank by, a model that answers, a model that reflects. Out: the best prompt, with the
finalists and what they scored on new samples. Answers are journalled by what was asked (`CallJournal`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Never

from pydantic import Field, field_validator

from evsys_sdk import registry
from evsys_sdk.concurrency import run_async
from evsys_sdk.config.base import InferenceSpec, KindSpec, Params, VerifierSpec, tunable
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.data_types import (
    HarborTask,
    Json,
    JsonObject,
    content_text,
)
from evsys_sdk.errors import BackendError, EvsysError, UnknownKind, need, shorten
from evsys_sdk.files import make_folder
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import (
    MACHINE_FAILURES,
    Hooks,
    InferenceClient,
    Rollout,
    RunContext,
    Turn,
)
from evsys_sdk.redaction import redact
from evsys_sdk.registry import Registry
from evsys_sdk.rollout.client_model import ClientModel, ask
from evsys_sdk.training.rendering import PromptedRenderer
from evsys_sdk.training_api import SamplingClient, SamplingParams, derive_seed

COMPONENT = "system_prompt"
"""What gepa calls the text that it changes."""
PROMPT_FILE = "prompt.json"
NO_PROMPT = "Answer the user."
"""The seed where none is given: gepa cannot improve an empty text."""
UNTRAINED_RANK = 8
"""Of the adapter that is saved untrained: the algorithms' default."""
STALE_ROUNDS = 10
"""The search ends after so many rounds in a row that needed no new answer: the reflecting model repeats itself, or the
rows it is shown are all solved. Such rounds cost no metric call, so the budget alone would never end them."""
COPIED_WORDS = 8
"""Words in a row that a prompt shares with a training row count as copied: shorter ones are shared by chance."""


def checked_spec[S: KindSpec](spec: S, kinds: Registry) -> S:
    """The spec, if its kind exists and takes its params; a ValueError says what is wrong with it."""
    try:
        target = kinds.get(spec.kind)
    except UnknownKind as exc:
        raise ValueError(str(exc)) from exc
    if kinds is registry.verifiers:  # a plain function: its params are its own
        return spec
    problems = registry.check_params(target, spec.params, kind=kinds.kind)
    if problems:
        raise ValueError("; ".join(f"params.{one.path}: {one.message}" for one in problems))
    return spec


class PromptSearchParams(Params):
    """Settings of a prompt search."""

    seed_prompt: str = Field(default=NO_PROMPT, min_length=1)
    """The system prompt that the search starts from; `baseline: true` scores it."""
    reflection_model: InferenceSpec
    """The model that reads mistakes and rewrites the prompt: an inference client. A model below about 7 billion
    parameters rarely writes a better prompt. The backend's own kind means the model of this run."""
    task_model: InferenceSpec | None = None
    """The model whose prompt is searched, where that is not the model of this run: an inference client."""
    max_metric_calls: int = Field(ge=1)
    """Answers that the search may ask for and grade; it never asks for more. About 20 times the validation rows
    is a good start."""
    finalists: int = Field(default=3, ge=2)
    """Prompts, the seed among them, that are scored again on new samples at the end; the best of these wins."""
    finalist_samples: int = Field(default=2, ge=1)
    """Answers per validation row and finalist; they come on top of `max_metric_calls`."""
    minibatch_size: int = Field(default=3, ge=1, json_schema_extra=tunable(1, 8))
    """Rows that the reflecting model sees at a time."""
    num_samples: int = Field(default=1, ge=1)
    """Answers per row. From 2 on, a changed prompt must beat its parent by more than the answers of one row
    scatter (`acceptance_z`)."""
    acceptance_z: float = Field(default=1.0, ge=0, json_schema_extra=tunable(0.0, 3.0))
    """With `num_samples` from 2 on: standard errors by which a changed prompt must beat its parent."""
    val_data: DataConfig | None = None
    """Rows that rank the prompts; by default a part of the training rows (`val_fraction`)."""
    val_fraction: float = Field(default=0.5, gt=0, lt=1)
    """Without `val_data`: the part of the rows that ranks the prompts; the others are shown to the reflecting
    model."""
    verifier: VerifierSpec = Field(default_factory=lambda: VerifierSpec(kind="exact_match"))
    """Grades answers to rows that bring no verifier."""
    template: str | None = None
    """The question to ask for a row, with its inputs as {name}; by default the only input, or one line for each."""
    max_tokens: int = Field(default=256, ge=1)
    """Per answer."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the answers."""
    reflection_tokens: int = Field(default=1024, ge=16)
    """Tokens of a rewritten prompt."""
    reflection_temperature: float = Field(default=1.0, ge=0, json_schema_extra=tunable(0.0, 1.5))
    """Of a rewritten prompt."""
    feedback_chars: int = Field(default=2000, ge=100)
    """Characters of one row's question, answer and feedback that the reflecting model sees; the middle is cut."""

    @field_validator("reflection_model", "task_model")
    @classmethod
    def _is_a_client(cls, spec: InferenceSpec | None) -> InferenceSpec | None:
        return spec and checked_spec(spec, registry.inference)

    @field_validator("verifier")
    @classmethod
    def _is_a_verifier(cls, spec: VerifierSpec) -> VerifierSpec:
        return checked_spec(spec, registry.verifiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedAnswer:
    """One answer to one row under one prompt."""

    text: str
    reward: float
    feedback: str = ""
    """What the verifier or the machine said about it."""
    cost_usd: float = 0.0

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> GradedAnswer:
        said = rollout.metadata.get("verifier") or {}
        notes = [rollout.error or "", json.dumps(said, default=str) if said else ""]
        return cls(
            text=rollout.completion,
            # What the model broke itself is a failure with a reward, like a wrong answer.
            reward=0.0 if rollout.reward is None else float(rollout.reward),
            feedback=redact(" ".join(note for note in notes if note)),
            cost_usd=rollout.cost_usd,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringModel:
    """The model whose prompt is searched."""

    ctx: RunContext
    sampler: SamplingClient
    renderer: Any
    sampling: SamplingParams
    client: InferenceClient | None

    async def answer(
        self, prompt: str, tasks: Sequence[HarborTask], *, num_samples: int, purpose: str, finished: JournalledAnswers
    ) -> None:
        """Answer the tasks; each answer goes into `finished` when it is there. A failure of the machine that retries
        did not cure raises: as a wrong answer it would teach the search to avoid a prompt for an outage."""
        if self.client is not None:
            model = ClientModel(self.client, sampling=self.sampling, system_prompt=prompt)
            try:
                groups = await model.roll_out(tasks, num_samples=num_samples, finished=finished)
            finally:
                close = getattr(self.client, "aclose", None)
                if close is not None:
                    await close()
        else:
            assert self.ctx.rollouts is not None
            groups = await self.ctx.rollouts.roll_out(
                tasks,
                sampler=self.sampler,
                renderer=PromptedRenderer(self.renderer, prompt),
                # Finalists are scored on other samples than those they were chosen by.
                sampling=replace(self.sampling, seed=derive_seed(self.sampling.seed, purpose)),
                num_samples=num_samples,
                finished=finished,
            )
        for rollout in (rollout for group in groups for rollout in group):
            if rollout.status in MACHINE_FAILURES:
                raise BackendError(f"row {rollout.task_id} got no answer ({rollout.status}): {rollout.error}")


class CallJournal:
    """Every answer that was paid for, by what was asked: a file with one JSON object a line, appended to."""

    def __init__(self, path: Path, *, keep: bool, hooks: Hooks | None = None) -> None:
        self._hooks = hooks
        self.known: dict[str, Any] = {}
        if keep and path.is_file():
            whole = 0
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break  # a kill in the midst of a line: that answer is asked for again
                entry = json.loads(line)
                self.known[entry["key"]] = entry["value"]
                whole += len(line)
            # The torn line goes, or the next answer would be appended to its half.
            os.truncate(path, whole)
        make_folder(path.parent)
        self.file = path.open("ab" if keep else "wb")

    def add(self, key: str, value: Any) -> None:
        """Keep this; a kill of the process does not lose it, `sync` makes it outlive the machine."""
        if self._hooks and value["cost_usd"]:
            self._hooks.pay(key, value["cost_usd"])
        # One write of a whole line: a kill of this process leaves all of it or a torn end.
        self.file.write(json.dumps({"key": key, "value": value}).encode() + b"\n")
        self.file.flush()
        self.known[key] = value

    def check_budget(self, keys: Iterable[str]) -> None:
        """Cancelled where one of these calls is not known yet, and no more may be paid for."""
        if self._hooks and any(key not in self.known for key in keys):
            self._hooks.check_budget()

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    @staticmethod
    def key(*words: object) -> str:
        return hashlib.sha256(json.dumps(words, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class JournalledAnswers:
    """The journal as a rollout engine sees it (`FinishedRollouts`): answers under one prompt for one purpose."""

    calls: CallJournal
    prompt: str
    purpose: str

    def key(self, task_id: str, sample: int) -> str:
        return CallJournal.key(self.purpose, self.prompt, task_id, sample)

    def find(self, task_id: str, sample: int) -> Rollout | None:
        known = self.calls.known.get(self.key(task_id, sample))
        if known is None:
            return None
        turn = Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=known["text"])
        return Rollout(task_id=task_id, turns=[turn], reward=known["reward"], cost_usd=known["cost_usd"])

    def add(self, task_id: str, sample: int, rollout: Rollout) -> None:
        key = self.key(task_id, sample)
        # An outage is no answer: it is asked again, and not remembered.
        if rollout.status not in MACHINE_FAILURES and key not in self.calls.known:
            self.calls.add(key, asdict(GradedAnswer.from_rollout(rollout)))


class SearchEnded(BaseException):
    """Ends gepa's loop, which catches every Exception; `cause` is why."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A prompt that the search kept."""

    text: str
    score: float
    """Mean reward on the validation rows while searching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalPrompt:
    """The result of the search."""

    text: str
    table: list[Json]
    metrics: dict[str, float]
    about: JsonObject


@dataclass(slots=True, kw_only=True)
class PromptSearch:
    """gepa's adapter, reflecting model, stopper and acceptance rule in one: all of its calls come here."""

    cfg: PromptSearchParams
    ctx: RunContext
    answering: AnsweringModel
    reflecting: InferenceClient
    calls: CallJournal
    train: list[HarborTask]
    val: list[HarborTask]
    asked: set[str] = field(default_factory=set)
    """Keys of the answers that this search asked for: they count, whether the journal had them or not, so that a
    resumed search stops where an undisturbed one does."""
    reflections: int = 0
    step: int = 0
    stale: int = 0
    """Rounds in a row that asked for no new answer."""
    asked_before: int = 0
    best: float = 0.0
    cost_usd: float = 0.0
    scatter: list[float] = field(default_factory=list)
    """Variances of the rewards of one row under one prompt, where there are several."""
    propose_new_texts: None = None
    """gepa looks for this attribute; None leaves proposing to its own signature and our reflecting model."""

    def run(self) -> list[Candidate]:
        """The prompts that gepa kept, the seed first."""
        gepa = need("gepa", extra="gepa")
        try:
            result = gepa.optimize(
                seed_candidate={COMPONENT: self.cfg.seed_prompt},
                trainset=self.train,
                valset=self.val,
                adapter=self,
                reflection_lm=self.reflect,
                reflection_minibatch_size=min(self.cfg.minibatch_size, len(self.train)),
                stop_callbacks=self.is_spent,
                acceptance_criterion=self,
                logger=GepaLog(),
                seed=self.ctx.seed,
                raise_on_exception=True,
                # gepa 0.1.4 mixes up training and validation rows in its cache; ours goes by content.
                cache_evaluation=False,
                run_dir=None,
            )
        except SearchEnded as end:
            raise end.cause from None
        texts = [candidate[COMPONENT] for candidate in result.candidates]
        return [
            Candidate(text=text, score=float(score))
            for text, score in zip(texts, result.val_aggregate_scores, strict=True)
        ]

    def evaluate(self, batch: list[HarborTask], candidate: dict[str, str], capture_traces: bool = False) -> object:
        """gepa's adapter: how well a prompt does on some rows."""
        before = len(self.asked)
        groups = self._guard(lambda: self.answers(candidate[COMPONENT], batch, self.cfg.num_samples, "search"))
        core = need("gepa.core.adapter", extra="gepa")
        return core.EvaluationBatch(
            outputs=[group[0].text for group in groups],
            scores=[sum(one.reward for one in group) / len(group) for group in groups],
            trajectories=[(task, group) for task, group in zip(batch, groups, strict=True)] if capture_traces else None,
            # What gepa counts is what was new: rows it asks for twice are answered from the journal and cost nothing.
            num_metric_calls=len(self.asked) - before,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, str]]]:
        """gepa's adapter: what the reflecting model sees of each row."""
        seen = []
        for task, group in eval_batch.trajectories:
            worst = min(group, key=lambda one: one.reward)
            expected = task.target
            feedback = [f"Score {worst.reward:g}."]
            if expected is not None and worst.reward < 1:
                feedback.append(f"Expected: {expected}")
            if worst.feedback:
                feedback.append(f"The verifier said: {worst.feedback}")
            seen.append(
                {
                    "Inputs": self._cut(content_text(task.instruction)),
                    "Generated Outputs": self._cut(worst.text),
                    "Feedback": self._cut(" ".join(feedback)),
                }
            )
        return dict.fromkeys(components_to_update, seen)

    def reflect(self, prompt: str | list[dict[str, Any]]) -> str:
        """gepa's reflecting model: a rewritten prompt."""

        def answer() -> str:
            key = CallJournal.key("reflect", prompt, self.reflections)
            self.reflections += 1
            self.calls.check_budget([key])
            if key not in self.calls.known:
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                sampling = SamplingParams(
                    max_tokens=self.cfg.reflection_tokens, temperature=self.cfg.reflection_temperature
                )
                said = run_async(_ask_once(self.reflecting, messages, sampling))
                self.calls.add(key, {"text": redact(said.text), "cost_usd": said.cost_usd or 0.0})
                self.calls.sync()
            found = self.calls.known[key]
            self.cost_usd += found["cost_usd"]
            return str(found["text"])

        return self._guard(answer)

    def should_accept(self, proposal: Any, state: object) -> bool:
        """gepa's acceptance rule: better in sum on the minibatch, and by more than the rows' own scatter where that is
        known. gepa's strict improvement on three noisy answers accepts noise."""
        before, after = proposal.subsample_scores_before or [], proposal.subsample_scores_after or []
        gain, rows = sum(after) - sum(before), len(after)
        # Two sums over `rows` means of `num_samples` rewards each, so the variance of their difference is this.
        variance = sum(self.scatter) / len(self.scatter) if self.scatter else 0.0
        needed = self.cfg.acceptance_z * (2 * rows * variance / self.cfg.num_samples) ** 0.5
        return bool(gain > 0 and gain >= needed)

    def is_spent(self, state: Any) -> bool:
        """gepa's stopper, asked before each round: whether another round might exceed the budget. Rounds are the run's
        steps: the last one is logged here and the next one begun."""

        def between_rounds() -> bool:
            scores = [float(score) for score in state.program_full_scores_val_set]
            self.best = max(scores)
            if self.step:
                metrics = {
                    "val_score": self.best,
                    "metric_calls": float(len(self.asked)),
                    "prompts_kept": float(len(scores)),
                    "reflections": float(self.reflections),
                    "cost_usd": self.cost_usd,
                }
                self.ctx.log_store.log_metrics(metrics, self.step)
                if self.ctx.hooks:
                    run_async(self.ctx.hooks.step_end(self.step, metrics, _no_snapshot))
            self.stale = self.stale + 1 if len(self.asked) == self.asked_before else 0
            self.asked_before = len(self.asked)
            each = self.cfg.num_samples
            a_round = 2 * self.cfg.minibatch_size * each + len(self.val) * each
            most = self.ctx.max_steps
            if self.best >= 1.0 or len(self.asked) + a_round > self.cfg.max_metric_calls or self.stale >= STALE_ROUNDS:
                return True
            if (most is not None and self.step >= most) or (self.ctx.hooks and self.ctx.hooks.should_stop()):
                return True
            self.step += 1
            if self.ctx.hooks:
                self.ctx.hooks.step_start(self.step)
            return False

        return self._guard(between_rounds)

    def answers(
        self, prompt: str, tasks: Sequence[HarborTask], num_samples: int, purpose: str
    ) -> list[list[GradedAnswer]]:
        """Answers under a prompt, from the journal where it has them."""
        finished = JournalledAnswers(self.calls, prompt, purpose)
        samples = range(num_samples)
        keys = {task.task_id: [finished.key(task.task_id, sample) for sample in samples] for task in tasks}
        self.calls.check_budget(key for group in keys.values() for key in group)
        distinct = list({task.task_id: task for task in tasks}.values())
        run_async(self.answering.answer(prompt, distinct, num_samples=num_samples, purpose=purpose, finished=finished))
        self.calls.sync()
        groups = [[GradedAnswer(**self.calls.known[key]) for key in keys[task.task_id]] for task in tasks]
        for task, group in zip(tasks, groups, strict=True):
            new = [key for key in keys[task.task_id] if key not in self.asked]
            self.asked.update(new)
            if new:
                self.cost_usd += sum(one.cost_usd for one in group)
            if new and num_samples > 1:
                mean = sum(one.reward for one in group) / num_samples
                self.scatter.append(sum((one.reward - mean) ** 2 for one in group) / (num_samples - 1))
        return groups

    def rescore(self, candidates: list[Candidate]) -> FinalPrompt:
        """Score the best prompts and the seed on new samples and choose: the best of many scores is too high by
        chance, and a new sample is not."""
        searched = len(self.asked)
        seed, others = candidates[0], candidates[1:]
        chosen = [seed, *sorted(others, key=lambda one: -one.score)[: self.cfg.finalists - 1]]
        if len(chosen) == 1:
            scores = [seed.score]
        else:
            groups = [
                self.answers(one.text, self.val, self.cfg.finalist_samples, f"finalist-{number}")
                for number, one in enumerate(chosen)
            ]
            scores = [
                sum(answer.reward for group in found for answer in group) / (len(found) * self.cfg.finalist_samples)
                for found in groups
            ]
        # `max` takes the first of equals: the seed before its successors.
        best = max(range(len(chosen)), key=lambda index: scores[index])
        table: list[Json] = [
            {"prompt": one.text, "search_score": one.score, "score": score, "is_seed": number == 0}
            for number, (one, score) in enumerate(zip(chosen, scores, strict=True))
        ]
        rows = [content_text(task.instruction) for task in self.train]
        copied = copied_share(chosen[best].text, rows)
        outcome = "a finalist scored better than the seed prompt" if best else "no finalist scored better than the seed"
        if seed.score >= 1.0 and not others:
            outcome = "saturated: the seed prompt solves every validation row, so there is nothing to improve"
        elif not self.reflections:
            outcome = "saturated: the seed prompt solved every row that was shown to the reflecting model"
        if copied > 0.2:
            get_logger(__name__).warning(
                "%s: %.0f %% of the prompt's %d-word sequences are copied from training rows; it may know answers "
                "rather than rules",
                self.ctx.run_id,
                100 * copied,
                COPIED_WORDS,
            )
        metrics = {
            "steps": float(self.step),
            "tokens": 0.0,
            "metric_calls": float(searched),
            "finalist_calls": float(len(self.asked) - searched),
            "reflections": float(self.reflections),
            "prompts_kept": float(len(candidates)),
            "seed_score": scores[0],
            "prompt_score": scores[best],
            "copied_share": copied,
            "cost_usd": self.cost_usd,
        }
        about: JsonObject = {
            "outcome": outcome,
            "validation_rows": len(self.val),
            "samples_per_row": self.cfg.finalist_samples if len(chosen) > 1 else self.cfg.num_samples,
            "finalists": table,
        }
        return FinalPrompt(text=chosen[best].text, table=table, metrics=metrics, about=about)

    def _cut(self, text: str) -> str:
        most = self.cfg.feedback_chars
        if len(text) <= most:
            return text
        return f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}"

    def _guard[T](self, work: Callable[[], T]) -> T:
        """Run what gepa called us for; gepa would log an Exception and continue, so it leaves as another kind."""
        try:
            return work()
        except Exception as exc:
            raise SearchEnded(exc) from exc


async def _ask_once(client: InferenceClient, messages: list[dict[str, Any]], sampling: SamplingParams) -> Any:
    try:
        return await ask(client, messages, sampling)
    finally:
        close = getattr(client, "aclose", None)
        if close is not None:
            await close()


async def _no_snapshot() -> Never:
    raise EvsysError("gepa_prompt changes no weights while it searches; score its benchmarks without run_every")


class GepaLog:
    """gepa's own log lines, as debug messages of ours."""

    def log(self, message: str) -> None:
        get_logger(__name__).debug("gepa: %s", shorten(message, 300))


def copied_share(prompt: str, rows: Sequence[str]) -> float:
    """The part of the prompt's sequences of `COPIED_WORDS` words that stand in a training row."""

    def sequences(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[at : at + COPIED_WORDS]) for at in range(len(words) - COPIED_WORDS + 1)}

    own = sequences(prompt)
    if not own:
        return 0.0
    of_rows = set[tuple[str, ...]]().union(*(sequences(row) for row in rows))
    return len(own & of_rows) / len(own)
