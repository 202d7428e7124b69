"""What an extension must answer. Any class with these methods will do; there is nothing to inherit.

In: nothing. Out: one Protocol per extension point, and the records that pass between the stages
(`RunContext` in, `RunResult` out; `Rollout`, `TaskScores`, `EvalResult` on the way).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from evsys_sdk.data_types import HarborTask, Message
    from evsys_sdk.training_api import SamplingClient, SamplingParams, Tokenizer

Row = dict[str, Any]
RunStatus = Literal["completed", "failed", "cancelled", "pruned"]
"""`pruned`: left behind by a search at some step, on purpose and with a whole record."""
RolloutStatus = Literal["ok", "agent_error", "infra_error", "timeout", "cancelled"]
MODEL_FAILURES: tuple[RolloutStatus, ...] = ("agent_error", "timeout")
"""What the model did wrong: a failure with a reward, in scores and in training, or a policy learns to break what is not
counted."""
MACHINE_FAILURES: tuple[RolloutStatus, ...] = ("infra_error", "cancelled")
"""What says nothing of the model: an error in the denominator of scores, left out of training, made again on resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedAt:
    """Where a run was stopped (Ctrl-C, `evsys stop`, a spent budget)."""

    step: int
    total_steps: int | None
    checkpoint_step: int
    """The step of the newest checkpoint; 0 if there is none."""
    resumes: bool = True
    """False for an algorithm that cannot resume inside its training (TRL's trainers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedAt:
    """At which step, and by which score, a search pruned a run."""

    step: int | None
    metric: str
    value: float | None


@dataclass(slots=True, kw_only=True)
class RunResult:
    """The result of one run: `train` returns the fields up to `extras`, the runner fills in the others."""

    run_id: str
    status: RunStatus
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    """Name -> path or address, e.g. `final_checkpoint`."""
    error: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    """Notes of the algorithm, which the record keeps; the SDK puts nothing here."""
    run_name: str = ""
    seed: int | None = None
    run_dir: Path | None = None
    evals: list[EvalResult] = field(default_factory=list)
    """Every evaluation of the run, by step."""
    warnings: list[str] = field(default_factory=list)
    unread_settings: list[str] = field(default_factory=list)
    leakage: list[dict[str, Any]] = field(default_factory=list)
    """What the rows have in common with benchmarks: an audit per data block and benchmark."""
    stopped_early: str | None = None
    """Why training ended before its last step: what a callback said."""
    stopped_at: StoppedAt | None = None
    paused_at: int | None = None
    """The step at which a search paused the run."""
    chosen_steps: dict[str, int] = field(default_factory=dict)
    """Stage (`""` for a run without stages) -> the step whose weights it ended with, where `best_by` chose them."""
    pruned: PrunedAt | None = None
    resumed: bool = False
    """An earlier process had begun the run."""
    finished_before: str | None = None
    """When the run ended (ISO time), if an earlier process carried it out."""
    reused_from: str | None = None
    """The directory of the identical run of another experiment that this result is."""
    worker: str = ""
    """The machine that carried the run out, where that was another one."""

    @property
    def name(self) -> str:
        """How messages call the run."""
        return self.run_name or self.run_id

    @property
    def final_evals(self) -> list[EvalResult]:
        """The evaluations without those of weights that `best_by` did not keep: of several on one benchmark the last
        is the score of the run."""
        return of_kept_weights(self.evals, self.chosen_steps)


@runtime_checkable
class EvalAtStep(Protocol):
    """Which weights were evaluated?"""

    @property
    def step(self) -> int | None: ...
    @property
    def stage(self) -> str | None: ...


def of_kept_weights[E: EvalAtStep](evals: Iterable[E], chosen_steps: Mapping[str, int]) -> list[E]:
    """The evaluations up to the step whose weights a stage ended with, and those made after training: a later step of
    the loop was scored on weights that were not kept."""
    return [one for one in evals if one.step is None or one.step <= chosen_steps.get(one.stage or "", one.step)]


@dataclass(slots=True, kw_only=True)
class RunContext:
    """Everything an algorithm needs, and nothing else reaches it."""

    run_id: str
    output_dir: Path
    config: Any
    """The parsed ExperimentConfig."""
    data_store: DataStore
    log_store: LogStore
    backend: Backend
    extras: dict[str, Any] = field(default_factory=dict)
    """`train_rows`, `n_train_rows`, `backend_handles`, `model_name`, `tags`, and whatever a project adds."""
    seed: int = 42
    max_steps: int | None = None
    """A ceiling from the command line (`--steps`, `--dry`); None leaves the recipe's own."""
    start_from: str | None = None
    """Saved weights to begin with (`model.load_checkpoint_path`, or the previous stage of a chain)."""
    stage: str | None = None
    """Name of the stage, in a continual chain."""
    resume: bool = False
    """An earlier attempt at this run was interrupted; its checkpoints lie in `output_dir`, to resume from."""
    replaying: bool = False
    """Callbacks are called now for what that attempt did."""
    rollouts: RolloutEngine | None = None
    hooks: Hooks | None = None
    """Loop events: an algorithm that calls them gets callbacks and in-loop evaluation for free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """A verifier's judgement of one completion."""

    reward: float
    info: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: the exact tokens the model read and wrote."""

    prompt_tokens: list[int]
    completion_tokens: list[int]
    logprobs: list[float]
    text: str
    observation: str = ""
    """What the model was shown since its turn before, for people to read: results of its tools, or the user's next
    message. Empty for the first turn, whose prompt is the task's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One try of the model at one task."""

    task_id: str
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    """None until a verifier has looked; never 0 for a verifier that broke."""
    status: RolloutStatus = "ok"
    error: str | None = None
    seconds: float = 0.0
    cost_usd: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def completion(self) -> str:
        return self.turns[-1].text if self.turns else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """What is known of one task after all its rollouts; metrics fold a list of these into a number."""

    task_id: str
    rewards: list[float]
    """One per rollout. An errored rollout counts as a failure (0.0) here and in `n_errors`."""
    predictions: list[str] = field(default_factory=list)
    target: Any = None
    n_errors: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    rollouts: list[Rollout] = field(default_factory=list)
    """The rollouts themselves, for metrics of what they took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One metric on one set of tasks, as far as it can be believed."""

    metric: str
    value: float | None = None
    """None when the eval is invalid: everything errored, or the metric raised."""
    low: float | None = None
    high: float | None = None
    """95 % interval over tasks; None where it cannot be had (fewer than two tasks)."""
    n_tasks: int = 0
    n_rollouts: int = 0
    n_errors: int = 0
    error: str | None = None
    unit: str = ""
    """Of the value, where the metric has one: `s`, `USD`, `tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation of one set of weights on one set of tasks."""

    name: str
    split: str
    """`val`, `test` or `eval`: the first part of the metric's name in the logs."""
    scores: list[Score]
    step: int | None = None
    """The training step of the weights; None for the finished run."""
    stage: str | None = None
    """The stage of a continual chain after which this was measured."""
    start: str = ""
    """At step 0, the saved weights that the run starts from (`load_checkpoint_path`); empty for the base model."""
    on_training_rows: bool = False
    """The tasks are rows that the run trains on: the scores say what was memorised, not how new tasks are done."""
    n_training_tasks: int = 0
    """Tasks of the benchmark that appear in the rows that the run trains on, where that was looked for."""
    breakdown: dict[str, dict[str, list[Score]]] = field(default_factory=dict)
    """metadata key -> its value -> scores."""
    clusters: dict[str, str] = field(default_factory=dict)
    """task_id -> the template it was made from, where tasks are not independent; intervals count templates."""
    clustered_by: str = ""
    """How that is known: `metadata key topic`, `task ids`, `task texts`."""
    rollouts: list[Rollout] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def training_mark(self) -> str:
        """`on training rows` or `3 tasks in training rows`, to stand beside every score; empty where neither holds."""
        return training_mark(self.on_training_rows, self.n_training_tasks)


