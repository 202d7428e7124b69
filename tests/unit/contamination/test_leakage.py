"""Training rows that hold tasks of a benchmark are found, and rows that only resemble them are left alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from evsys_sdk.contamination.audit import KnownBenchmark, Suite, audit_rows, audits_of, plain, sample_evenly
from evsys_sdk.contamination.index import MAX_VARIANTS
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.eval.benchmark import Benchmark

EXAMPLES = Path(__file__).parents[3] / "examples"
LONG = "A baker fills 12 trays with 18 rolls each, sells most of them before noon and gives the last 7 to a school."


def task(text, number=0, expected="x", **metadata):
    verifier = InProcessVerifier(fn_name="exact_match", expected=expected)
    return HarborTask(task_id=f"t{number}", instruction=text, verifier=verifier, metadata=metadata)


def tasks(*texts):
    return [task(text, number) for number, text in enumerate(texts)]


def chat(text, answer="yes"):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}


def kind_of(row, *suite):
    audit = audit_rows([chat("What a lovely day it is"), row], list(suite) or tasks(LONG), benchmark="b")
    assert audit.n_rows == 2 and (audit.clean or audit.leaks[0].row == 1)
    return audit.leaks[0].kind if audit.leaks else None


@pytest.mark.parametrize(
    "row",
    [
        chat(LONG),
        chat(f"\n  {LONG} \n"),
        {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "go"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": [{"role": "user", "content": "Ask me something"}, {"role": "assistant", "content": LONG}]},
        {"messages": [{"role": "user", "content": "hi"}], "target_assistant": LONG},
        {"prompt": LONG, "completion": "no"},
        {"inputs": {"question": LONG}, "expected": "no"},
        {"instruction": LONG, "verifier": {"fn_name": "exact_match"}},
        {"any column": LONG},
        {"prompt": [{"role": "user", "content": LONG}], "chosen": "a", "rejected": "b"},
    ],
)
def test_a_task_is_found_word_for_word_wherever_a_row_has_text(row):
    assert kind_of(row) == "exact"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (LONG.upper(), "normalised"),
        (LONG.replace(",", " -").rstrip(".") + " !!", "normalised"),
        ("\t".join(LONG.split()), "normalised"),
        (LONG.replace("18", "19"), "numbers"),
        (LONG.replace("18", "1,900").lower(), "numbers"),
        (f"Here is one for you. {LONG} How many are left?", "ngram"),
        (LONG.replace("a school", "the poor"), "ngram"),
    ],
)
def test_a_near_copy_is_found_and_its_kind_told(text, kind):
    assert kind_of(chat(text)) == kind


def test_apostrophes_hyphens_and_width_are_spelling():
    suite = tasks("Don't use the well-known café’s name １２ times in a row, please")
    assert kind_of(chat("dont use the wellknown CAFÉS name 12 times in a row please"), *suite) == "normalised"


def test_the_overlap_is_the_share_of_the_task_that_the_row_has():
    audit = audit_rows([chat(LONG.replace("18", "19"))], tasks(LONG), benchmark="b")
    assert 0.9 < audit.leaks[0].overlap < 1
    assert audit_rows([chat(LONG)], tasks(LONG), benchmark="b").leaks[0].overlap == 1


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"messages": []},
        {"messages": None, "prompt": 7},
        {"messages": [None, 3, {"role": 4}, {"role": "user"}, {"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [None, {"type": "image_url"}, {"text": 5}]}]},
        {"inputs": {"a": 1, "b": None}, "verifier": 3},
        {"tokens": [1, 2, 3]},
        {"instruction": {"a": ["b"]}, "verifier": {"expected": 3}, "metadata": {"history": "x"}},
        chat("\ud800 broken \udfff"),
        chat("？！…"),
        chat("日本語のテキスト" * 50),
        {1: "a number for a name", None: LONG[:20]},
    ],
)
def test_rows_without_text_and_odd_ones_are_passed_over(row):
    assert kind_of(row) is None


def test_nothing_in_gives_a_clean_audit():
    assert audit_rows([], tasks(LONG), benchmark="b").clean
    assert audit_rows([chat(LONG)], [], benchmark="b").clean
    assert audit_rows([chat("")], tasks("", "   ", "?!"), benchmark="b").clean


def test_tasks_of_symbols_are_found_word_for_word_only():
    suite = tasks("🙂🙃🙂", "=> <=")
    assert kind_of(chat("🙂🙃🙂"), *suite) == "exact"
    assert kind_of(chat("🙃🙂🙃"), *suite) is None


def test_a_text_written_without_spaces_is_found_in_part():
    text = "请计算一个农夫在集市上卖出所有苹果之后还剩下多少钱并写出过程"
    assert kind_of(chat(f"好的。{text}？谢谢你的帮助"), *tasks(text)) == "ngram"
    assert kind_of(chat("今天的天气很好，我们一起去公园散步吧"), *tasks(text)) is None


def test_a_task_deep_inside_a_huge_row_is_found():
    filler = " ".join(f"word{number}" for number in range(300_000))
    assert kind_of({"text": f"{filler} {LONG} {filler}"}) == "ngram"
    assert kind_of({"text": filler}) is None


def test_a_short_task_is_found_as_a_line_or_after_a_label():
    suite = tasks("Name the largest moon")
    assert kind_of(chat("Question: name the largest moon!"), *suite) == "ngram"
    assert kind_of(chat("Answer briefly.\nName the largest moon\nThink first."), *suite) == "ngram"
    assert kind_of(chat("Name the largest moon and its smallest neighbour"), *suite) is None


def test_an_answer_alone_is_no_leak_unless_it_is_a_long_text():
    answer = "First sort the list, then walk through it once and keep the last value that was seen before."
    assert kind_of(chat("Another question", "mail"), task("Which tool?", expected="mail")) is None
    suite = [task("How?", expected=answer), task("Which?", 1, expected="both")]
    audit = audit_rows([chat("Tell me how", answer.lower())], suite, benchmark="b")
    assert [(leak.task_id, leak.kind, leak.part) for leak in audit.leaks] == [("t0", "normalised", "answer")]
    canned = [task("How?", 0, answer), task("And how?", 1, answer)]
    assert audit_rows([chat("Tell me how", answer)], canned, benchmark="b").clean, "an answer of two tasks is nobody's"


def test_a_last_turn_counts_with_the_turns_before_it():
    history = [{"role": "user", "content": "I have a dog."}, {"role": "assistant", "content": "How nice!"}]
    suite = [task("What is it called?", history=history)]
    assert kind_of(chat("What is it called?"), *suite) is None
    copied = {"messages": [*history, {"role": "user", "content": "what is it called"}]}
    assert kind_of({"messages": [*copied["messages"], {"role": "assistant", "content": "Rex"}]}, *suite) == "normalised"


def test_the_same_question_about_another_image_is_another_task():
    def content(url):
        return [{"type": "text", "text": "What is in it?"}, {"type": "image_url", "image_url": {"url": url}}]

    suite = [task(content("http://a/1.png")), task(content("http://a/2.png"), 1)]
    assert kind_of({"messages": [{"role": "user", "content": content("http://a/3.png")}]}, *suite) is None
    assert kind_of({"messages": [{"role": "user", "content": content("http://a/2.png")}]}, *suite) == "exact"


def test_an_instruction_that_many_different_tasks_share_is_nobodys():
    suite = [task("Do what problem.md says.", number, expected=str(number)) for number in range(5)]
    assert kind_of(chat("Do what problem.md says."), *suite) is None
    twins = [task("Do what problem.md says.", number) for number in range(5)]
    assert kind_of(chat("Do what problem.md says."), *twins) == "exact", "the same task several times is one"


def test_sums_with_other_numbers_or_signs_are_other_sums():
    suite = tasks("What is 17 + 25?", "What is 1 + 12?", "What is 30 * 4?")
    for text in ("What is 18 + 25?", "What is 17 - 25?", "What is 11 + 2?", "What is 30 + 4?"):
        assert kind_of(chat(text), *suite) is None, text
    assert kind_of(chat("what is 17+25"), *suite) == "normalised"


def test_digits_do_not_run_together():
    assert kind_of(chat("Compare version 11.2 of the tool"), task("Compare version 1.12 of the tool")) == "numbers"


def test_another_question_about_the_passage_of_two_tasks_is_no_copy():
    suite = tasks(f"{LONG} How many rolls were baked that morning in all?", f"{LONG} Who got what was left over?")
    assert kind_of(chat(f"{LONG} Name the trade of the person in it."), *suite) is None
    assert kind_of(chat(f"Well. {suite[0].instruction}"), *suite) == "ngram"


def test_of_a_template_all_numbers_but_one_must_agree_and_have_many_digits():
    made = [f"Track parcel {100_000 + 7919 * n} sent by customer {5_000_000 + 104_729 * n}" for n in range(50)]
    rows = [chat(f"Track parcel {200_000 + 6007 * n} sent by customer {8_000_000 + 99_991 * n}") for n in range(200)]
    planted = chat(made[20].replace("parcel 2", "parcel 9"))
    audit = audit_rows([*rows, planted], tasks(*made), benchmark="b")
    assert [(leak.task_id, leak.row, leak.kind) for leak in audit.leaks] == [("t20", 200, "numbers")]


def walks(count):
    return [chat(f"How many minutes does a walk of {n + 20} kilometres take in the rain?") for n in range(count)]


def test_a_text_of_its_own_with_other_numbers_is_a_copy_however_many_rows_have_it():
    one = tasks("How many minutes does a walk of 12 kilometres take in the rain?")
    for count in (MAX_VARIANTS, MAX_VARIANTS + 1, 400):
        audit = audit_rows(walks(count), one, benchmark="b")
        assert (audit.kinds, audit.rows, audit.templated) == ({"numbers": 1}, count, 0)
    exact = audit_rows([*walks(40), chat(one[0].instruction)], one, benchmark="b")
    assert exact.kinds == {"exact": 1} and exact.leaks[0].row == 40, "the closest copy is the one that is told"


def test_a_short_text_in_very_many_different_rows_is_a_template_and_the_headline_says_so():
    one = tasks("Walk 12 kilometres in the rain")
    rows = [chat(f"Walk {n + 20} kilometres in the rain") for n in range(40)]
    audit = audit_rows(rows, one, benchmark="b")
    assert audit.clean and audit.templated == 1 and audit.rows == 0
    assert audit.text == "no b task found in 40 training rows, but 1 of 1 share a template with rows"
    few = audit_rows(rows[:MAX_VARIANTS], one, benchmark="b")
    assert few.kinds == {"numbers": 1} and few.rows == MAX_VARIANTS


def sentences(count, seed):
    """Sentences of random words, each with a number in it."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("bcdfglmnprst", k=3)) + rng.choice("aeiou") for _ in range(2000)]
    return [
        f"{' '.join(rng.choices(words, k=9))} {rng.randrange(1000)} {' '.join(rng.choices(words, k=6))}?"
        for _ in range(count)
    ]


