"""How much does the leakage audit find, and how often is it wrong?

In: nothing; rows and tasks are made for the occasion. Out: a table (or `--json`) and `perf/results/leakage_rates.json`;
exit code 1 when a goal is missed. A situation is a benchmark and clean rows. Into the rows go copies of half of the
tasks, one kind of change at a time: found is the share of these tasks, false the share of clean rows that are
suspected, without copies or with.

    python perf/leakage_rates.py            # some two minutes
    python perf/leakage_rates.py --only sums --json
"""

from __future__ import annotations

import argparse
import ast
import base64
import codecs
import importlib.util
import json
import os
import random
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.contamination.audit import audit_rows
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.files import write_json

RESULTS = Path(__file__).parent / "results" / "leakage_rates.json"
STORIES = Path(__file__).parent / "leakage_stories.txt"
MIN_FOUND = {
    "exact": 1.0, "case": 0.95, "punctuation": 0.95, "spaces": 0.95, "number": 0.95,
    "look-alikes": 0.95, "entities": 0.95,
}  # fmt: skip
"""What the goal names; the other changes are measured to be known."""
MAX_FALSE = 0.01
NAMES, THINGS, OTHER_NAMES, OTHER_THINGS, LOOKS = (
    line.split()
    for line in (
        "Tom Ann Bob Eva Max Lea Jan Ida Ben Zoe Kim Ray Sue Dan Amy Leo Mia Sam Joy Ned",
        "apples pears books pens coins cards stamps shells marbles nuts eggs plums beads kites hats",
        "Olga Piet Quin Rosa Stan Tara Ugo Vera Walt Xena Yuri Zara Abel Bria Cato Dora Egon Fara Gila",
        "bricks cables drums engines flags gears hammers irons jars keys lamps mugs nails ovens pipes",
        "old new red blue small big quiet loud cheap fast slow warm cold bright dark heavy light soft",
    )
)
TOOLS = "Which tool is this for: mail, calendar, files, weather, maps or music? Answer as <answer>tool</answer>."
SYSTEM = "You are a careful assistant. Think step by step and put the final answer into a box."
Make = Callable[[random.Random], str]


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


def word_problem(rng: random.Random, names: list[str] = NAMES, things: list[str] = THINGS) -> str:
    who, what = rng.choice(names), rng.choice(things)
    return f"{who} has {rng.randrange(99)} {what} and buys {rng.randrange(99)} more. How many {what} does {who} have?"


def other_word_problem(rng: random.Random) -> str:
    return word_problem(rng, OTHER_NAMES, OTHER_THINGS)


def sum_of_two(rng: random.Random) -> str:
    return f"What is {rng.randrange(1000)} {rng.choice(['plus', 'minus', 'times'])} {rng.randrange(1000)}?"


def short_question(rng: random.Random) -> str:
    one, two, sign = rng.randrange(2, 100), rng.randrange(2, 100), rng.choice("+-*")
    return rng.choice([f"What is {one} {sign} {two}?", f"Compute {one}{sign}{two}.", f"Solve x {sign} {one} = {two}"])


def code_task(rng: random.Random) -> str:
    verb = rng.choice(["returns", "counts", "removes", "collects", "prints", "sorts by length"])
    return (
        f"Write a Python function `{rng.choice(LOOKS)}_{rng.choice(THINGS)}(items, limit={rng.randrange(2, 200)})` "
        f"that {verb} the {rng.choice(LOOKS)} {rng.choice(THINGS)} among the first {rng.randrange(2, 100)} items of "
        "a list."
    )


def documented(files: Iterable[Path]) -> tuple[list[str], list[str]]:
    """From docstrings: paragraphs of 8 words and more, which are real English with code and numbers in it; and
    functions to write, each with its head and the beginning of its docstring."""
    paragraphs, functions = dict[str, None](), dict[str, None]()
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (doc := ast.get_docstring(node)):
                texts = doc.split("\n\n")
                paragraphs |= {" ".join(text.split()): None for text in texts if text.count(" ") >= 8}
                if isinstance(node, ast.FunctionDef) and len(texts[0]) > 30:
                    head = f"def {node.name}({ast.unparse(node.args)}):"
                    functions[f'Complete this function.\n\n{head}\n    """{texts[0]}"""'] = None
    return list(paragraphs), list(functions)


