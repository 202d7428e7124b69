"""How fast the local engine trains and samples, beside what one would use without it.

In: nothing (SmolLM2-135M, fetched once; `evsys model pull` does it beforehand). Out: a table, perf/results/train.json
and train.md; exit code 1 when a goal is missed. Every contestant has a separate process, they take turns, and ratios
are of medians within this one run.

    python perf/train.py               # under 15 minutes on 2 idle cores
    python perf/train.py --quick       # about a minute: fewer turns, fewer contests
    python perf/train.py --threads 1   # on a busy machine: CPU seconds are counted, which others cannot stretch
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contest.gguf_file import write_gguf
from contest.rows import BATCH, EQUAL, MIXED
from contest.sample import NEW_TOKENS, PROMPT_TOKENS
from contest.turns import MAX_OTHERS, Contestant, Score, Turn, score, take_turns
from mock_step import GOAL_MS
from mock_step import measure as measure_mock_step

from evsys_engine.models import find_model
from evsys_engine.models.cache import cache_folder
from evsys_sdk.files import write_json, write_text

RESULTS = Path(__file__).parent / "results"
MODEL = "smollm2-135m-instruct"
OTHERS = cache_folder().parent / "perf"
LLAMA_CPP = OTHERS / "llama-cpp" / "bin" / "python"
ARMS, ARMS_GOAL = 4, 1.5
SFT_GOALS = {"equal": {"trl": 1.3, "bare": 0.9}, "mixed": {"trl": 2.0, "bare": 0.9}}
SAMPLE_GOALS = {8: {"generate": 1.5}, 32: {"generate": 1.5}}
WORDS = {
    "equal": f"SFT, {BATCH} rows of {EQUAL} tokens",
    "mixed": f"SFT, {BATCH} rows of {MIXED[0]} to {MIXED[1]} tokens",
    "engine": "this engine",
    "trl": "TRL SFTTrainer",
    "bare": "bare torch + PEFT",
    "generate": "transformers generate",
    "llama.cpp": "llama.cpp, fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table."""

    work: str
    who: str
    value: str
    peak_mb: float | None = None
    ratio: float | None = None
    """The engine's speed over this one's; for arms, their memory over one arm's."""
    goal: float | None = None
    met: bool | None = None


@dataclass(slots=True)
class Contest:
    """The settings of this run, and what came of it so far."""

    threads: int
    rounds: int
    model_dir: Path
    lines: list[Line] = field(default_factory=list)
    disturbed: int = 0

    @property
    def by_cpu(self) -> bool:
        return self.threads == 1

    @contextmanager
    def contestants(self, script: str, arguments: dict[str, list[str]]) -> Iterator[dict[str, Contestant]]:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(Contestant([_python(name), "-m", f"contest.{script}", *given], self.threads))
                for name, given in arguments.items()
            }

    def score(self, contestants: dict[str, Contestant], works: list[Any]) -> dict[str, Score]:
        turns = take_turns(contestants, works, disturbed=self._note)
        return {name: score(those, by_cpu=self.by_cpu) for name, those in turns.items()}

    def add(self, work: str, scores: dict[str, Score], goals: dict[str, float]) -> None:
        """The engine first, then its ratio to each of the others."""
        engine = scores["engine"].tokens_per_second
        for name, found in scores.items():
            ratio = None if name == "engine" else engine / found.tokens_per_second
            goal = goals.get(name)
            self.say(
                Line(
                    work=work,
                    who=WORDS[name],
                    value=f"{found.tokens_per_second:.0f} tokens/s",
                    peak_mb=found.peak_mb,
                    ratio=ratio,
                    goal=goal,
                    met=None if goal is None or ratio is None else ratio >= goal,
                )
            )

    def say(self, line: Line) -> None:
        self.lines.append(line)
        print(f"  {line.work}: {line.who}: {line.value}", flush=True)

    def _note(self, name: str, others: float) -> None:
        self.disturbed += 1


def _python(name: str) -> str:
    return str(LLAMA_CPP) if name == "llama.cpp" else sys.executable


def run_sft(contest: Contest, kind: str) -> None:
    rounds = contest.rounds
    ways = {name: [name, kind, str(rounds), str(contest.model_dir)] for name in ("engine", "trl", "bare")}
    with contest.contestants("sft", ways) as contestants:
        take_turns(contestants, [0], disturbed=lambda name, others: None)  # warm up
        contest.add(WORDS[kind], contest.score(contestants, list(range(1, rounds + 1))), SFT_GOALS[kind])