def test_planted_copies_are_found_among_many_rows_and_nothing_else():
    texts, clean = sentences(200, seed=1), sentences(3000, seed=2)
    changes = {
        "exact": lambda text: text,
        "upper": str.upper,
        "punctuation": lambda text: text.replace(" ", ", ", 3).rstrip("?") + "...",
        "number": lambda text: " ".join(str(int(word) + 1) if word.isdigit() else word for word in text.split()),
    }
    for name, change in changes.items():
        rows = [chat(text) for text in [*clean, *map(change, texts)]]
        audit = audit_rows(rows, tasks(*texts), benchmark="b", max_leaks=1000)
        assert (audit.tasks, audit.rows) == (200, 200), name
        assert all(leak.row >= 3000 for leak in audit.leaks)
    assert audit_rows([chat(text) for text in clean], tasks(*texts), benchmark="b").clean


def tool_requests(count, seed):
    rng = random.Random(seed)
    people, things = (
        ["Ada", "Sam", "Noor", "Lin", "Tom", "Mei"],
        ["budget", "lease", "audit", "survey", "party", "trip"],
    )
    days, verbs = ["Monday", "Friday", "Sunday"], ["Write to", "Email", "Call", "Remind", "Thank"]
    end = "Which tool is this for: mail, calendar, files, weather, maps or music? Answer as <answer>tool</answer>."
    made = [
        f"{rng.choice(verbs)} {rng.choice(people)} about the {rng.choice(things)} on {rng.choice(days)}\n{end}"
        for _ in range(4 * count)
    ]
    return list(dict.fromkeys(made))[:count]