def of_python_and_scipy() -> list[list[str]]:
    """Paragraphs and functions of Python's, then of scipy's; each shuffled."""
    python, scipy = Path(os.__file__).parent, Path(str(importlib.util.find_spec("scipy").origin)).parent
    found = [
        *documented([*python.glob("*.py"), *python.glob("asyncio/*.py"), *python.glob("email/*.py")]),
        *documented(file for file in scipy.rglob("*.py") if "tests" not in file.parts),
    ]
    for texts in found:
        random.Random(5).shuffle(texts)
    return found


def stories() -> list[str]:
    """Word problems of a primary school, each with its own text."""
    return [line for line in STORIES.read_text(encoding="utf-8").splitlines() if line]


def made(make: Make, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return list(dict.fromkeys(make(rng) for _ in range(3 * count)))[:count]


def plain_row(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "<answer>x</answer>"}]}


def wrapped_row(text: str) -> dict[str, Any]:
    asked = f"Answer the following question.\n\n{text}\n\nWork through it and end with the answer alone."
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    return {"messages": [*messages, {"role": "assistant", "content": "Let us see. <answer>42</answer>"}]}


@dataclass(frozen=True, kw_only=True)
class Situation:
    name: str
    tasks: list[str]
    clean: list[str]
    row: Callable[[str], dict[str, Any]] = plain_row
    tellable: bool = True
    """Whether a copy with another number can be distinguished from a clean row at all."""


def situations() -> Iterator[Situation]:
    vocabulary = words(2)
    ours, our_functions, theirs, their_functions = of_python_and_scipy()

    def from_one(name: str, make: Make, tasks: int, rows: int, **more: Any) -> Situation:
        texts = made(make, tasks + rows, 7)
        return Situation(name=name, tasks=texts[:tasks], clean=texts[tasks:], **more)

    def among(name: str, tasks: list[str], clean: list[str], **more: Any) -> Situation:
        return Situation(name=name, tasks=tasks, clean=clean, **more)

    yield from_one("prose, made up", lambda rng: prose(rng, vocabulary), 1000, 20_000)
    yield among("manuals (Python; scipy)", ours[:1000], theirs[:20_000])
    yield among("school stories, own text", stories()[::2], stories()[1::2] + theirs[:400])
    yield among("school stories, few rows", stories()[::2], stories()[1::2])
    yield among("functions to write", our_functions[:500], their_functions[:3000])
    yield from_one("template, many digits", flight, 1000, 20_000)
    yield from_one("template, many words, few tasks", ticket, 100, 5000)
    yield from_one("template, many words, many tasks", ticket, 1000, 20_000)
    yield from_one("template, code", code_task, 200, 2000)
    yield from_one("template, few rows", ticket, 50, 200)
    yield from_one("template, very few rows", ticket, 20, 50)
    yield from_one("template, no numbers", request, 200, 2000, tellable=False)
    yield from_one("template, small world", word_problem, 200, 2000, tellable=False)
    yield from_one("sums", sum_of_two, 200, 2000, tellable=False)
    small, sums, short = made(word_problem, 200, 3), made(sum_of_two, 200, 3), made(short_question, 200, 3)
    yield among("template among other text", small, theirs[:2000])
    yield among("template among little other text", small[:60], theirs[:100])
    yield among("template, also among other text", small, theirs[:4000] + made(word_problem, 300, 4))
    yield among("template, other names and things", small, made(other_word_problem, 2000, 4))
    yield among("sums among other text", sums, theirs[:2000])
    yield among("sums among little other text", sums[:60], theirs[:100])
    yield among("short questions among others", short, [text for text in theirs if len(text) < 90][:2000])
    yield among("stories and sums, rows of sums", stories()[::2] + sums, made(sum_of_two, 2000, 4), tellable=False)
    yield among("own text in a longer message", ours[:1000], theirs[:2000], row=wrapped_row)
    yield among("stories in a longer message", stories()[::2], stories()[1::2] + theirs[:400], row=wrapped_row)
    yield among("template in a longer message", small, theirs[:2000], row=wrapped_row)
    yield from_one("tickets in a longer message", ticket, 200, 4000, row=wrapped_row)
    yield from_one("small world in a longer message", word_problem, 200, 2000, row=wrapped_row, tellable=False)
    yield among("short ones in a longer message", short, theirs[:2000], row=wrapped_row)


def in_case(text: str, rng: random.Random) -> str:
    return rng.choice([text.upper(), text.lower(), text.title(), text.swapcase()])


def in_punctuation(text: str, rng: random.Random) -> str:
    kept = "<>+-*/=" if re.search(r"\d\s*[-+*/=<>]\s*\d", text) else "<>"
    without = "".join(letter for letter in text if letter in kept or letter not in string.punctuation)
    return rng.choice([without, text.replace(" ", ", ", 1) + "!!", text.replace("?", " ."), text.replace(".", "!")])


