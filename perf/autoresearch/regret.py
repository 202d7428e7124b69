"""How far from the best does a proposer end, next to Optuna's TPE and to chance?

In: nothing; the surfaces are made up (`surfaces.py`). Out: a table (or `--json`) and
`perf/results/autoresearch_regret.json`; exit code 1 when a goal is missed. Every proposer gets the same surfaces, the
same first trial and the same noise for the same recipe, and 60 trials. Its regret is the best true score there is minus
the true score of the trial with the best measured score. TPE runs in four forms (plain, or multivariate with groups;
failures left out, or counted as the worst score so far), and evolve is compared with the one whose median over all
seeds of a group of families is best.

    python perf/autoresearch/regret.py --seeds 50        # half an hour on two cores
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoresearch.surfaces import CONDITIONAL, HELD_OUT, NUMERIC, TRANSFORMS, Surface, make_surface
from evsys_sdk.data_types import JsonObject
from evsys_sdk.files import write_json
from evsys_sdk.research.proposers.evolve import Evolve
from evsys_sdk.research.recipes import with_values
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import (
    Decision,
    Proposal,
    ResearchState,
    Trial,
    TrialCost,
    apply_changes,
)

RESULTS = Path(__file__).parents[1] / "results" / "autoresearch_regret.json"
TRIALS = 60
FIRST_SEED = 1000
"""Evolve was developed on seeds below it."""
SLOTS = 4
"""Places of the list of transforms, as TPE sees it."""
TPE = ("tpe", "tpe_failed_worst", "tpe_group", "tpe_group_failed_worst")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What one proposer reached on one surface."""

    proposer: str
    family: str
    seed: int
    regret: float
    regret_at_20: float
    failed_after_20: float
    """Share of the trials after the first 20 that failed."""
    illegal: int
    seconds: float
    """Of a proposal, on average."""


Ask = Callable[[list[Trial]], JsonObject | Proposal | None]


def run(name: str, family: str, seed: int, trials: int = TRIALS) -> Finish:
    """One proposer on one surface."""
    surface = make_surface(family, seed)
    ask = {"random": ask_chance, "evolve": ask_evolve}.get(name, ask_tpe)(surface, seed, name)
    done = [_trial(0, Proposal(parent=0, changes={}, claim="", operator="config"), surface.start, surface, -1.0)]
    illegal, seconds = 0, 0.0
    while len(done) < trials:
        start = time.perf_counter()
        answer = ask(done)
        seconds += time.perf_counter() - start
        if answer is None:
            break
        if isinstance(answer, Proposal):
            recipe, proposal = apply_changes(done[answer.parent].recipe, answer.changes), answer
        else:
            recipe, proposal = answer, Proposal(parent=0, changes={}, claim="", operator=name)
        illegal += bool(surface.space.check(recipe))
        best = max((one.score for one in done if one.score is not None), default=-1.0)
        done.append(_trial(len(done), proposal, recipe, surface, best))
    late = done[20:]
    return Finish(
        proposer=name, family=family, seed=seed, regret=_regret(surface, done),
        regret_at_20=_regret(surface, done[:20]), failed_after_20=sum(one.score is None for one in late) / len(late),
        illegal=illegal, seconds=seconds / max(len(done) - 1, 1),
    )  # fmt: skip


def _regret(surface: Surface, trials: list[Trial]) -> float:
    scored = [one for one in trials if one.score is not None]
    best = max(scored, key=lambda one: one.score or 0.0)
    return surface.best - surface.true_score(best.recipe)


def _trial(number: int, proposal: Proposal, recipe: JsonObject, surface: Surface, best: float) -> Trial:
    score = surface.measure(recipe, 0)
    decision: Decision | None = None
    if score is not None:
        decision = "first" if number == 0 else "kept" if score > best else "discarded"
    return Trial(
        number=number, proposal=proposal, proposer=proposal.operator, recipe=recipe, score=score, n_seeds=1,
        status="failed" if score is None else "completed", decision=decision,
        cost=TrialCost(steps=surface.steps(recipe)),
    )  # fmt: skip


