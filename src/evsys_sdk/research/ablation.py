"""Which change did it? Leave-one-out arms for an experiment whose arm differs from another in several settings.

In: the record of an experiment. Out: an ordinary experiment with the arms `all`, `without-...` each, and `none`; and a
line per change that says what the verdict allows: it helped, it hurt, it changes nothing, or it is undecided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.config.load import parse_config, plain
from evsys_sdk.config.schema import ExperimentConfig, RunConfig
from evsys_sdk.config.sweep import slug
from evsys_sdk.config.yaml_io import ConfigSource, Document, Origin, remember
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.experiment.outcome import ExperimentResult
from evsys_sdk.format import amount, amount_unit, count, name_list
from evsys_sdk.history.history import ExperimentEntry, read_record
from evsys_sdk.operations.place import HistoryPlace
from evsys_sdk.operations.records import write_note
from evsys_sdk.research.recipes import changes_between
from evsys_sdk.research.state import apply_changes
from evsys_sdk.stats.verdict import Comparison, Verdict

ALL, NONE, WITHOUT = "all", "none", "without-"
FEWEST_SEEDS = 2
MOST_CHANGES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class AblatedChange:
    """What is known of one change."""

    path: str
    value: object
    arm: str
    """The arm that has all changes but this one."""
    comparison: Comparison | None
    """That arm against the one with all changes."""
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationReport:
    """The result of an ablation."""

    experiment: str
    of: str
    changes: list[AblatedChange]
    result: ExperimentResult

    def plain(self) -> dict[str, Any]:
        changes = [asdict(one) for one in self.changes]
        return {"experiment": self.experiment, "of": self.of, "completed": self.result.completed, "changes": changes}

    @property
    def text(self) -> str:
        return " ".join(one.line for one in self.changes)


def ablate_experiment(place: HistoryPlace, ref: str, *, seeds: int | None = None) -> AblationReport:
    """Run the leave-one-out arms of an experiment and note the conclusion on it. The same command resumes it."""
    entry = place.find(ref).entry
    record = read_record(entry)
    folder = Path(str(record.get("config_folder") or "."))
    config = parse_config(Document(label=str(entry.record), data=record.get("config") or {}, lines={}), folder=folder)
    arm, baseline = _compared_arms(config, record, place)
    before, after = _recipe(baseline), _recipe(arm)
    changes = changes_between(before, after)
    if len(changes) < 2:
        what = f"differ in {name_list(list(changes))}" if changes else "are the same"
        raise EvsysError(f"{entry.name}: {arm.name} and {baseline.name} {what}: there is nothing to take apart")
    if len(changes) > MOST_CHANGES:
        raise EvsysError(f"{entry.name}: {len(changes)} settings differ, and an ablation takes at most {MOST_CHANGES}")
    names = _arm_names(changes)
    recipes = {ALL: after}
    for path, name in names.items():
        recipes[name] = apply_changes(before, {other: value for other, value in changes.items() if other != path})
    recipes[NONE] = before
    ablation = _config_of(config, entry, recipes, seeds=seeds)
    result = Experiment(ablation).run(RunOptions())
    verdict = result.conclusion.findings.verdict
    # The arms are judged against `all`: what a change does is what is lost without it.
    found = []
    for path, name in names.items():
        compared = verdict.find(name, ALL) if verdict else None
        line = _change_line(path, compared, verdict)
        found.append(AblatedChange(path=path, value=changes[path], arm=name, comparison=compared, line=line))
    report = AblationReport(experiment=ablation.name, of=entry.name, changes=found, result=result)
    if result.completed and not any(note.text == report.text for note in entry.notes.conclusions):
        write_note(entry, "conclusion", report.text)
    return report


def _compared_arms(
    config: ExperimentConfig, record: Mapping[str, Any], place: HistoryPlace
) -> tuple[RunConfig, RunConfig]:
    """The arm whose changes are taken apart, and the one that it changes: the best arm, else the predicted one, else
    the last, and the baseline arm; of an experiment with one arm, that of its parent."""
    runs = {run.name: run for run in config.all_runs()}
    if len(runs) == 1:
        if config.parent_experiment_id is None:
            raise EvsysError(f"{config.name} has one arm and no parent: there is nothing that it changes")
        parent = place.find(config.parent_experiment_id).entry
        data = read_record(parent)
        own = parse_config(Document(label=parent.name, data=data.get("config") or {}, lines={}), folder=Path("."))
        best = data.get("best_arm")
        others = {run.name: run for run in own.all_runs()}
        return next(iter(runs.values())), others.get(str(best)) or next(iter(others.values()))
    baseline = config.metadata.baseline_arm or next(iter(runs))
    predicted = (record.get("hypothesis_result") or {}).get("arm")
    chosen = next(
        arm for arm in (record.get("best_arm"), predicted, *reversed(runs)) if arm in runs and arm != baseline
    )
    return runs[str(chosen)], runs[baseline]


def _recipe(run: RunConfig) -> JsonObject:
    return {key: value for key, value in plain(run).items() if key not in ("name", "tags", "seed")}


def _arm_names(changes: Mapping[str, object]) -> dict[str, str]:
    """Change -> `without-learning_rate`, with a number where two settings end alike."""
    names: dict[str, str] = {}
    for path in changes:
        short = f"{WITHOUT}{slug(path.rpartition('.')[2])}"
        same = sum(name.partition("--")[0] == short for name in names.values())
        # Two dashes, which no slug has, so that the number is not taken for a part of the name.
        names[path] = f"{short}--{same + 1}" if same else short
    return names


def _config_of(
    config: ExperimentConfig, entry: ExperimentEntry, recipes: Mapping[str, JsonObject], *, seeds: int | None
) -> ExperimentConfig:
    """By default with the seeds of the experiment, whose runs are then reused; two at least."""
    first = config.base_seed if config.base_seed is not None else config.all_runs()[0].seed
    name = f"{config.name}-ablation"
    metadata = config.metadata.model_copy(
        update={
            "hypothesis": f"Of the changes of {config.name}, which did it?",
            "baseline_arm": ALL,
            "tags": list(dict.fromkeys([*config.metadata.tags, "ablation"])),
            # Test tasks are not spent on explaining a result, unless there are no others.
            "benchmark": [one for one in config.metadata.benchmark if one.role != "test"] or config.metadata.benchmark,
        }
    )
    runs = [RunConfig.model_validate({**recipe, "name": arm, "seed": first}) for arm, recipe in recipes.items()]
    update: dict[str, object] = {
        "name": name,
        "description": f"Leave-one-out arms of {config.name}",
        "output_dir": str(entry.record.parent / name),
        "runs": runs,
        "run": None,
        "n_repeats": seeds or max(FEWEST_SEEDS, config.n_repeats),
        "base_seed": first,
        "parent_experiment_id": entry.name,
        "metadata": metadata,
        "budget": None,
        "deploy": None,
        "research": None,
    }
    ablation = config.model_copy(update=update)
    ablation.model_fields_set.difference_update([key for key, value in update.items() if value is None])
    origins = tuple(Origin(prefix=("runs", index)) for index in range(len(runs)))
    folder = Path(str(read_record(entry).get("config_folder") or "."))
    remember(ablation, ConfigSource(label=f"the ablation of {entry.name}", folder=folder, lines={}, origins=origins))
    return ablation


def _change_line(path: str, compared: Comparison | None, verdict: Verdict | None) -> str:
    """What the verdict allows to say of a change, from what its absence does."""
    if compared is None or compared.difference is None or verdict is None:
        return f"{path}: its part is undecided{f', {compared.why}' if compared and compared.why else ''}."
    unit = amount_unit(share=verdict.share, unit=verdict.unit)
    ends = [amount(value, share=verdict.share, unit=verdict.unit, signed=True) for value in
            # The arm lacks the change, so the part of the change has the other sign and its interval is turned round.
            (-compared.difference, -(compared.high or 0.0), -(compared.low or 0.0))]  # fmt: skip
    numbers = f"{ends[0]}{unit}" + ("" if compared.low is None else f", 95 % CI {ends[1]} to {ends[2]}")
    words = {
        "worse": "did it: without it the recipe is worse",
        "better": "hurts: without it the recipe is better",
        "equivalent": "plays no part that matters",
        "undecided": "cannot be distinguished from no change",
    }
    seeds = count(compared.n_seeds[0], "seed")
    return f"{path} {words[compared.verdict]} (its part: {numbers}; {seeds} each)."