def run_sampling(contest: Contest, sizes: list[int]) -> None:
    ways = {name: [name, str(contest.model_dir)] for name in ("engine", "generate")}
    if LLAMA_CPP.exists():
        ways["llama.cpp"] = ["llama.cpp", str(write_gguf(contest.model_dir, OTHERS / f"{MODEL}-f32.gguf"))]
    with contest.contestants("sample", ways) as contestants:
        take_turns(contestants, [1], disturbed=lambda name, others: None)
        for size in sizes:
            scores = contest.score(contestants, [size] * contest.rounds)
            contest.add(f"sampling, {size} sequences", scores, SAMPLE_GOALS.get(size, {}))
    if not LLAMA_CPP.exists():
        folder = LLAMA_CPP.parent.parent
        how = f"not installed; python -m venv {folder} && {folder}/bin/pip install llama-cpp-python (it compiles)"
        contest.say(Line(work="sampling", who=WORDS["llama.cpp"], value=how))


def run_arms(contest: Contest) -> None:
    """One arm, all arms on one engine, all arms in separate processes."""

    def one_process(arms: int) -> Turn:
        ways = {"engine": [str(arms), str(contest.model_dir)]}
        with contest.contestants("arms", ways) as contestants:
            return contestants["engine"].turn(arms)[0]

    one, shared = one_process(1), one_process(ARMS)
    apart = _apart(contest)
    ratio = shared.peak_mb / one.peak_mb
    work = "memory of arms that train and sample"
    for who, turns in (("1 arm", [one]), (f"{ARMS} arms on one engine", [shared]), (f"{ARMS} processes", apart)):
        speed = sum(turn.tokens for turn in turns) / max(turn.seconds for turn in turns)
        contest.say(
            Line(
                work=work,
                who=who,
                value=f"{speed:.0f} tokens/s",
                peak_mb=sum(turn.peak_mb for turn in turns),
                ratio=ratio if turns == [shared] else None,
                goal=ARMS_GOAL if turns == [shared] else None,
                met=ratio <= ARMS_GOAL if turns == [shared] else None,
            )
        )


def _apart(contest: Contest) -> list[Turn]:
    """As many processes as arms, all at work at once."""
    ways = {f"arm {number}": ["1", str(contest.model_dir)] for number in range(ARMS)}
    with contest.contestants("arms", ways) as contestants:
        for contestant in contestants.values():
            contestant.begin(1)
        return [contestant.end() for contestant in contestants.values()]


def run_mock(contest: Contest) -> None:
    best = min(measure_mock_step(BATCH, EQUAL, True)["framework_ms"] for _ in range(3))
    who, value = f"{BATCH} rows of {EQUAL}, JSONL log", f"{best:.2f} ms"
    contest.say(Line(work="framework per step, mock", who=who, value=value, goal=GOAL_MS, met=best <= GOAL_MS))


def caption(contest: Contest) -> str:
    clock = "CPU seconds" if contest.by_cpu else "seconds by the clock"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "trl"))
    return (
        f"{MODEL}, fp32, CPU, {contest.threads} thread(s) each, {packages}, Python {platform.python_version()}. "
        f"Each in a separate process, {contest.rounds} turn(s) each, in alternation; medians of tokens per second "
        f"({clock}); padding does not count as tokens. "
        "SFT: LoRA 8 on all linear layers of the decoder, every token in the loss, AdamW, no checkpointing, one step a "
        "turn; TRL and the bare loop pad to the longest row of the batch. "
        f"Sampling: prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones each, temperature 1, whole vocabulary, "
        "fp32 cache, reading the prompts included. Memory: VmHWM, loading included; that of processes side by side is "
        f"their sum. {contest.disturbed} turns were disturbed by other programs (more than {MAX_OTHERS:g} cores busy)."
    )


def table(contest: Contest) -> str:
    """As Markdown."""
    lines = ["| work | who | speed | peak memory | engine / this | goal | |", "|---|---|---|---|---|---|---|"]
    for line in contest.lines:
        memory = "" if line.peak_mb is None else f"{line.peak_mb / 1000:.1f} GB"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        goal = "" if line.goal is None else f"{line.goal:g}"
        word = {None: "", True: "ok", False: "MISSED"}[line.met]
        lines.append(f"| {line.work} | {line.who} | {line.value} | {memory} | {ratio} | {goal} | {word} |")
    return "\n".join(lines) + f"\n\n{caption(contest)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute; results are not kept")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each contestant in each contest")
    args = parser.parse_args()
    model = find_model(MODEL, say=print)
    contest = Contest(threads=args.threads, rounds=1 if args.quick else args.rounds, model_dir=model.path)
    run_mock(contest)
    run_sft(contest, "equal")
    run_sampling(contest, [8] if args.quick else [1, 8, 32])
    if not args.quick:
        run_sft(contest, "mixed")
        run_arms(contest)
        keep(contest)
    print("\n" + table(contest))
    sys.exit(any(line.met is False for line in contest.lines))


def keep(contest: Contest) -> None:
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / "train.json", {"caption": caption(contest), "lines": [asdict(line) for line in contest.lines]})
    write_text(RESULTS / "train.md", table(contest))


if __name__ == "__main__":
    main()
