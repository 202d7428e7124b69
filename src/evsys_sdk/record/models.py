"""Typed records: `run_result.json`, written and read by `RunRecord`, and evaluations as plain data.

In: what the runner learned, or a run's directory. Out: the file, written whole, last, and whatever happened; or the
record in it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.data_types import HarborTask, content_text, task_messages
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import read_object, write_json
from evsys_sdk.protocols import EvalResult, Rollout, RunResult, RunStatus, Score, StoppedAt, Turn, of_kept_weights
from evsys_sdk.record.callbacks import steering
from evsys_sdk.record.environment import config_hash, describe_environment
from evsys_sdk.record.lines import StepOrder
from evsys_sdk.redaction import redact_data, redact_rollout
from evsys_sdk.score_names import score_key

if TYPE_CHECKING:
    from evsys_sdk.config.schema import ExperimentConfig, RunConfig
    from evsys_sdk.data.rows import LoadedRows
    from evsys_sdk.eval.benchmark import Benchmark

Stored = dict[str, Any]
"""An object of JSON as `json.loads` returns it, on its way into a class that checks its keys."""

# An evaluation as plain data and back, so that a journal can keep it whole.


def to_data(result: EvalResult) -> Stored:
    """Everything, the transcripts too."""
    return asdict(replace(result, rollouts=[])) | {"rollouts": [rollout_to_data(one) for one in result.rollouts]}


def from_data(data: Stored) -> EvalResult:
    """What `to_data` was given."""
    breakdown = {
        key: {value: [Score(**score) for score in scores] for value, scores in parts.items()}
        for key, parts in data["breakdown"].items()
    }
    scores = [Score(**score) for score in data["scores"]]
    rollouts = [rollout_from_data(one) for one in data["rollouts"]]
    return EvalResult(**{**data, "scores": scores, "breakdown": breakdown, "rollouts": rollouts})


def rollout_to_data(rollout: Rollout) -> Stored:
    """One rollout; its long lists are passed as they are, not copied, and its error and metadata hold no secrets."""

    def shallow(record: Rollout | Turn) -> Stored:  # `asdict` would copy the lists of tokens
        return {field.name: getattr(record, field.name) for field in fields(record)}

    return redact_rollout(shallow(rollout) | {"turns": [shallow(turn) for turn in rollout.turns]})


def rollout_from_data(data: Stored) -> Rollout:
    return Rollout(**{**data, "turns": [Turn(**turn) for turn in data["turns"]]})


LONGEST_METADATA = 200
"""Characters of a value of a task's metadata that is kept with what the task asked."""


def question_to_data(task: HarborTask) -> dict[str, object]:
    """What a task asked, as messages with a role and a text, the answer that its verifier expected, and the short
    values of its metadata, by which scores are broken down."""
    messages = [{"role": one["role"], "text": content_text(one.get("content") or "")} for one in task_messages(task)]
    short = {
        key: value
        for key, value in task.metadata.items()
        # Scores are broken down by these; a long text divides tasks into groups of one.
        if isinstance(value, str | int | float) and len(str(value)) <= LONGEST_METADATA
    }
    return {"messages": messages, "expected": task.target, **({"metadata": short} if short else {})}


def in_order(evals: Sequence[EvalResult]) -> list[EvalResult]:
    """By step and name, however they came in beside the training."""
    order = StepOrder()
    for one in evals:
        order.note(one.step, f"{one.split}/{one.name}")
    return [evals[place] for place in order.places()]


def plain_settings(config: BaseModel) -> Stored:
    """Given settings as plain data."""
    return config.model_dump(exclude_unset=True)


def eval_summary(result: EvalResult) -> dict[str, object]:
    """An evaluation as records have it: without its transcripts and clusters, which the journal keeps."""
    summary = asdict(replace(result, rollouts=[], clusters={}))
    for key in ("rollouts", "clusters", "clustered_by"):
        del summary[key]
    return {**summary, "seconds": round(result.seconds, 3)}


RecordedEvals = Annotated[list[EvalResult], PlainSerializer(lambda evals: [eval_summary(one) for one in evals])]
"""Evaluations in a record; those that are read back have no rollouts."""


