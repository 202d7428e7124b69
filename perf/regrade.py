"""How long does it take to grade stored rollouts anew, next to the loop one would write by hand?

In: nothing; a record of `--rollouts` rollouts (4 per task; 200 tokens read and 100 written each) is made for the
occasion, with a verifier in a project's own module. Out: a table (or `--json`) and `perf/results/regrade.json`; exit
code 1 when a goal is missed. Measured is the whole command in a separate process, from its start to the new record on
disk, and its CPU time beside that of a bare loop of json.loads and the same function over the same rollouts; of
`--repeats` the fastest counts.

    python perf/regrade.py              # 10,000 rollouts, about half a minute
    python perf/regrade.py --rollouts 1000 --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from evsys_sdk.files import write_json
from evsys_sdk.protocols import EvalResult, Rollout, Score, Turn
from evsys_sdk.record.journal import Journal, JournalledRollouts, to_data_without
from evsys_sdk.record.models import rollout_to_data

RESULTS = Path(__file__).parent / "results" / "regrade.json"
MAX_SECONDS, MAX_RATIO = 10.0, 20.0
EACH = 4
CHECK = '''
from evsys_sdk import register_verifier


@register_verifier("same_words")
def same_words(model_output, expected, params):
    """Share of the expected words that the output has."""
    wanted, said = set(expected.lower().split()), set(model_output.lower().split())
    return len(wanted & said) / len(wanted)
'''
CONFIG = {
    "name": "stored",
    "imports": ["checks"],
    "run": {
        "name": "r0",
        "data": {"source_kind": "in_memory", "rows": []},
        "model": {"name": "m"},
        "algorithm": {"kind": "rl"},
        "backend": {"kind": "mock"},
    },
    "metadata": {"benchmark": [{"name": "words", "path": "tasks.jsonl", "split": "val", "num_samples": EACH}]},
}
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def make_record(project: Path, n: int) -> Path:
    """A project, and the record that a run with one evaluation of `n` rollouts leaves."""
    draw = random.Random(0)
    tasks = [
        {
            "task_id": f"t{index}",
            "instruction": f"Say these words: {index}",
            "verifier": {"fn_name": "exact_match", "expected": " ".join(draw.sample(WORDS, 3))},
        }
        for index in range(n // EACH)
    ]
    (project / "checks.py").write_text(CHECK)
    (project / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    rollouts = [_rollout(task, sample, draw) for task in tasks for sample in range(EACH)]
    (project / "lines.jsonl").write_text("".join(json.dumps(_line(rollout)) + "\n" for rollout in rollouts))
    outputs = project / "outputs"
    outputs.mkdir()
    _write_journal(outputs / "stored.journal.sqlite", rollouts)
    summary = {"experiment": "stored", "config": CONFIG, "config_folder": str(project)}
    write_json(outputs / "stored.experiment_result.json", summary)
    return outputs


def _rollout(task: dict[str, Any], sample: int, draw: random.Random) -> Rollout:
    text = " ".join(draw.sample(WORDS, 3)) + " and so on" * 20
    turn = Turn(
        prompt_tokens=[draw.randrange(50_000) for _ in range(200)],
        completion_tokens=[draw.randrange(50_000) for _ in range(100)],
        logprobs=[-draw.random() for _ in range(100)],
        text=text,
    )
    return Rollout(
        task_id=task["task_id"], turns=[turn], reward=0.0, metadata={"sample": sample, "stop_reason": "stop"}
    )


def _line(rollout: Rollout) -> dict[str, Any]:
    return {"completion": rollout.completion, **rollout_to_data(rollout)}


def _write_journal(path: Path, rollouts: list[Rollout]) -> None:
    with closing(Journal(path)) as journal:
        journal.write("BEGIN", ())
        run = journal.begin("stored/r0", "fingerprint")
        kept = JournalledRollouts(run, "/val/words/final/hash")
        scores = [Score(metric="pass@1", value=0.0)]
        result = EvalResult(name="words", split="val", scores=scores, rollouts=rollouts)
        run.add("final_eval", to_data_without(result, kept), at=0)
        journal.write("COMMIT", ())


def bare_loop(path: Path, expected: dict[str, str]) -> float:
    """CPU seconds that json.loads and the function take, over the same rollouts as lines of a file."""
    spaces: dict[str, Any] = {}
    exec(CHECK, spaces)
    started, total = time.process_time(), 0.0
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            total += spaces["same_words"](row["completion"], expected[row["task_id"]], {})
    assert total > 0
    return time.process_time() - started


def whole_command(project: Path, number: int) -> tuple[float, float]:
    """Seconds and CPU seconds of `evsys regrade`."""
    out = project / f"new-{number}"
    command = [sys.executable, "-m", "evsys_sdk.cli.main", "regrade", "outputs", "--verifier", "same_words"]
    started, before = time.perf_counter(), _cpu_of_children()
    done = subprocess.run([*command, "--out", str(out)], cwd=project, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    return seconds, _cpu_of_children() - before


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(n: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="evsys-regrade-") as folder:
        project = Path(folder)
        make_record(project, n)
        tasks = [json.loads(line) for line in (project / "tasks.jsonl").read_text().splitlines()]
        expected = {task["task_id"]: task["verifier"]["expected"] for task in tasks}
        runs = [whole_command(project, number) for number in range(repeats)]
        bare = min(bare_loop(project / "lines.jsonl", expected) for _ in range(repeats))
        megabytes = (project / "lines.jsonl").stat().st_size / 1e6
    seconds, cpu = min(run[0] for run in runs), min(run[1] for run in runs)
    return {
        "rollouts": n,
        "megabytes": round(megabytes, 1),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu, 3),
        "bare_cpu_seconds": round(bare, 3),
        "ratio": round(cpu / bare, 1),
        "goal": {
            f"whole command in <= {MAX_SECONDS:g} s": seconds <= MAX_SECONDS,
            f"<= {MAX_RATIO:g} times the bare loop": cpu / bare <= MAX_RATIO,
        },
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['rollouts']:,} rollouts, {result['megabytes']} MB",
        f"evsys regrade   {result['seconds']:.2f} s, the whole command; CPU {result['cpu_seconds']:.2f} s",
        f"bare loop       CPU {result['bare_cpu_seconds']:.2f} s ({result['ratio']:.1f} times)",
    ]
    return "\n".join(lines + [f"{'met   ' if met else 'MISSED'} {goal}" for goal, met in result["goal"].items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.rollouts, options.repeats)
    write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if all(result["goal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