def training_mark(on_training_rows: bool, n_training_tasks: int) -> str:
    """How a score on tasks that the run trained on is marked."""
    if on_training_rows:
        return "on training rows"
    s = "" if n_training_tasks == 1 else "s"
    return f"{n_training_tasks:,} task{s} in training rows" if n_training_tasks else ""


@runtime_checkable
class Algorithm(Protocol):
    """How do the rows become better weights?"""

    name: ClassVar[str]

    def train(self, ctx: RunContext) -> RunResult: ...


@runtime_checkable
class Verifier(Protocol):
    """How good is this completion? (The class form; plain functions are the usual one.)"""

    def verify(self, *, prompt: Any, completion: str, target: Any) -> VerificationResult | float: ...


@runtime_checkable
class VerifierFunction(Protocol):
    """How good is this output?"""

    def __call__(self, model_output: str, expected: Any, params: dict[str, Any]) -> float: ...


@runtime_checkable
class Metric(Protocol):
    """What one number do these rewards make? One inner list per task."""

    def compute(self, task_rewards: Sequence[Sequence[float]]) -> float: ...


@runtime_checkable
class DataStore(Protocol):
    """Where do rows come from and go to?"""

    def read_jsonl(self, path: str) -> Iterable[Row]: ...
    def write_jsonl(self, path: str, rows: Iterable[Row]) -> None: ...
    def read_json(self, path: str) -> Any: ...
    def write_json(self, path: str, value: object) -> None: ...
    def exists(self, path: str) -> bool: ...
    def list(self, prefix: str = "") -> list[str]: ...