class RecordFile(BaseModel):
    """A record that is a file: the class that writes it reads it."""

    @classmethod
    def path_in(cls, place: Path) -> Path:
        """The file; `place` is the file itself unless a subclass says otherwise."""
        return place

    @classmethod
    def upgrade(cls, data: object) -> object:
        """What is in the file, in the form of this version."""
        return data

    @classmethod
    def load(cls, place: Path) -> Self | None:
        """The record at `place`, None where there is none; EvsysError where it cannot be read."""
        path = cls.path_in(place)
        try:
            # Not `model_validate_json`, which refuses half a surrogate pair: texts of models hold some.
            return cls.model_validate(cls.upgrade(json.loads(path.read_bytes())))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise EvsysError(f"{path} cannot be read: {say_unreadable(exc)}") from exc

    @classmethod
    def find(cls, place: Path) -> Self | None:
        """The record at `place`; None where there is none that can be read."""
        try:
            return cls.load(place)
        except EvsysError:
            return None


def say_unreadable(exc: OSError | ValueError) -> str:
    """Why a record cannot be read, in one line: the first place that does not fit."""
    if not isinstance(exc, ValidationError):
        return getattr(exc, "strerror", None) or str(exc)
    first = exc.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


class RecordedData(BaseModel):
    """Which rows a data block was."""

    place: str
    """In the config: `data`, `continual.stages[0].data`."""
    source: str
    sha256: str
    """Of the source."""
    rows_read: int
    rows: int
    """After the transforms."""
    content: str = ""
    """Hash of the rows after the transforms, whatever their order; empty in records of older versions."""


class RecordedBenchmark(BaseModel):
    """Which tasks a benchmark was."""

    name: str
    sha256: str
    tasks: int


class RunEnvironment(BaseModel):
    """What a result depended on besides its settings."""

    python: str = ""
    platform: str = ""
    packages: dict[str, str] = Field(default_factory=dict)
    git: dict[str, object] | None = None
    config_hash: str = ""
    data: list[RecordedData] = Field(default_factory=list)
    benchmarks: list[RecordedBenchmark] = Field(default_factory=list)


OF_RESULT = (
    "run_id", "seed", "status", "metrics", "artifacts", "evals", "error", "warnings", "unread_settings", "leakage",
    "stopped_early", "stopped_at", "paused_at", "chosen_steps",
)  # fmt: skip
"""Fields that a `RunRecord` and a `RunResult` share, by one name."""


_STEP_OF_WEIGHTS = re.compile(r"step-(\d+)(?:-[^/]*)?")


def chosen_from_weights(data: Stored) -> dict[str, int]:
    """`chosen_steps` of a run whose record is older than that field: the step in the name of its final weights, where
    it trained further. Empty for runs with stages or phases, whose numbers of steps have a prefix."""
    metrics, artifacts = data.get("metrics"), data.get("artifacts")
    if data.get("status") != "completed" or not isinstance(metrics, dict) or not isinstance(artifacts, dict):
        return {}
    weights = str(artifacts.get("final_sampler") or artifacts.get("final_checkpoint") or "")
    named, steps = _STEP_OF_WEIGHTS.match(weights.rpartition("/")[2]), metrics.get("steps")
    # A run that kept its last step has chosen nothing.
    return {"": int(named[1])} if named and isinstance(steps, int | float) and int(named[1]) < steps else {}


