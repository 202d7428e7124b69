"""What do the plugin's verbs spare an agent, next to the plain files of the same experiments?

In: nothing; a scripted agent tries recipes of a made-up task (`worlds.py`) and forgets everything between two steps, as
an agent does whose context was cut. Out: `perf/results/autoresearch_verbs.json` and a table. Before each step it reads
what was tried, within one window of tokens, and proposes a change of the best that it knows, no recipe that it knows.
Three ways to read: what `evsys context` prints; the experiments' folders, newest first, config and record; and, more
than an agent can count on, of each folder the config and one line with the score. Records are written in the
engine's form and are smaller than real ones, which favours plain files. Tokens are the estimate of `evsys context`.

    python perf/autoresearch/verbs.py --seeds 50
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from autoresearch.keeps import resampled, share_of
from autoresearch.worlds import PARAMS, World, make_hill
from evsys_sdk.files import write_json
from evsys_sdk.history.context import context_text, count_tokens
from evsys_sdk.history.history import read_history
from evsys_sdk.research.state import apply_changes

RESULTS = Path(__file__).parents[1] / "results" / "autoresearch_verbs.json"
STEPS, WINDOW, ASKED = 60, 8000, 6000
"""Trials; tokens that an agent can read before each; what `evsys context` is asked for (`--tokens`)."""
MENU = {
    "learning_rate": (1e-4, 1e-3, 1e-5, 1e-2),
    "lora_rank": (8, 16, 32, 4),
    "lr_schedule": ("cosine", "linear", "constant"),
    "x0": (0.5, 0.25, 0.75),
}
"""Values that the agent thinks of, the favourite first."""
LOOKS = 60
Tried = dict[tuple[Any, ...], float]
Reader = Callable[[Path], tuple[Tried, int]]


def settings_of(params: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(params[name] for name in MENU)


def read_records(folder: Path) -> tuple[Tried, int]:
    """Configs and records, newest first, as many as the window holds."""
    return _read_files(folder, lambda record: record.read_text())


def read_configs(folder: Path) -> tuple[Tried, int]:
    """Configs and a line with the score each, newest first."""
    return _read_files(folder, lambda record: f"pass@1 {_score_of(record):.3f}")


def _read_files(folder: Path, about: Callable[[Path], str]) -> tuple[Tried, int]:
    found: Tried = {}
    used = 0
    for one in sorted(folder.iterdir(), reverse=True):
        record = one / f"{one.name}.experiment_result.json"
        params, tokens = params_of(one / "config.yaml")
        tokens += tokens_of(about(record))
        if used + tokens > WINDOW:
            break
        used += tokens
        found[settings_of(params)] = max(_score_of(record), found.get(settings_of(params), 0.0))
    return found, used


# What does not change between two steps is read once by this program, and paid for by the agent at each.
tokens_of = cache(count_tokens)


@cache
def params_of(config: Path) -> tuple[dict[str, Any], int]:
    """The params of a config, and how many tokens the file has."""
    text = config.read_text()
    return yaml.safe_load(text)["run"]["algorithm"]["params"], count_tokens(text)


@cache
def _score_of(record: Path) -> float:
    return float(json.loads(record.read_text())["runs"][0]["metrics"]["val/hill/pass@1"])


CHANGE = re.compile(r"(\w+) (\S+) -> ([^\s,]+)")
KEPT = re.compile(r"^- (?:before, )?val/hill/pass@1: ([\d.]+).* (try_\d+), ")
OTHER = re.compile(
    r"^- (?:is )?(?:try_\d+)(?: \w+ \w+)?(?: better)?(?: as good)?[?:] .*?([\d.]+) against .* of (try_\d+)"
)
TRIED = re.compile(r"^- try_\d+ \(.*; against (try_\d+): (.*)\)\. .*pass@1 ([\d.]+)")


def read_context(folder: Path) -> tuple[Tried, int]:
    """What `evsys context` prints, and the config of the best that it names; more tokens where lines were left out."""
    history = read_history(None, [folder])
    text = context_text(history, ASKED)
    used = count_tokens(text)
    found: Tried = {}
    params: dict[str, Any] = {}
    bests: dict[str, dict[str, Any]] = {}
    """Name -> params of what was the best at its time."""
    for line in text.splitlines():
        if kept := KEPT.match(line):
            if not params:
                params, tokens = params_of(folder / kept[2] / "config.yaml")
                used += tokens
            bests[kept[2]] = params
            found[settings_of(params)] = float(kept[1])
            # The one before it had the old values.
            params = params | {name: yaml.safe_load(old) for name, old, _ in CHANGE.findall(line)}
        elif (other := OTHER.match(line)) or (tried := TRIED.match(line)):
            score, before, told = (other[1], other[2], line) if other else (tried[3], tried[1], tried[2])
            new = {name: yaml.safe_load(new) for name, _, new in CHANGE.findall(told)}
            if before in bests:
                found[settings_of(_numbers(bests[before] | new))] = float(score)
    return found, used


def _numbers(params: dict[str, Any]) -> dict[str, Any]:
    """YAML takes 1e-05 for a word."""
    return params | {"learning_rate": float(params["learning_rate"])}


READERS: dict[str, Reader] = {"verbs": read_context, "records": read_records, "configs": read_configs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One research with one way to read."""

    duplicates: int
    tokens: int
    """Per step."""
    regret: float


