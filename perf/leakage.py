"""How fast is the leakage audit, next to only reading the rows, and how much does it find?

In: nothing; rows and tasks are made for the occasion. Out: two tables (or `--json`) and `perf/results/leakage.json`;
exit code 1 when a goal is missed. Speed: 1,000,000 rows, half prose, half from a template, in a file, against 10,000
tasks, on one core; beside it `json.loads` and a hash of every line. Each way runs in a process of its own. Finding: for
several kinds of data, the share of planted copies that are found and of clean rows that are suspected.

    python perf/leakage.py                  # some two minutes
    python perf/leakage.py --rows 100000 --json
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import platform
import random
import re
import resource
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from evsys_sdk.atomic import write_json
from evsys_sdk.data.leakage import SAMPLE_ROWS, audit_rows, spread
from evsys_sdk.data.leakage_text import key_of, words_of
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.jsonl import read_rows

RESULTS = Path(__file__).parent / "results" / "leakage.json"
TASKS, MAX_SECONDS, MAX_RSS_MB = 10_000, 90.0, 2000
MIN_FOUND = {"exact": 1.0, "case": 0.95, "punctuation": 0.95, "number": 0.95}
MAX_FALSE = 0.01
NAMES = (
    "Tom",
    "Ann",
    "Bob",
    "Eva",
    "Max",
    "Lea",
    "Jan",
    "Ida",
    "Ben",
    "Zoe",
    "Kim",
    "Ray",
    "Sue",
    "Dan",
    "Amy",
    "Leo",
    "Mia",
    "Sam",
    "Joy",
    "Ned",
)
THINGS = (
    "apples",
    "pears",
    "books",
    "pens",
    "coins",
    "cards",
    "stamps",
    "shells",
    "marbles",
    "nuts",
    "eggs",
    "plums",
    "beads",
    "kites",
    "hats",
)
LOOKS = (
    "old",
    "new",
    "red",
    "blue",
    "small",
    "big",
    "quiet",
    "loud",
    "cheap",
    "fast",
    "slow",
    "warm",
    "cold",
    "bright",
    "dark",
    "heavy",
    "light",
    "soft",
)
TOOLS = "Which tool is this for: mail, calendar, files, weather, maps or music? Answer as <answer>tool</answer>."


def words(seed: int, size: int = 20_000) -> list[str]:
    """Made-up words, the frequent ones short."""
    rng = random.Random(seed)
    syllables = [first + vowel for first in "bcdfghklmnprstvz" for vowel in "aeiou"]
    return ["".join(rng.choices(syllables, k=1 + (number > 50) + (number > 2000))) for number in range(size)]


def prose(rng: random.Random, vocabulary: list[str]) -> str:
    ranks = (int(len(vocabulary) ** rng.random()) for _ in range(rng.randrange(20, 50)))
    return " ".join(vocabulary[rank] for rank in ranks) + f" {rng.randrange(1000)}?"


def flight(rng: random.Random) -> str:
    return (
        f"Find the cheapest flight from city {rng.randrange(977)} to city {rng.randrange(769)} on day "
        f"{rng.randrange(31)} for {rng.choice(NAMES)}, booking {rng.randrange(10**9):09d}, and say when it lands"
    )


def request(rng: random.Random) -> str:
    verb, day = rng.choice(["Write to", "Email", "Call", "Remind"]), rng.choice(["Monday", "Friday", "Sunday"])
    return f"{verb} {rng.choice(NAMES)} about the {rng.choice(LOOKS)} {rng.choice(THINGS)} on {day}\n{TOOLS}"


def ticket(rng: random.Random) -> str:
    return (
        f"Read the ticket and decide what to do, in one word. Customer {rng.choice(NAMES)} ordered "
        f"{rng.randrange(1, 9)} {rng.choice(LOOKS)} {rng.choice(THINGS)} and sends back {rng.randrange(1, 9)} "
        f"because they are {rng.choice(LOOKS)}."
    )


def word_problem(rng: random.Random) -> str:
    who, what = rng.choice(NAMES), rng.choice(THINGS)
    return f"{who} has {rng.randrange(99)} {what} and buys {rng.randrange(99)} more. How many {what} does {who} have?"


def sum_of_two(rng: random.Random) -> str:
    return f"What is {rng.randrange(1000)} {rng.choice(['plus', 'minus', 'times'])} {rng.randrange(1000)}?"


def manual(files: Iterable[Path]) -> list[str]:
    """Paragraphs of 8 words and more from docstrings: real English, with code and numbers in it."""
    found: dict[str, None] = {}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                for text in (ast.get_docstring(node) or "").split("\n\n"):
                    if text.count(" ") >= 8:
                        found[" ".join(text.split())] = None
    return list(found)


def made(make: Callable[[random.Random], str], n_tasks: int, n_rows: int) -> tuple[list[str], list[str]]:
    rng = random.Random(7)
    texts = list(dict.fromkeys(make(rng) for _ in range(2 * (n_tasks + n_rows))))[: n_tasks + n_rows]
    return texts[:n_tasks], texts[n_tasks:]


def kinds() -> Iterator[tuple[str, tuple[list[str], list[str]], bool]]:
    """Name, texts of tasks and of clean rows, and whether a copy with another number can be told from a clean row."""
    rng = random.Random(5)
    vocabulary = words(2)
    yield "prose, made up", made(lambda rng: prose(rng, vocabulary), 1000, 20_000), True
    python, scipy = Path(os.__file__).parent, Path(str(importlib.util.find_spec("scipy").origin)).parent
    tasks, rows = manual(python.glob("*.py")), manual(scipy.rglob("*.py"))
    yield "manuals (Python; scipy)", (rng.sample(tasks, 1000), rng.sample(rows, min(20_000, len(rows)))), True
    yield "template, many digits", made(flight, 1000, 20_000), True
    yield "template, many words, few tasks", made(ticket, 100, 5000), True
    yield "template, many words, many tasks", made(ticket, 1000, 20_000), False
    yield "template, no numbers", made(request, 200, 2000), False
    yield "template, small world", made(word_problem, 200, 2000), False
    yield "sums", made(sum_of_two, 200, 2000), False


def in_case(text: str, rng: random.Random) -> str:
    return rng.choice([text.upper(), text.lower(), text.title(), text.swapcase()])


def in_punctuation(text: str, rng: random.Random) -> str:
    without = "".join(letter for letter in text if letter not in string.punctuation.replace("<", "").replace(">", ""))
    return rng.choice([without, text.replace(" ", ", ", 1) + "!!", "  ".join(text.split()), text.replace("?", " .")])


def in_a_number(text: str, rng: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    old = rng.choice(found)
    new = str(int(old[0]) + rng.choice([1, 2, 10])).zfill(len(old[0]))
    return text[: old.start()] + new + text[old.end() :]


CHANGES = {"exact": lambda text, rng: text, "case": in_case, "punctuation": in_punctuation, "number": in_a_number}


def row(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "<answer>x</answer>"}]}


def task(number: int, text: str) -> HarborTask:
    return HarborTask(
        task_id=str(number), instruction=text, verifier=InProcessVerifier(fn_name="exact_match", expected="x")
    )


def rates(task_texts: list[str], row_texts: list[str]) -> dict[str, Any]:
    """Of clean rows, the share that is suspected; of each kind of copy planted among them, the share that is found."""
    rng = random.Random(11)
    keys = {key_of(words_of(text)) for text in task_texts}
    clean = [row(text) for text in row_texts if key_of(words_of(text)) not in keys]
    tasks = [task(number, text) for number, text in enumerate(task_texts)]
    alone = audit_rows(clean, tasks, benchmark="alone")
    found: dict[str, Any] = {"tasks": len(tasks), "rows": len(clean), "false": alone.rows / len(clean)}
    for change, apply in CHANGES.items():
        copies = {str(number): apply(task_texts[number], rng) for number in range(0, len(tasks), 2)}
        if change != "exact":
            copies = {task_id: copy for task_id, copy in copies.items() if copy != task_texts[int(task_id)]}
        planted = [*clean, *map(row, copies.values())]
        leaks = {leak.task_id for leak in audit_rows(planted, tasks, benchmark="planted", max_leaks=len(tasks)).leaks}
        found[change] = round(len(leaks & copies.keys()) / len(copies), 4) if copies else None
    return found


def find_rates() -> dict[str, Any]:
    table = {}
    for name, (task_texts, row_texts), tellable in kinds():
        found = rates(task_texts, row_texts)
        goals = MIN_FOUND if tellable else {key: MIN_FOUND[key] for key in ("exact", "case", "punctuation")}
        ok = all(found[key] is None or found[key] >= least for key, least in goals.items())
        table[name] = {**found, "number_can_be_told": tellable, "met": ok and found["false"] <= MAX_FALSE}
    return table


def texts_for_speed(seed: int) -> Iterator[str]:
    rng, vocabulary = random.Random(seed), words(1)
    while True:
        yield prose(rng, vocabulary)
        yield flight(rng)


def tasks_for_speed() -> list[HarborTask]:
    return [task(number, text) for number, text in zip(range(TASKS), texts_for_speed(1), strict=False)]


def write_file(path: str, count: int) -> int:
    """`count` rows, every 10,000th a copy of a task; returns how many copies."""
    tasks, copies = tasks_for_speed(), 0
    with open(path, "w", encoding="utf-8") as out:
        for number, text in zip(range(count), texts_for_speed(2), strict=False):
            if number % 10_000 == 0:
                text, copies = str(tasks[copies].instruction).upper(), copies + 1
            out.write(json.dumps(row(text)) + "\n")
    return copies


def bare(path: str) -> int:
    """Only reading: the least that any audit does."""
    with open(path, encoding="utf-8") as lines:
        return sum(1 for line in lines if json.loads(line) and hash(line))


def audited(path: str) -> int:
    """As `evsys data leakage` does it: a pass for the sample, a pass for the audit. Returns the tasks found."""
    tasks = tasks_for_speed()
    return audit_rows(read_rows(path), tasks, benchmark="speed", sample=spread(read_rows(path), SAMPLE_ROWS)).tasks


WAYS = {"bare": bare, "audit": audited}


def measure_here(way: str, path: str) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    outcome = WAYS[way](path)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1), "peak_rss_mb": round(peak / 1e6),
        "outcome": outcome,
    }  # fmt: skip


def measure(way: str, path: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, "--file", path]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.jsonl")
        copies = write_file(path, count)
        row_bytes = os.path.getsize(path) / count
        measured = {way: measure(way, path) for way in WAYS}
    audit = measured["audit"]
    # On a machine that others use too, the processor's own time is what one idle core would take.
    met = audit["cpu_seconds"] <= MAX_SECONDS and audit["peak_rss_mb"] <= MAX_RSS_MB and audit["outcome"] >= copies
    return {
        "rows": count,
        "tasks": TASKS,
        "bytes_per_row": round(row_bytes),
        "planted": copies,
        **measured,
        "ratio": round(audit["cpu_seconds"] / measured["bare"]["cpu_seconds"], 1),
        "goal": {"cpu_seconds": MAX_SECONDS, "peak_rss_mb": MAX_RSS_MB, "met": met},
    }


def table(result: dict[str, Any]) -> str:
    speed, found = result["speed"], result["rates"]
    lines = [f"{speed['rows']:,} rows of {speed['bytes_per_row']} bytes against {speed['tasks']:,} tasks"]
    lines.append(f"{'':<34}{'seconds':>9}{'cpu s':>9}{'peak MB':>9}")
    lines += [
        f"{way:<34}{speed[way]['seconds']:>9}{speed[way]['cpu_seconds']:>9}{speed[way]['peak_rss_mb']:>9}"
        for way in WAYS
    ]
    verdict = "met" if speed["goal"]["met"] else "MISSED"
    lines.append(f"ratio {speed['ratio']}; goal: at most {MAX_SECONDS:g} s and {MAX_RSS_MB} MB: {verdict}\n")
    lines.append(f"{'':<34}{'tasks':>7}{'rows':>8}{'false':>8}" + "".join(f"{change:>12}" for change in CHANGES))
    for name, one in found.items():
        shares = "".join(f"{'-' if one[c] is None else format(one[c], '.1%'):>12}" for c in CHANGES)
        mark = "" if one["met"] else "  MISSED"
        lines.append(f"{name:<34}{one['tasks']:>7}{one['rows']:>8}{one['false']:>8.2%}{shares}{mark}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_here(options.child, options.file)))
        return 0
    result = {
        "speed": compare(options.rows),
        "rates": find_rates(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if result["speed"]["goal"]["met"] and all(one["met"] for one in result["rates"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