def test_sisters_from_one_template_are_not_copies():
    made = tool_requests(300, seed=3)
    audit = audit_rows([chat(text) for text in made[60:]], tasks(*made[:60]), benchmark="b")
    assert audit.rows <= 0.01 * audit.n_rows
    copied = audit_rows(
        [chat(text) for text in [*made[60:], *map(str.upper, made[:60])]], tasks(*made[:60]), benchmark="b"
    )
    assert copied.tasks == 60


@pytest.mark.parametrize(
    "example", sorted({path.parents[2] for path in EXAMPLES.glob("[0-9]*/data/**/tasks.jsonl")} - {EXAMPLES})
)
def test_the_examples_hold_none_of_their_own_tasks(example):
    files = [path for path in example.rglob("*.jsonl") if path.name != "tasks.jsonl"]
    suites = list(example.rglob("tasks.jsonl"))
    assert suites
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for suite in suites:
            read = [json.loads(line) for line in suite.read_text().splitlines()]
            audit = audit_rows(rows, [task(one["instruction"], n) for n, one in enumerate(read)], benchmark=str(suite))
            assert audit.clean and not audit.templated, (file, audit.text)


def test_the_record_is_plain_and_short():
    texts = sentences(80, seed=4)
    audit = audit_rows([chat(text) for text in texts], tasks(*texts), benchmark="val/b")
    record = json.loads(json.dumps(plain(audit)))
    assert record["tasks"] == 80 and len(record["leaks"]) == 50 and record["kinds"] == {"exact": 80}
    assert record["leaks"][0] == {
        "benchmark": "val/b", "kind": "exact", "row": 0, "task_id": "t0", "place": "", "overlap": 1.0,
        "part": "instruction",
    }  # fmt: skip
    assert record["text"] == (
        "80 of 80 val/b tasks appear in 80 of 80 training rows (80 verbatim; first: task t0 in row 0)"
    )