def in_spaces(text: str, rng: random.Random) -> str:
    hard, lines = text.replace(" ", "\u00a0"), text.replace(" ", "\n", 2)
    return rng.choice(["  ".join(text.split()), lines, f"\n\t{text} \n", hard])


def in_a_number(text: str, rng: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    old = rng.choice(found)
    new = str(int(old[0]) + rng.choice([1, 2, 10])).zfill(len(old[0]))
    return text[: old.start()] + new + text[old.end() :]


def in_a_word(text: str, rng: random.Random) -> str:
    found = list(re.finditer(r"[A-Za-z]{4,}", text))
    old = rng.choice(found) if found else None
    return text if old is None else text[: old.start()] + "something" + text[old.end() :]


def cut_short(text: str, rng: random.Random) -> str:
    spoken = text.split()
    return " ".join(spoken[: max(3, len(spoken) * 4 // 5)])


def within(text: str, rng: random.Random) -> str:
    return f"Here is something from yesterday's class. {text} Explain how you got there, {rng.choice(NAMES)}!"


def in_look_alikes(text: str, rng: random.Random) -> str:
    """With Cyrillic letters for Latin ones."""
    return text.translate(str.maketrans("aeopcxyAEOPCX", "аеорсхуАЕОРСХ"))


def in_entities(text: str, rng: random.Random) -> str:
    return "".join(f"&#{ord(letter)};" if rng.random() < 0.2 else letter for letter in text).replace(" ", "&nbsp;")


def in_base64(text: str, rng: random.Random) -> str:
    return base64.b64encode(text.encode()).decode()


def in_rot13(text: str, rng: random.Random) -> str:
    return codecs.encode(text, "rot13")


CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "exact": lambda text, rng: text, "case": in_case, "punctuation": in_punctuation, "spaces": in_spaces,
    "number": in_a_number, "word": in_a_word, "cut": cut_short, "within": within,
    "look-alikes": in_look_alikes, "entities": in_entities, "base64": in_base64, "rot13": in_rot13,
}  # fmt: skip


def task(number: int, text: str) -> HarborTask:
    verifier = InProcessVerifier(fn_name="exact_match", expected="42")
    return HarborTask(task_id=str(number), instruction=text, verifier=verifier)


def letters_of(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def rates(of: Situation) -> dict[str, Any]:
    rng = random.Random(11)
    known = {letters_of(text) for text in of.tasks}
    clean = [of.row(text) for text in of.clean if letters_of(text) not in known]
    tasks = [task(number, text) for number, text in enumerate(of.tasks)]
    alone = audit_rows(clean, tasks, benchmark="alone")
    found: dict[str, Any] = {"tasks": len(tasks), "rows": len(clean), "false": alone.rows / len(clean)}
    for change, apply in CHANGES.items():
        copies = {str(number): apply(of.tasks[number], rng) for number in range(0, len(tasks), 2)}
        if change != "exact":
            copies = {task_id: copy for task_id, copy in copies.items() if copy != of.tasks[int(task_id)]}
        audit = audit_rows([*clean, *map(of.row, copies.values())], tasks, benchmark="planted", max_leaks=len(tasks))
        leaks = {leak.task_id for leak in audit.leaks}
        found[change] = round(len(leaks & copies.keys()) / len(copies), 4) if copies else None
        found["false"] = max(found["false"], (audit.rows - len(copies)) / len(clean))
    wanted = {change: least for change, least in MIN_FOUND.items() if of.tellable or change != "number"}
    ok = all(found[change] is None or found[change] >= least for change, least in wanted.items())
    return {**found, "number_can_be_told": of.tellable, "met": ok and found["false"] <= MAX_FALSE}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<34}{'tasks':>6}{'rows':>7}{'false':>8}" + "".join(f"{change:>12}" for change in CHANGES)]
    for name, one in result.items():
        shares = "".join(f"{'-' if one[c] is None else format(one[c], '.1%'):>12}" for c in CHANGES)
        mark = "" if one["met"] else "  MISSED"
        lines.append(f"{name:<34}{one['tasks']:>6}{one['rows']:>7}{one['false']:>8.2%}{shares}{mark}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="situations with this in their name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = {}
    for of in situations():
        if options.only in of.name:
            result[of.name] = rates(of)
            print(table({of.name: result[of.name]}).splitlines()[1], file=sys.stderr, flush=True)
    if not options.only:
        write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if all(one["met"] for one in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