@runtime_checkable
class LogStore(Protocol):
    """Where do a run's numbers go?"""

    def log_scalar(self, name: str, value: float, step: int) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...
    def log_hyperparams(self, hparams: dict[str, object]) -> None: ...
    def log_artifact(self, name: str, path: str) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """Where does the model live while it trains?"""

    def prepare(self, *, model: Any, run_dir: Path) -> dict[str, Any]:
        """Handles for this run; handles["service"] is the TrainingService where there is one."""
        ...

    def teardown(self, handles: dict[str, Any]) -> None: ...


@runtime_checkable
class InferenceClient(Protocol):
    """What does a model answer to this prompt?"""

    def generate(self, *, prompt: Any, max_tokens: int, temperature: float, stop: Sequence[str] | None) -> str: ...


@runtime_checkable
class Transform(Protocol):
    """What rows should these rows become?"""

    def __call__(self, rows: list[Row]) -> list[Row]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCase:
    """One fixed prompt, and what the scored weights make of it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of every token but the first, given those before it."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens in the last place, with their log probabilities, for targets that score no prompt."""
    greedy: str
    """How the weights complete the text at temperature 0, for targets that give no log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What tells the scored weights from others: log probabilities on fixed prompts, from the backend that scored."""

    cases: tuple[ProbeCase, ...]
    contrast: float | None = None
    """The largest difference to the untrained base model on these prompts. A probe whose tolerance is not below it
    cannot tell the trained weights from the base model. None: the base model was not asked."""
    precision: Literal["float32", "backend"] = "backend"
    """Of the arithmetic: `float32`, or whatever the backend computes with, which may be bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArtifact:
    """Weights that are to be deployed, and what is known of them."""

    name: str
    """Content-addressed: the experiment's slug and the beginning of the digest. Never used for other weights."""
    digest: str
    """sha256 of the weights."""
    experiment: str
    arm: str
    run: str
    run_dir: Path
    base_model: str
    backend: str
    """Where the weights live: `local`, `tinker`, `mock`."""
    checkpoint: str
    """The sampler weights that were scored: a folder, or a path of the backend."""
    fingerprint: Fingerprint
    card: str
    """The model card, in Markdown: data, recipe, scores, verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Weights at a target."""

    kind: str
    name: str
    digest: str
    endpoint: str
    """Where they are: a URL, or a path."""
    alias: str = ""
    """The name that callers use; it moves from one deployment to the next."""
    time: str = ""
    replaced: str | None = None
    """The name of the deployment that had the alias before; None where it was the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What a probe compared, and what came of it."""

    compared: Literal["logprobs", "tokens", "files", "nothing"]
    """`tokens`: greedy completions, where a target gives no log probabilities. `files`: checksums, where nothing
    answers."""
    ok: bool | None
    """None: nothing could be compared."""
    detail: str
    difference: float | None = None
    """The largest one between two log probabilities."""
    tolerance: float | None = None