def research(world: World, read: Reader, seed: int, folder: Path) -> Reading:
    rng, tried, tokens, duplicates = random.Random(f"verbs/{seed}"), Tried(), 0, 0
    start = tuple(values[-1] for values in MENU.values())
    write_trial(folder, 0, start, score_of(world, start))
    tried[start] = score_of(world, start)
    for number in range(1, STEPS):
        known, used = read(folder)
        tokens += used
        idea = think(known or {start: 0.0}, rng)
        duplicates += idea in tried
        tried[idea] = score_of(world, idea)
        write_trial(folder, number, idea, tried[idea])
    best = max(true_score(world, one) for one in ideas())
    reached = true_score(world, max(tried, key=lambda one: tried[one]))
    return Reading(duplicates=duplicates, tokens=tokens // (STEPS - 1), regret=best - reached)


def think(known: Tried, rng: random.Random) -> tuple[Any, ...]:
    """A change of one or two settings of the best that is known; favourites are likelier."""
    best = max(known, key=lambda one: known[one])
    for _ in range(LOOKS):
        idea = list(best)
        for place in rng.sample(range(len(MENU)), 1 if rng.random() < 0.6 else 2):
            values = [*MENU.values()][place]
            idea[place] = rng.choices(values, [1 / (rank + 1) for rank in range(len(values))])[0]
        if tuple(idea) not in known:
            return tuple(idea)
    return rng.choice([one for one in ideas() if one not in known] or ideas())


def ideas() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for values in MENU.values():
        found = [(*one, value) for one in found for value in values]
    return found


def recipe_of(world: World, settings: tuple[Any, ...]) -> Any:
    return apply_changes(world.start, {f"{PARAMS}{name}": v for name, v in zip(MENU, settings, strict=True)})


def true_score(world: World, settings: tuple[Any, ...]) -> float:
    recipe = recipe_of(world, settings)
    return 0.0 if world.fails(recipe) else world.true_score(recipe)


def score_of(world: World, settings: tuple[Any, ...]) -> float:
    """One run's; 0 where it fails."""
    recipe = recipe_of(world, settings)
    return 0.0 if world.fails(recipe) else statistics.fmean(world.answers(recipe, 42).values())


def write_trial(folder: Path, number: int, settings: tuple[Any, ...], score: float) -> None:
    """What an experiment of one run leaves: config and record."""
    name = f"try_{number:03d}"
    run = {
        "name": "base",
        "data": {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]},
        "model": {"name": "made-up"},
        "algorithm": {"kind": "sft", "params": {**dict(zip(MENU, settings, strict=True)), "max_steps": 250}},
        "backend": {"kind": "local"},
    }
    benchmark = [{"name": "hill", "path": "data/val", "split": "val"}]
    config = {"name": name, "metadata": {"success_metric": {"name": "pass@1"}, "benchmark": benchmark}, "run": run}
    value = {"metric": "pass@1", "value": score, "low": score - 0.06, "high": score + 0.06, "n_tasks": 200}
    value |= {"n_rollouts": 200, "n_errors": 0, "error": None}
    one = {"name": "hill", "split": "val", "step": None, "stage": None, "scores": [value], "breakdown": {}}
    record = {
        "experiment": name, "tags": [], "hypothesis": "This points uphill.", "seconds": 60.0, "name": name,
        "options": {"max_steps": None, "dry": False}, "contents": {"tasks of val/hill": "a" * 64}, "best_arm": "base",
        "ts": f"2026-11-01T{10 + number // 60:02d}:{number % 60:02d}:00.000+00:00",
        "conclusion": f"base: completed, pass@1 {score:.3f}",
        "arms": [{"arm": "base", "statuses": ["completed"], "scores": [score], "errors": []}],
        "runs": [{
            "run_id": f"{name}/base", "status": "completed", "artifacts": {}, "error": None, "evals": [one],
            "metrics": {"val/hill/pass@1": score, "final_loss": 1 - score, "steps": 250.0}, "run_dir": "base",
        }],
        "config": config,
    }  # fmt: skip
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / name / f"{name}.experiment_result.json").write_text(json.dumps(record, indent=1))


def of_seed(seed: int) -> dict[str, Reading]:
    found = {}
    for name, read in READERS.items():
        with tempfile.TemporaryDirectory(prefix="evsys-verbs-") as folder:
            found[name] = research(make_hill(seed), read, seed, Path(folder))
    return found


def measure(seeds: int, workers: int) -> dict[str, list[Reading]]:
    with ProcessPoolExecutor(workers) as pool:
        each = [*pool.map(of_seed, range(seeds))]
    return {name: [one[name] for one in each] for name in READERS}


def summarise(found: dict[str, list[Reading]]) -> dict[str, Any]:
    n = len(found["verbs"])
    result: dict[str, Any] = {"seeds": n, "steps": STEPS, "window": WINDOW, "ideas": len(ideas())}
    for name, readings in found.items():
        result[name] = {
            "duplicates": share_of(sum(one.duplicates for one in readings), n * (STEPS - 1)),
            "tokens_per_step": round(statistics.fmean(one.tokens for one in readings)),
            "median_regret": round(statistics.median(one.regret for one in readings), 4),
        }
    for name in ("records", "configs"):
        for what in ("duplicates", "tokens"):
            ours, theirs = ([getattr(one, what) for one in found[which]] for which in ("verbs", name))
            result[name][f"fewer_{what}_with_verbs"] = resampled(
                range(n),
                lambda drawn, ours=ours, theirs=theirs: (
                    1 - sum(ours[i] for i in drawn) / max(sum(theirs[i] for i in drawn), 1)
                ),
            )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    result = summarise(measure(args.seeds, args.workers)) | {"python": platform.python_version()}
    write_json(RESULTS, result)
    print(json.dumps(result, indent=2))
    against = result["records"]
    return int(
        against["fewer_duplicates_with_verbs"]["value"] < 0.9 or against["fewer_tokens_with_verbs"]["value"] <= 0
    )


if __name__ == "__main__":
    sys.exit(main())
