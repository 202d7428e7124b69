"""Tasks from a template: a copy with another number is found where it can be told from a sister, and said where not."""

from __future__ import annotations

import random
import re

import pytest

from evsys_sdk.contamination.audit import Suite, audit_rows, audit_suites, plain
from evsys_sdk.data_types import HarborTask, InProcessVerifier

NAMES = ["Tom", "Ann", "Bob", "Eva", "Max", "Lea", "Jan", "Ida"]
THINGS = ["apples", "pears", "books", "pens", "coins", "cards", "stamps", "shells"]


def problems(count, seed):
    rng = random.Random(seed)
    made = [
        f"{(who := rng.choice(NAMES))} has {rng.randrange(99)} {(what := rng.choice(THINGS))} and buys "
        f"{rng.randrange(99)} more. How many {what} does {who} have?"
        for _ in range(2 * count)
    ]
    return list(dict.fromkeys(made))[:count]


def other_text(count, seed):
    rng = random.Random(seed)
    words = ["".join(rng.choices("bcdfglmnprst", k=3)) + rng.choice("aeiou") for _ in range(900)]
    return [f"{' '.join(rng.choices(words, k=14))} {rng.randrange(100)}." for _ in range(count)]


def with_another_number(text):
    first = next(word for word in text.split() if word.isdigit())
    return text.replace(first, str(int(first) + 1), 1)


def tasks(texts):
    verifier = InProcessVerifier(fn_name="exact_match", expected="x")
    return [HarborTask(task_id=f"t{n}", instruction=text, verifier=verifier) for n, text in enumerate(texts)]


def rows(texts):
    return [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "5"}]} for text in texts]


@pytest.mark.parametrize("n_clean", [40, 800])
def test_among_other_text_a_copy_with_another_number_is_found(n_clean):
    made, clean = problems(100, seed=1), other_text(n_clean, seed=2)
    copies = [with_another_number(text) for text in made[::2]]
    audit = audit_rows(rows([*clean, *copies]), tasks(made), benchmark="b", max_leaks=100)
    assert len({leak.task_id for leak in audit.leaks} & {f"t{n}" for n in range(0, 100, 2)}) >= 48
    assert audit.rows <= 50 + 0.01 * n_clean
    assert audit_rows(rows(clean), tasks(made), benchmark="b").clean


def test_among_sisters_it_cannot_be_told_and_that_is_said():
    made = problems(1100, seed=3)
    audit = audit_rows(rows(made[100:]), tasks(made[:100]), benchmark="val/sums")
    assert audit.rows <= 0.01 * audit.n_rows
    assert audit.templated >= 50 and audit.templated_rows >= 200
    assert audit.note == (
        f"{audit.templated} of 100 val/sums tasks share a template with {audit.templated_rows} of 1000 training rows, "
        "so copies cannot be distinguished from new instances"
    )
    assert plain(audit)["note"] == audit.note
    copied = audit_rows(rows([*made[100:], *map(str.upper, made[:100])]), tasks(made[:100]), benchmark="b")
    assert copied.tasks == 100, "the same numbers in another spelling are told all the same"


def multiplied(texts, count, seed):
    """Each text `count` times, with numbers of its own."""
    rng = random.Random(seed)
    return [re.sub(r"\d+", lambda _: str(rng.randrange(1000, 9999)), text) for text in texts for _ in range(count)]


SHARED = (
    "Work through it step by step, check each step twice, say where you are not sure and why, and put the number that "
    "you end with into a box at the very end of your answer, with nothing behind it."
)


@pytest.mark.parametrize("count", [20, 21, 60])
@pytest.mark.parametrize(
    ("of_tasks", "of_rows"),
    [("{}", "{}"), ("{}", "Here is a question: {} What would you say?"), (f"{{}} {SHARED}", f"{{}} {SHARED}")],
    ids=["as they are", "in a longer message", "with a prompt that all share"],
)
def test_a_test_set_that_was_multiplied_with_other_numbers_is_found(count, of_tasks, of_rows):
    made, clean = other_text(30, seed=14), other_text(600, seed=15)
    training = [of_rows.format(text) for text in [*multiplied(made, count, seed=16), *clean]]
    audit = audit_rows(rows(training), tasks(map(of_tasks.format, made)), benchmark="b")
    assert audit.kinds == {"numbers": 30} and audit.rows >= 0.99 * 30 * count
    assert all(leak.row < 30 * count for leak in audit.leaks)