def ask_chance(surface: Surface, seed: int, name: str) -> Ask:
    rng = random.Random(f"chance/{seed}")
    return lambda done: surface.space.sample(rng)


def ask_evolve(surface: Surface, seed: int, name: str) -> Ask:
    proposer = Evolve()

    def ask(done: list[Trial]) -> Proposal | None:
        state = ResearchState(
            trials=done, metric="val.pass@1", direction="max", noise=surface.noise, max_score=1.0,
            trials_left=TRIALS - len(done),
        )  # fmt: skip
        return proposer.propose(state, surface.space, random.Random(f"evolve/{seed}/{len(done)}"))

    return ask


def ask_tpe(surface: Surface, seed: int, name: str) -> Ask:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    group = "group" in name
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=group, group=group)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    asked: list[Any] = []

    def ask(done: list[Trial]) -> JsonObject:
        if asked:
            score = done[-1].score
            if score is not None:
                study.tell(asked[-1], score)
            elif "worst" in name:
                study.tell(asked[-1], min((one.score for one in done if one.score is not None), default=0.0))
            else:
                study.tell(asked[-1], state=optuna.trial.TrialState.FAIL)
        trial = study.ask()
        asked.append(trial)
        return _drawn(trial, surface.space)

    return ask


def _drawn(trial: Any, space: Space) -> JsonObject:
    """The recipe that Optuna chooses, define-by-run."""
    kinds = space.kinds["algorithm"]
    kind = trial.suggest_categorical("kind", sorted(kinds)) if len(kinds) > 1 else next(iter(kinds))
    recipe = space.swap_kind(space.base, "algorithm", kind)
    if space.lists:
        names: list[str] = []
        for slot in range(SLOTS):
            name = trial.suggest_categorical(f"slot{slot}", ["none", *sorted(TRANSFORMS)])
            if name != "none" and name not in names:
                names.append(name)
        recipe = with_values(recipe, {"data.transforms": [{"kind": name, "params": {}} for name in names]})
    seen: set[str] = set()
    while waiting := {path: one for path, one in space.tunables(recipe).items() if path not in seen}:
        for path, setting in sorted(waiting.items(), key=lambda item: not item[1].values):
            name = space.dimension(recipe, path)
            if setting.values:
                value: object = trial.suggest_categorical(f"{kind}/{name}", list(setting.values))
            elif setting.whole:
                value = trial.suggest_int(name, int(setting.low), int(setting.high), log=setting.log)
            else:
                value = trial.suggest_float(name, setting.low, setting.high, log=setting.log)
            recipe = with_values(recipe, {path: value})
        seen |= set(waiting)
    return recipe


def summary(finishes: list[Finish]) -> dict[str, Any]:
    """Evolve against chance and the best TPE, by groups of families."""
    groups = {
        "conditional": CONDITIONAL,
        "numeric": NUMERIC,
        "conditional, held-out families": tuple(name for name in CONDITIONAL if name in HELD_OUT),
        "numeric, held-out families": tuple(name for name in NUMERIC if name in HELD_OUT),
    } | {name: (name,) for name in (*CONDITIONAL, *NUMERIC)}
    return {group: of_group(finishes, families) for group, families in groups.items()}