class RunRecord(RecordFile):
    """`run_result.json`. What a record of an older version does not have is empty."""

    run_id: str = ""
    experiment: str = ""
    run: str = ""
    """The run's name in the config."""
    seed: int | None = None
    status: RunStatus = "failed"
    metrics: dict[str, int | float] = Field(default_factory=dict)
    """NaN and infinities are strings in the file, and numbers here."""
    artifacts: dict[str, str] = Field(default_factory=dict)
    evals: RecordedEvals = Field(default_factory=list)
    error: str | None = None
    traceback: str | None = None
    warnings: list[str] = Field(default_factory=list)
    unread_settings: list[str] = Field(default_factory=list)
    leakage: list[Stored] = Field(default_factory=list)
    stopped_early: str | None = None
    stopped_at: StoppedAt | None = None
    paused_at: int | None = None
    chosen_steps: dict[str, int] = Field(default_factory=dict)
    notes: Stored = Field(default_factory=dict)
    """`RunResult.extras` of the algorithm."""
    options: dict[str, int | None] = Field(default_factory=dict)
    """How the run was cut short on purpose: `--steps`, `--dry`."""
    hparams: Stored = Field(default_factory=dict)
    """The run's settings, as far as they were given."""
    environment: RunEnvironment = Field(default_factory=RunEnvironment)
    reused_from: str | None = None
    started: str = ""
    ts: str = ""
    """When it ended."""
    seconds: float = 0.0

    @classmethod
    def path_in(cls, place: Path) -> Path:
        """The file in a run's directory."""
        return place / RUN_RESULT_FILE

    @classmethod
    def upgrade(cls, data: object) -> object:
        """Earlier versions had three of the fields among the notes, and did not name the chosen steps."""
        if not isinstance(data, dict):
            return data
        notes = data.get("notes")
        if "chosen_steps" not in data:
            data["chosen_steps"] = chosen_from_weights(data)
        if isinstance(notes, dict) and "paused_at" not in data:
            types = {"stopped_early": str, "stopped_at": dict, "paused_at": int}
            data |= {key: notes.pop(key) for key, kind in types.items() if isinstance(notes.get(key), kind)}
        return data

    def write(self, run_dir: Path) -> None:
        write_json(run_dir / RUN_RESULT_FILE, self.model_dump(warnings=False))

    def to_result(self, run_dir: Path, evals: list[EvalResult]) -> RunResult:
        """The result as `Experiment.run` returns it; `evals` come from the journal, with their rollouts."""
        return RunResult(
            **{
                **{name: getattr(self, name) for name in OF_RESULT},
                "metrics": dict(self.metrics),
                "evals": evals,
                "extras": self.notes,
                "run_name": self.run,
                "run_dir": run_dir,
                # Says that the result was read, not made now: it costs and logs nothing again.
                "finished_before": self.ts,
                "reused_from": self.reused_from,
            }
        )


class RecordPart(BaseModel):
    """A part of an experiment's record. A null stands for the field's default; keys not known here are kept."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        # Fields whose default is None may be null; of all others a null of an older version means "not set".
        full = {key for key, field in cls.model_fields.items() if field.default is not None}
        return {key: value for key, value in data.items() if value is not None or key not in full}


class RecordedRun(RecordPart):
    """One run in an experiment's record; the run's own is a `RunRecord`."""

    run_id: str
    status: RunStatus = "failed"
    metrics: dict[str, int | float] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    error: str | None = None
    evals: RecordedEvals = Field(default_factory=list)
    chosen_steps: dict[str, int] = Field(default_factory=dict)
    run_dir: str | None = None
    reused_from: str | None = None
    """The directory of the run that stands in for this one, as seen from the record's."""

    @model_validator(mode="before")
    @classmethod
    def _name_chosen_steps(cls, data: object) -> object:
        """A record of an earlier version does not name them."""
        if isinstance(data, dict) and "chosen_steps" not in data:
            return data | {"chosen_steps": chosen_from_weights(data)}
        return data

    def last_scores(self) -> dict[str, Score]:
        """The scores of the final weights, by their keys; where a run broke off, those of its last evaluations."""
        found: dict[str, Score] = {}
        for one in reversed(of_kept_weights(self.evals, self.chosen_steps)):
            # Step 0 is the untrained model: no score of what was trained.
            for score in one.scores if one.step != 0 else ():
                found.setdefault(score_key(one.split, one.name, score.metric), score)
        return found

    def last_score(self, key: str) -> Score | None:
        """The score of the final weights by this metric; where a run broke off, that of its last evaluation."""
        return self.last_scores().get(key)


class RecordedArm(RecordPart):
    """One arm over its seeds."""

    arm: str
    statuses: list[RunStatus] = Field(default_factory=list)
    scores: list[float] = Field(default_factory=list)
    """The success metric of each seed that has one."""
    evidence: list[str] = Field(default_factory=list)
    why_unranked: str | None = None
    errors: list[str] = Field(default_factory=list)
    training_mark: str = ""


class RecordedComparison(RecordPart):
    """An arm against the baseline or the untrained model, as far as history needs it."""

    verdict: str | None = None
    more_tasks: int | None = None
    more_seeds: int | None = None
    more_of_both: list[int] | None = None
    more_templates: int | None = None


class JudgedArm(RecordPart):
    """An arm in the verdict."""

    arm: str = ""
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n_tasks: int = 0
    n_seeds: int = 1
    verdict: str | None = None
    vs_baseline: RecordedComparison | None = None
    vs_untrained: RecordedComparison | None = None
    why_unranked: str | None = None


class RecordedWinner(RecordPart):
    expected: float | None = None