@runtime_checkable
class Deployer(Protocol):
    """How do these weights get to where they are used?

    The order of a deployment: `current`, `deploy`, `probe`, `route`, `retire` of what was replaced. A failed probe
    retires the new weights instead, and the alias stays where it was."""

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        """Bring the weights to the target under their own name; callers of the alias do not get them yet."""
        ...

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        """Compare what answers at the target with the weights that were scored."""
        ...

    def route(self, deployment: Deployment) -> None:
        """Let callers of the alias have these weights from now on, in one step."""
        ...

    def retire(self, name: str) -> None:
        """Take weights away; requests that are under way finish."""
        ...

    def current(self) -> Deployment | None:
        """What callers of the alias get now; None before the first deployment."""
        ...


@runtime_checkable
class Agent(Protocol):
    """How does the model work on a task? (A harbor BaseAgent.)"""

    async def setup(self, environment: Any) -> None: ...
    async def run(self, instruction: str, environment: Any, context: Any) -> None: ...


@runtime_checkable
class Launcher(Protocol):
    """Where do the runs of an experiment execute?"""

    def execute(self, plan: Any) -> RunResult:
        """Carry out one run (a `RunPlan`) and leave its record. Called from `max_concurrent_arms` threads at once."""
        ...

    def close(self) -> None:
        """The experiment is over."""
        ...


@runtime_checkable
class Callback(Protocol):
    """Who wants to know? Every hook is optional; one that raises is reported and the others are called.

    Order: on_experiment_start, then per run on_run_start, on_train_start, (on_step, on_eval, on_checkpoint)*,
    on_train_end, on_eval (final ones), on_run_end, and at last on_experiment_end. A run that a search pauses ends as
    `pruned`; if it is resumed, it starts again and its steps are replayed, as after an interruption.

    A hook whose one parameter is called `event` gets an event object instead (`on_step(self, event: StepEvent)`), with
    the arguments below as its fields.

    One that leaves runs as they are says so with a class attribute `only_watches = True`; any other counts as part of
    what a run is.
    """

    def on_experiment_start(self, experiment: Any) -> None: ...
    def on_run_start(self, ctx: RunContext) -> None: ...
    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None: ...
    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None: ...
    def on_checkpoint(self, ctx: RunContext, step: int, path: str) -> None: ...
    def on_eval(self, ctx: RunContext, result: EvalResult) -> None: ...
    def on_train_end(self, ctx: RunContext, metrics: dict[str, float]) -> None: ...
    def on_run_end(self, ctx: RunContext, result: RunResult) -> None: ...
    def on_experiment_end(self, results: list[RunResult]) -> None: ...


@dataclass(frozen=True, slots=True)
class RunEvent:
    """What all events of a run have."""

    ctx: RunContext


@dataclass(frozen=True, slots=True)
class ExperimentStartEvent:
    experiment: Any


@dataclass(frozen=True, slots=True)
class RunStartEvent(RunEvent):
    pass


@dataclass(frozen=True, slots=True)
class TrainStartEvent(RunEvent):
    total_steps: int | None