def of_group(finishes: list[Finish], families: tuple[str, ...]) -> dict[str, Any]:
    by = {
        name: {(one.family, one.seed): one for one in finishes if one.proposer == name and one.family in families}
        for name in ("random", *TPE, "evolve")
    }
    medians = {name: statistics.median([one.regret for one in found.values()]) for name, found in by.items() if found}
    forms = [name for name in TPE if name in medians]
    if "evolve" not in medians or not forms:
        return {}
    best_tpe = min(forms, key=lambda name: medians[name])
    ours, chance = by["evolve"], by["random"]
    # A seed is one surface of each family: evolve beats chance where the mean over the families is lower.
    seeds = sorted({seed for _, seed in ours})
    wins = [
        sum(one.regret for key, one in ours.items() if key[1] == seed)
        < sum(one.regret for key, one in chance.items() if key[1] == seed)
        for seed in seeds
    ]
    pairs = [key for key in ours if key in by[best_tpe]]
    return {
        "seeds": len(seeds),
        "surfaces": len(ours),
        "median_regret": {name: round(value, 4) for name, value in medians.items()},
        "best_tpe": best_tpe,
        "ratio_to_best_tpe": round(medians["evolve"] / max(medians[best_tpe], 1e-9), 3),
        "better_than_best_tpe": round(sum(ours[k].regret < by[best_tpe][k].regret for k in pairs) / len(pairs), 3),
        "seeds_better_than_random": round(sum(wins) / len(wins), 3),
        "surfaces_better_than_random": round(sum(ours[k].regret < chance[k].regret for k in ours) / len(ours), 3),
        "failed_after_20": {
            name: round(statistics.mean([one.failed_after_20 for one in found.values()]), 3)
            for name, found in by.items() if found
        },
        "illegal": {name: sum(one.illegal for one in found.values()) for name, found in by.items() if found},
        "ms_per_proposal": {
            name: round(1000 * statistics.median([one.seconds for one in found.values()]), 1)
            for name, found in by.items() if found
        },
    }  # fmt: skip


def goals(groups: dict[str, Any]) -> dict[str, bool]:
    conditional, numeric = groups["conditional"], groups["numeric"]
    both = (conditional, numeric)
    return {
        "median regret <= 0.75 x TPE, conditional": conditional["ratio_to_best_tpe"] <= 0.75,
        "median regret <= 1.05 x TPE, numeric": numeric["ratio_to_best_tpe"] <= 1.05,
        "beats random in >= 95 % of seeds": all(one["seeds_better_than_random"] >= 0.95 for one in both),
        "failed after the first 20 <= 12 %": all(one["failed_after_20"]["evolve"] <= 0.12 for one in both),
        "illegal configs: 0": all(one["illegal"]["evolve"] == 0 for one in both),
    }


def _of_seed(seed: int) -> tuple[str, str]:
    return CONDITIONAL[seed % len(CONDITIONAL)], NUMERIC[seed % len(NUMERIC)]


def _run(job: tuple[str, str, int]) -> Finish:
    return run(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--rotate", action="store_true", help="one conditional and one numeric family for each seed")
    parser.add_argument("--families", nargs="*", default=[*CONDITIONAL, *NUMERIC])
    parser.add_argument("--proposers", nargs="*", default=["random", *TPE, "evolve"])
    parser.add_argument("--raw", type=Path, help="file of single results: read where it has them, and written")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-write", action="store_true", help="leave the results file as it is")
    args = parser.parse_args()
    jobs = [
        (name, family, seed)
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for family in (_of_seed(seed) if args.rotate else args.families)
        for name in args.proposers
    ]
    known: dict[tuple[str, str, int], Finish] = {}
    if args.raw and args.raw.exists():
        for line in args.raw.read_text().splitlines():
            one = Finish(**json.loads(line))
            known[one.proposer, one.family, one.seed] = one
    finishes = [known[job] for job in jobs if job in known]
    with ProcessPoolExecutor(args.workers) as pool:
        for one in pool.map(_run, [job for job in jobs if job not in known], chunksize=4):
            finishes.append(one)
            if args.raw:
                with args.raw.open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    groups = summary(finishes)
    result = {
        "trials": TRIALS, "first_seed": args.first_seed, "seeds": args.seeds, "python": platform.python_version(),
        "held_out_families": list(HELD_OUT), "groups": groups,
    }  # fmt: skip
    met = goals(groups) if all(groups[name] for name in ("conditional", "numeric")) else {}
    result["goals"] = met
    if not args.no_write:
        write_json(RESULTS, result)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for group, found in groups.items():
            if found:
                print(f"{group:<32}{found['ratio_to_best_tpe']:>7} x {found['best_tpe']:<24}"
                      f"random {found['seeds_better_than_random']:<6} failed {found['failed_after_20']['evolve']:<6}"
                      f" {found['median_regret']} {found['ms_per_proposal']['evolve']} ms")  # fmt: skip
        for name, is_met in met.items():
            print("met   " if is_met else "MISSED", name)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