class RecordedVerdict(RecordPart):
    """The verdict, as far as readers of records need it."""

    arms: list[JudgedArm] = Field(default_factory=list)
    mode: Literal["max", "min"] | None = None
    share: bool | None = None
    constant: float | None = None
    baseline_arm: str | None = None
    winner: RecordedWinner | None = None


class FirstVerdict(RecordPart):
    """What an experiment said when it ended."""

    baseline_arm: str | None = None
    best_arm: str | None = None


class JudgedAgain(RecordPart):
    """`evsys judge` with another baseline, after the end."""

    baseline_arm: str
    ts: str
    first: FirstVerdict | None = None


class RecordedLooks(RecordPart):
    """How often this question was asked before."""

    count: int = 1
    before: list[str] = Field(default_factory=list)
    """Names of the experiments that looked before."""
    set_aside: int = 0
    rerolls: int = 0
    """Attempts that `--fresh` set aside; of these, those with other seeds or scores."""
    arms: dict[str, str] = Field(default_factory=dict)
    """Arm -> hash of its settings and data."""
    tasks: dict[str, Stored] = Field(default_factory=dict)
    seeds: dict[str, list[int]] = Field(default_factory=dict)
    """Arm -> the seeds that have a score."""
    left_out: list[str] = Field(default_factory=list)
    """Tasks and seeds that earlier looks had and this one has not: `10 of 50 tasks of first (when)`."""

    @property
    def warnings(self) -> list[str]:
        """Why the verdict's level does not hold; none where it does."""
        if not self.left_out:
            return []
        return [
            f"Warning: the level of this verdict does not hold. Left out or changed after their scores were known: "
            f"{'; '.join(self.left_out)}. Leaving out what went badly makes any arm win: compare on all of them, or on "
            "new tasks."
        ]


class RecordedOptions(RecordPart):
    max_steps: int | None = None
    dry: bool = False