def test_a_task_counts_once_as_its_closest_copy():
    audit = audit_rows([chat(LONG.upper()), chat(LONG), chat(f"So: {LONG} And?")], tasks(LONG), benchmark="b")
    assert (audit.tasks, audit.rows, audit.kinds, audit.leaks[0].row) == (1, 3, {"exact": 1}, 1)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000])
def test_a_sample_is_spread_from_beginning_to_end(count):
    rows = [{"n": number} for number in range(count)]
    for kept in (sample_evenly(rows, 10), sample_evenly(iter(rows), 10)):
        assert len(kept) <= 10 and kept == sorted(kept, key=lambda row: row["n"])
        assert not rows or (kept[0]["n"] == 0 and kept[-1]["n"] >= (count - 1) * 0.7)


def test_copies_of_a_benchmark_in_two_projects_are_named_by_their_own_paths(tmp_path):
    line = json.dumps({"task_id": "t0", "instruction": LONG, "verifier": {"kind": "in_process", "fn_name": "x"}})
    places = []
    for project in ("first", "second"):
        (tmp_path / project).mkdir()
        (tmp_path / project / "tasks.jsonl").write_text(line + "\n")
        benchmark = Benchmark.load(tmp_path / project)
        suite = Suite(name=f"val/{project}", tasks=benchmark.tasks, places=benchmark.places)
        known, new = KnownBenchmark(suite=suite, sha256=benchmark.sha256), []
        for _arm in range(2):
            (audit,) = audits_of([chat(LONG)], [known], on_new=new.append)
        places.append(audit.leaks[0].place)
        assert len(new) == 1, "the second arm of a project compares nothing again"
    assert places == [f"{tmp_path}/{project}/tasks.jsonl:1" for project in ("first", "second")]