def test_few_words_that_rows_and_tasks_share_are_no_multiplied_test_set():
    who_and_what = [(who, what) for what in THINGS[:3] for who in NAMES[:3]]
    made = [f"{who} has 5 {what} and buys 7 more. How many {what} does {who} have?" for who, what in who_and_what]
    audit = audit_rows(rows(multiplied(made, 200, seed=17)), tasks(made[:5]), benchmark="b")
    assert audit.clean and audit.templated == 5


def test_several_benchmarks_at_once_give_what_each_gives_alone():
    made, clean = problems(60, seed=5), other_text(200, seed=6)
    prose = other_text(40, seed=7)
    training = rows([*clean, *map(with_another_number, made[:10]), *prose[:5], *map(str.title, made[20:24])])
    suites = [
        Suite(name="sums", tasks=tasks(made)), Suite(name="prose", tasks=tasks(prose)), Suite(name="none", tasks=[]),
    ]  # fmt: skip
    together = audit_suites(training, suites)
    assert together == [audit_rows(training, suite.tasks, benchmark=suite.name) for suite in suites]
    assert [audit.tasks for audit in together] == [14, 5, 0]


def test_the_place_of_a_task_is_told():
    [text] = other_text(1, seed=8)
    suite = Suite(name="b", tasks=tasks([text]), places=["bench/tasks.jsonl:7"])
    [audit] = audit_suites(rows([text]), [suite])
    assert audit.leaks[0].text == "task t0 (bench/tasks.jsonl:7) in row 0 verbatim"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: text.replace("a", "a\u200b"),
        lambda text: text.replace(" ", " \n\t "),
        lambda text: text.translate({ord(a): ord(a) + 0xFEE0 for a in "abcdefghijklmnopqrstuvwxyz0123456789"}),
        lambda text: text.replace("h", "h\u00ad"),
    ],
    ids=["no-break spaces", "zero-width", "lines", "full width", "soft hyphens"],
)
def test_odd_letters_are_only_another_spelling(change):
    text = "Which of the 3 harbours has the highest tide when the moon is full?"
    audit = audit_rows(rows([*other_text(20, seed=9), change(text)]), tasks([text]), benchmark="b")
    assert audit.kinds == {"normalised": 1} and audit.leaks[0].row == 20


def test_a_task_in_a_prompt_that_all_rows_share_is_said_and_not_counted():
    text = "Which of the 3 harbours has the highest tide when the moon is full?"
    system = {"role": "system", "content": f"Answer briefly, as in this example. {text} The northern one."}
    training = [{"messages": [system, *row["messages"]]} for row in rows(other_text(300, seed=10))]
    audit = audit_rows(training, tasks([text]), benchmark="b")
    assert (
        audit.clean and audit.shared == 1 and audit.note == ("1 of 1 b tasks appears in a prompt that many rows share")
    )
    few = audit_rows(training[:5], tasks([text]), benchmark="b")
    assert few.tasks == 1 and few.rows == 5


def test_very_short_tasks_are_found_as_they_are_and_do_not_make_every_row_a_copy():
    short = ["Hi", "2 + 2 =", "ok?", "Why?", "π"]
    training = rows([*other_text(200, seed=11), "hi there, how are you today", "Why not? Because it rains.", "2 + 3 ="])
    assert audit_rows(training, tasks(short), benchmark="b").rows <= 0.01 * len(training)
    assert audit_rows([*training, *rows(["2+2="])], tasks(short), benchmark="b").kinds == {"normalised": 1}


def test_the_order_of_rows_changes_nothing():
    short, long = other_text(2, seed=12)
    wrapped = f"{long} {' '.join(other_text(3, seed=13))}"
    both, one = {"prompt": short, "completion": wrapped}, {"prompt": wrapped, "completion": "ok"}
    suite = tasks([short, long])
    first, last = (audit_rows(given, suite, benchmark="b") for given in ([both, *[one] * 5], [*[one] * 5, both]))
    assert first.rows == last.rows == 6 and first.tasks == last.tasks == 2