@dataclass(frozen=True, slots=True)
class StepEvent(RunEvent):
    step: int
    """Counted from 1."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointEvent(RunEvent):
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class EvalEvent(RunEvent):
    result: EvalResult


@dataclass(frozen=True, slots=True)
class TrainEndEvent(RunEvent):
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunEndEvent(RunEvent):
    result: RunResult


@dataclass(frozen=True, slots=True)
class ExperimentEndEvent:
    results: list[RunResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """What the outside needs to know of a checkpoint."""

    step: int
    state: str = ""
    sampler: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    """Training ended with them."""
    planned: bool = True
    """False for weights that are saved only because the run was stopped at their step."""


@runtime_checkable
class Hooks(Protocol):
    """The loop's line to the outside; the runner fans it out to callbacks, progress and evaluators."""

    def train_start(self, total_steps: int | None) -> None: ...

    def step_start(self, step: int) -> None:
        """Before the work on optimiser step `step`. Raises Cancelled when the user wants to stop, or when the
        experiment may spend no more."""
        ...

    async def step_end(self, step: int, metrics: dict[str, float], snapshot: Snapshot) -> None:
        """After optimiser step `step` (1-based). Raises Cancelled when the user wants to stop."""
        ...

    def pay(self, call: str, usd: float) -> None:
        """Training paid a service for a call, such as a hosted model's answer; each call is paid for once."""
        ...

    def check_budget(self) -> None:
        """Before training asks a service. Raises Cancelled when the user wants to stop or the budget is spent."""
        ...

    def checkpoint(self, step: int, path: str, *, planned: bool = True) -> None:
        """Weights and optimiser of `step` are saved; `planned` is False if they are only there to resume from."""
        ...

    def flush(self) -> None:
        """Make everything that was reported so far durable: a checkpoint rests on it."""
        ...

    def recorded_steps(self) -> int:
        """How many steps an earlier attempt reported of which the record has no gap, counted from the start."""
        ...

    async def resumed(self, last: KeptWeights) -> None:
        """After train_start of a resumed run: the steps up to this checkpoint were done before (step 0: none)."""
        ...

    def best(self, metric: str, mode: Literal["max", "min"], *, after: int = 0) -> tuple[int, float] | None:
        """The step, later than `after`, whose weights scored best in the loop, and their score."""
        ...

    async def train_end(self, metrics: dict[str, float]) -> None:
        """Waits for the evaluations that have not ended."""
        ...

    def should_stop(self) -> str | None:
        """The reason a callback gave for stopping early, if one did."""
        ...


@runtime_checkable
class Snapshot(Protocol):
    """Makes a sampler over the weights as they are now, when one is needed."""

    def __call__(self) -> Awaitable[SamplingClient]: ...


@runtime_checkable
class Renderer(Protocol):
    """The one way chat becomes tokens, for training and evaluation alike."""

    tokenizer: Tokenizer

    def prompt(self, messages: list[Message]) -> list[int]:
        """Tokens up to where the assistant is to speak."""
        ...

    def conversation(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        """Tokens of the whole chat and, per token, 1 where the assistant wrote it."""
        ...

    def sequences(self, messages: list[Message], *, last_only: bool = False) -> list[tuple[list[int], list[int]]]:
        """`conversation` for each assistant turn (or the last) in the context it was written in: usually one sequence,
        more where the template shows earlier turns differently once later ones follow."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """Which agent works on the tasks, and with what settings."""

    kind: str
    """A registered name, a harbor agent's name, or where the class is: `my_project.agents.ToolUse` or with a colon."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor; plain JSON, since harbor writes them down."""


SANDBOX = "sandbox"
"""The environment on this machine, which needs no engine and no key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """Where a task that needs an environment finds one."""

    kind: str = SANDBOX
    """`sandbox`, one of harbor's types (`docker`, `e2b`, ...), or where the class is."""
    params: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class FinishedRollouts(Protocol):
    """Which rollouts of this evaluation are done? Those that an interrupted process finished are not made again."""

    def find(self, task_id: str, sample: int) -> Rollout | None: ...

    def add(self, task_id: str, sample: int, rollout: Rollout) -> None:
        """Keep it for good; one that is there already stays as it is."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """What does the model do with these tasks?"""

    async def roll_out(
        self,
        tasks: Sequence[HarborTask],
        *,
        sampler: SamplingClient,
        renderer: Renderer,
        sampling: SamplingParams,
        num_samples: int = 1,
        agent: AgentSpec | None = None,
        finished: FinishedRollouts | None = None,
    ) -> list[list[Rollout]]:
        """One list per task, in order. A failure is a Rollout with a status, not an exception; only an agent that
        cannot be had at all is one. Without an agent the model answers once, in the chat the task describes."""
        ...
