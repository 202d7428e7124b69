"""What each tool takes, and the command that it equals.

In: arguments of a client. Out: the same, checked, or as words of a command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1)]
NAMED = "name of the experiment, the beginning of its name, or the path of its record in the project"


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [f"{flag}={value}" for value in values]


def _option(flag: str, value: object) -> list[str]:
    return [] if value is None else [f"{flag}={value}"]


def _flags(arguments: ToolArguments, *names: str) -> list[str]:
    return [f"--{name}" for name in names if getattr(arguments, name)]


def _after(*words: str | None) -> list[str]:
    """Positional words; behind `--` where one could be taken for an option."""
    given = [word for word in words if word is not None]
    return ["--", *given] if any(word.startswith("-") for word in given) else given


class ToolArguments(BaseModel):
    """What a tool takes."""

    model_config = ConfigDict(extra="forbid")

    def words(self) -> list[str]:
        """The words of the command that prints the same, after `evsys`."""
        raise NotImplementedError


class HistoryArguments(ToolArguments):
    tags: list[Name] = Field(default=[], description="only experiments with all of these tags")
    statuses: list[Name] = Field(
        default=[],
        description="only these: completed, partial, failed, cancelled, running, interrupted, invalid, unreadable",
    )
    metrics: list[Name] = Field(
        default=[], description="only experiments with an arm that meets these, e.g. pass@1>=0.5 or final_loss<0.1"
    )
    limit: int | None = Field(default=None, ge=1, description="at most so many, newest first")

    def words(self) -> list[str]:
        conditions = [*_each("--tag", self.tags), *_each("--status", self.statuses), *_each("--metric", self.metrics)]
        return ["history", *conditions, *_option("--limit", self.limit), "--json"]


class ContextArguments(ToolArguments):
    tokens: int = Field(default=4000, ge=1, description="the answer has at most so many tokens")
    tags: list[Name] = Field(default=[], description="only experiments with this tag")

    def words(self) -> list[str]:
        return ["context", f"--tokens={self.tokens}", *_each("--tag", self.tags), "--json"]


class ShowArguments(ToolArguments):
    experiment: Name | None = Field(default=None, description=f"{NAMED}; default: the newest")

    def words(self) -> list[str]:
        return ["show", "--json", *_after(self.experiment)]


class CompareArguments(ToolArguments):
    experiments: list[Name] = Field(
        min_length=1, description="names of experiments, the baseline first; name:arm for one arm"
    )
    metric: Name | None = Field(default=None, description="judge by this metric; default: the success metric")

    def words(self) -> list[str]:
        return ["compare", *_option("--metric", self.metric), "--json", *_after(*self.experiments)]


class ListArguments(ToolArguments):
    registry: Name | None = Field(default=None, description="only this registry, e.g. algorithms; default: all")

    def words(self) -> list[str]:
        return ["list", "--json", *_after(self.registry)]


class SchemaArguments(ToolArguments):
    kind: Name | None = Field(
        default=None,
        description="a registry such as algorithm or backend, or config for the whole YAML; default: names",
    )
    name: Name | None = Field(default=None, description="one extension of that registry, e.g. sft; default: all of it")

    def words(self) -> list[str]:
        return ["schema", "--json", *_after(self.kind, self.name)]


class ValidateArguments(ToolArguments):
    path: Name = Field(description="the experiment's YAML file, in the project")
    overrides: list[Name] = Field(default=[], description="settings to change, each a.b=value")
    strict: bool = Field(default=False, description="settings that nothing reads are errors")

    def words(self) -> list[str]:
        return ["validate", *_each("--set", self.overrides), *_flags(self, "strict"), "--json", *_after(self.path)]


class RolloutsArguments(ToolArguments):
    experiment: Name | None = Field(
        default=None, description="name of the experiment, or <experiment>/<run>; default: the newest"
    )
    failed: bool = Field(default=False, description="only rollouts with an error or a reward below 1")
    tasks: list[Name] = Field(default=[], description="only these task ids")
    arms: list[Name] = Field(default=[], description="only these arms or runs")
    benchmark: Name | None = Field(default=None, description="only this benchmark, e.g. val/tools")
    step: Name | None = Field(
        default=None,
        description="evaluation at this step: 0 is the untrained model, all is every one; default: the last",
    )
    train: bool = Field(default=False, description="rollouts that the run was trained on, not evaluations")
    limit: int = Field(default=10, ge=1, le=200, description="at most so many rollouts")

    def words(self) -> list[str]:
        only = [*_flags(self, "failed", "train"), *_each("--task", self.tasks), *_each("--arm", self.arms)]
        only += [*_option("--benchmark", self.benchmark), *_option("--step", self.step), f"--limit={self.limit}"]
        return ["rollouts", "--no-test", *only, "--json", *_after(self.experiment)]


class FollowArguments(ToolArguments):
    experiment: Name = Field(description=NAMED)
    since: int = Field(default=0, ge=0, description="the cursor of the last answer; 0 for all events")
    limit: int = Field(default=50, ge=1, le=1000, description="at most so many events")

    def words(self) -> list[str]:
        return ["follow", f"--since={self.since}", f"--limit={self.limit}", "--json", *_after(self.experiment)]


class LaunchArguments(ToolArguments):
    path: Name = Field(description="the experiment's YAML file, in the project")
    overrides: list[Name] = Field(default=[], description="settings to change, each a.b=value")
    steps: int | None = Field(default=None, ge=1, description="at most so many training steps per run")
    dry: bool = Field(default=False, description="rehearse: 2 steps, 4 tasks, results under <output_dir>/dry")
    fresh: bool = Field(default=False, description="start every run again instead of reusing and resuming")
    fork: bool = Field(
        default=False, description="where settings have changed since the launch, run a child experiment"
    )
    strict: bool = Field(default=False, description="settings that nothing reads are errors")

    def words(self) -> list[str]:
        how = [
            *_each("--set", self.overrides),
            *_option("--steps", self.steps),
            *_flags(self, "dry", "fresh", "fork", "strict"),
        ]
        return ["run", "--detach", *how, "--json", *_after(self.path)]


class StopArguments(ToolArguments):
    experiment: Name = Field(description=NAMED)
    now: bool = Field(default=False, description="interrupt the current step instead of finishing it")
    timeout: float = Field(default=20.0, ge=0, le=60, description="wait so many seconds for its end; 0 only asks")

    def words(self) -> list[str]:
        return ["stop", *_flags(self, "now"), f"--timeout={self.timeout:g}", "--json", *_after(self.experiment)]


class ConcludeArguments(ToolArguments):
    experiment: Name = Field(description=NAMED)
    text: Name = Field(description="what the result means and what to try next, for the readers of the record")

    def words(self) -> list[str]:
        return ["conclude", f"--text={self.text}", "--json", *_after(self.experiment)]