class ExperimentRecord(RecordPart, RecordFile):
    """`<experiment>.experiment_result.json`. What a record of another version does not have is empty."""

    experiment: str
    name: str = ""
    """Equal to `experiment`; what `evsys run --json` prints has both."""
    description: str = ""
    version: int | None = None
    """Of the config's schema."""
    status: str = ""
    output_dir: str = ""
    tags: list[str] = Field(default_factory=list)
    hypothesis: str | Stored = ""
    parent_experiment_id: str | None = None
    options: RecordedOptions = Field(default_factory=RecordedOptions)
    contents: dict[str, str] = Field(default_factory=dict)
    """Hashes of the rows, tasks and code that the settings name."""
    started: str | None = None
    ts: str | None = None
    seconds: float | None = None
    best_arm: str | None = None
    conclusion: str = ""
    verdict: RecordedVerdict = Field(default_factory=RecordedVerdict)
    hypothesis_result: Stored = Field(default_factory=dict)
    hypothesis_in_words: str = ""
    judged_again: JudgedAgain | None = None
    looks: RecordedLooks = Field(default_factory=RecordedLooks)
    arms: list[RecordedArm] = Field(default_factory=list)
    models: list[Stored] = Field(default_factory=list)
    budget: Stored | None = None
    leakage: list[Stored] = Field(default_factory=list)
    search: Stored | None = None
    test_selection: list[Stored] = Field(default_factory=list)
    unread_settings: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    runs: list[RecordedRun] = Field(default_factory=list)
    """Arm by arm, seed by seed."""
    config: Stored = Field(default_factory=dict)
    config_folder: str = ""

    @model_validator(mode="before")
    @classmethod
    def _name(cls, data: object) -> object:
        return {"experiment": data["name"], **data} if isinstance(data, dict) and data.get("name") else data

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as the file and `--json` have it; what was not set is left out."""
        # Without what was not set: a record that is read and written again stays as it was.
        return self.model_dump(exclude_unset=True, warnings=False)

    def write(self, path: Path) -> None:
        write_json(path, self.as_dict())

    def runs_of(self) -> list[tuple[RecordedArm, list[RecordedRun]]]:
        """Every arm with its runs."""
        # Arms and runs are two lists in one order; an arm has as many runs as statuses.
        runs = iter(self.runs)
        return [(arm, list(islice(runs, len(arm.statuses)))) for arm in self.arms]


@dataclass(slots=True)
class RunRecorder:
    """Collects what becomes the run's record while it trains; `write` ends it."""

    experiment: ExperimentConfig
    run: RunConfig
    run_id: str
    run_dir: Path
    folder: Path
    """Where the config lies; its git commit is recorded."""
    started: float = field(default_factory=time.time)
    traceback: str | None = None
    data: list[RecordedData] = field(default_factory=list)
    evals: list[EvalResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    benchmarks: dict[str, Benchmark] = field(default_factory=dict)
    """Label -> the benchmark that was scored."""
    leakage: list[Stored] = field(default_factory=list)
    """What the rows have in common with benchmarks: an audit per data block and benchmark."""
    options: dict[str, int | None] = field(default_factory=dict)
    """How the run was cut short on purpose: `--steps`, `--dry`."""

    def add_data(self, place: str, loaded: LoadedRows, content: str) -> None:
        """Note which rows went in: where from, how many, the hash of their source, and that of the rows themselves."""
        self.data.append(
            RecordedData(
                place=place,
                source=str(loaded.source),
                sha256=loaded.sha256,
                rows_read=loaded.n_raw,
                rows=len(loaded.rows),
                content=content,
            )
        )

    def hyperparams(self) -> dict[str, object]:
        return {
            "experiment": self.experiment.name,
            "run": self.run.name,
            "model": self.run.model.name,
            "backend": self.run.backend.kind,
            "algorithm": self.run.algorithm.kind,
            "params": redact_data(dict(self.run.algorithm.params)),
            "seed": self.run.seed,
            "tags": list(self.run.tags),
        }

    def shared_settings(self) -> dict[str, object]:
        """Settings of the experiment that reach every run: where data is read, what it is scored on, who steers it."""
        given = plain_settings(self.experiment)
        # How many at a time, how often a lost call is made, and who else is scored, changes nothing about this run.
        beside = ("models", "n_concurrent", "max_attempts")
        entries = given.get("metadata", {}).get("benchmark")
        scored = entries and [{key: entry[key] for key in entry if key not in beside} for entry in entries]
        steered = steering(given.get("callbacks", []))
        shared = {"data_store": given.get("data_store"), "benchmark": scored}
        return {**shared, "callbacks": steered} if steered else shared

    def config_hash(self) -> str:
        """A hash of the settings of this run; the other arms do not count."""
        settings = plain_settings(self.run)
        return config_hash({"run": settings, "experiment": self.shared_settings(), **self.options})

    def write(self, result: RunResult, *, unread: list[str]) -> RunResult:
        """Complete `result` and write the record."""
        result.run_dir, result.run_name, result.seed = self.run_dir, self.run.name, self.run.seed
        result.evals, result.unread_settings, result.leakage = self.evals, unread, self.leakage
        result.warnings = [f"unread setting: {path}" for path in unread] + self.warnings
        finished = time.time()
        environment = RunEnvironment(
            **describe_environment(self.folder),
            config_hash=self.config_hash(),
            data=self.data,
            benchmarks=[
                RecordedBenchmark(name=label, sha256=found.sha256, tasks=len(found.tasks))
                # Sorted: in which order benchmarks were scored depends on time.
                for label, found in sorted(self.benchmarks.items())
            ],
        )
        # Not validated: an algorithm may put anything into its notes, and the record is written whatever happened.
        RunRecord.model_construct(
            **{name: getattr(result, name) for name in OF_RESULT},
            experiment=self.experiment.name,
            run=self.run.name,
            traceback=self.traceback,
            notes=result.extras,
            options=self.options,
            hparams=plain_settings(self.run),
            environment=environment,
            started=_clock(self.started),
            ts=_clock(finished),
            seconds=round(finished - self.started, 3),
        ).write(self.run_dir)
        return result


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def read_prompt(artifacts: dict[str, str], run_dir: Path | None = None) -> str | None:
    """The system prompt that a run left as its artifact `prompt`; None where it left none. `run_dir` is where the run
    is now: its directory may have been moved since."""
    path = artifacts.get("prompt")
    if path is None:
        return None
    # A run directory may be copied: the file beside the record is then the one that is meant.
    moved = run_dir / Path(path).name if run_dir is not None else None
    found = read_object(moved if moved is not None and moved.exists() else Path(path))
    text = (found or {}).get("system_prompt")
    if not isinstance(text, str):
        raise EvsysError(f"{path}: no prompt can be read from it; run the search again")
    return text
