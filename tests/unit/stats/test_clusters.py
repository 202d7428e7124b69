"""Tasks made from one template are not independent: templates are counted."""

from __future__ import annotations

import re
import time
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import stdtrit

from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.clusters import by_cluster, find_clusters, without_fillings
from evsys_sdk.stats.comparison import difference, interval
from evsys_sdk.stats.judge import judge_arms


def found(ids, texts=(), *, key=None, labels=None):
    return find_clusters(ids, dict(zip(ids, texts, strict=False)), labels or {}, key=key)


def test_a_metadata_key_names_the_clusters():
    made = found(["a", "b", "c"], key="topic", labels={"a": "mail", "b": "mail"})
    assert made.of == {"a": "mail", "b": "mail", "c": "(no topic) c"} and made.found_by == "metadata key topic"


@pytest.mark.parametrize("form", ["{t}-{n:02d}", "{t}_{n}", "{t}/{n}", "{t}.{n}"])
def test_ids_that_differ_in_a_last_number_share_a_template(form):
    ids = [form.format(t=t, n=n) for t in ("mail", "maps", "tmpl7") for n in range(5)]
    made = found(ids)
    assert made.found_by == "task ids" and sorted(set(made.of.values())) == ["mail", "maps", "tmpl7"]


@pytest.mark.parametrize(
    "form",
    ["{n:02d}_{t}", "{t}-{n:02d}-easy", "{t}-{n:02d}-{d}", "{t}-{x}", "task-{n:03d}-{t}", "{t}.{n}.v2", "{n}/{t}"],
)
def test_ids_share_a_template_wherever_the_number_or_letter_stands(form):
    ids = [
        form.format(t=t, n=n, x="abcde"[n], d=("easy", "hard")[n % 2])
        for t in ("maila", "mapsb", "web")
        for n in range(5)
    ]
    made = found(ids)
    assert made.found_by == "task ids" and len(set(made.of.values())) == 3
    assert all(len({made.of[one] for one in ids[start : start + 5]}) == 1 for start in (0, 5, 10))


FRAMES = [
    "send a short mail to {a} about the {b} before noon",
    "look up how far {a} is from the {b} by train",
    "write down what {a} said about the {b} yesterday evening",
    "ask {a} whether the {b} can wait until next week",
]
NAMES, THINGS = ["anna", "bob", "carl", "dora", "eric"], ["budget", "garden show", "invoice", "old printer", "picnic"]


@pytest.mark.parametrize(
    "prompt", ["", "Answer with one word and nothing else. ", "You have three tools: mail, maps, web.\n"]
)
def test_texts_with_lower_case_words_filled_in_share_a_template(prompt):
    texts = [prompt + f.format(a=a, b=THINGS[(n + k) % 5]) for k, f in enumerate(FRAMES) for n, a in enumerate(NAMES)]
    texts[3] = texts[3].upper()
    ids = [f"task-{n:03d}" for n in range(len(texts))]
    order = np.random.default_rng(3).permutation(len(ids))
    made = found([ids[i] for i in order], [texts[i] for i in order])
    assert made.found_by == "task texts"
    assert [len({made.of[one] for one in ids[start : start + 5]}) for start in (0, 5, 10, 15)] == [1, 1, 1, 1]
    assert len(set(made.of.values())) == 4


WORDS = [
    "time",
    "year",
    "people",
    "day",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "place",
    "week",
    "company",
    "system",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "money",
    "story",
    "month",
    "book",
    "job",
    "word",
    "side",
    "head",
    "house",
    "friend",
]


BEGINNINGS = ["what is the ", "how many ", "who was the ", "when did the ", "why is the "]


def stories():
    file = Path(__file__).parents[3] / "perf/leakage_stories.txt"
    return [line for line in file.read_text().splitlines() if line.strip()]


def test_templates_beside_other_tasks_are_found():
    made = [f.format(a=a, b=THINGS[(n + k) % 5]) for k, f in enumerate(FRAMES) for n, a in enumerate(NAMES)]
    texts = [*made, *stories()]
    ids = [f"task-{n:03d}" for n in range(len(texts))]
    order = np.random.default_rng(3).permutation(len(ids))
    of = found([ids[i] for i in order], [texts[i] for i in order])
    assert of.found_by == "task texts" and len(set(of.of.values())) == 4 + len(stories())
    assert [len({of.of[one] for one in ids[start : start + 5]}) for start in (0, 5, 10, 15)] == [1, 1, 1, 1]
    reversed_words = [" ".join(word[::-1] for word in story.split()) for story in stories()]
    many = [*texts, *reversed_words]
    assert found([f"task-{n:03d}" for n in range(len(many))], many).of == {}, "less than a quarter of the tasks"


def test_copies_of_a_task_are_one_unit():
    ids = [f"{chr(97 + n)}x" for n in range(12)]
    copies = {ids[9]: ids[0], ids[10]: ids[0], ids[11]: ids[1]}
    made = find_clusters(ids, {}, {}, key=None, copies=copies)
    assert made.found_by == "copies of tasks" and len(set(made.of.values())) == 9
    assert made.of[ids[9]] == made.of[ids[10]] == made.of[ids[0]] != made.of[ids[11]] == made.of[ids[1]]
    assert found(ids).of == {} and find_clusters(ids, {}, {}, key=None, copies=dict.fromkeys(ids[1:], ids[0])).of == {}
    topics = [f"{topic}-{n}" for topic in ("mail", "maps", "web") for n in range(4)]
    made = find_clusters(topics, {}, {}, key=None, copies={"web-3": "web-0"})
    assert made.found_by == "task ids" and len(set(made.of.values())) == 3


@pytest.mark.parametrize("start", [[""], ["please answer the following question with one word only: "], BEGINNINGS])
@pytest.mark.parametrize("count", [30, 150])
def test_independent_texts_that_begin_alike_make_no_clusters(start, count):
    chance = np.random.default_rng(count)
    texts = [
        str(chance.choice(start))
        + " ".join(chance.choice(WORDS + ["the", "of", "in", "a"] * 5, chance.integers(5, 10)))
        for _ in range(count)
    ]
    assert found([f"q-{n}" for n in range(count)], texts).of == {}


def test_hashes_as_ids_make_no_clusters():
    chance = np.random.default_rng(1)
    ids = [
        f"{a:08x}-{b:04x}" for a, b in zip(chance.integers(0, 2**32, 400), chance.integers(0, 2**16, 400), strict=True)
    ]
    assert found(ids, [one[::-1] for one in ids]).of == {}


@pytest.mark.parametrize("form", ["{d}-{n}", "{d}/{n:03d}", "{w}-{d}"])
def test_days_in_ids_make_no_clusters(form):
    days = [f"2026-{1 + n % 12:02d}-{1 + n % 28:02d}" for n in range(400)]
    ids = [form.format(d=day, n=n, w=f"{WORDS[n % 37]}{WORDS[n // 37]}") for n, day in enumerate(days)]
    assert found(ids, [one[::-1] for one in ids]).of == {}
    mail = [f"{topic}-2026-03-{day:02d}" for topic in ("mail", "maps", "web") for day in range(1, 9)]
    assert len(set(found(mail).of.values())) == 3


def test_the_stories_of_the_leakage_audit_are_independent():
    assert len(stories()) > 30 and found([f"s{n}" for n in range(len(stories()))], stories()).of == {}


def test_texts_that_differ_in_what_is_filled_in_share_a_template():
    frames = ["What is {n} plus {n}?", "Send {name} a mail about '{n} items'.", "Find the {n}th word."]
    texts = [frame.format(n=n, name=name) for frame in frames for n, name in enumerate(["Ada", "Bo", "Cy", "Di"])]
    made = found([f"x{chr(97 + i)}" for i in range(len(texts))], texts)
    assert made.found_by == "task texts" and len(set(made.of.values())) == 3


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([f"task-{n:03d}" for n in range(50)], [f"question {chr(97 + n % 26)} {'x' * n}" for n in range(50)]),
        ([f"t{n}" for n in range(20)], [f"What is {n} + 2?" for n in range(20)]),
        (["a", "b", "c", "d"], ["w", "x", "y", "z"]),
        ([f"{w}-1" for w in ("mail", "maps", "web", "code")], ["one", "two", "three", "four"]),
    ],
)  # fmt: skip
def test_plain_numbering_and_a_single_template_make_no_clusters(ids, texts):
    assert found(ids, texts).of == {}


def test_columns_keep_the_mean_and_have_the_cluster_robust_variance():
    chance = np.random.default_rng(0)
    clusters = ["a"] * 7 + ["b"] * 2 + ["c"] * 5 + ["d"] * 6
    values = chance.random((3, 20))
    columns = by_cluster(values, clusters)
    assert columns.shape == (3, 4) and columns.mean(axis=1) == pytest.approx(values.mean(axis=1))
    # Liang and Zeger: sum over clusters of (sum of residuals)^2 / n^2; instead of C / (C - 1) the factor that makes it
    # unbiased where the tasks of a cluster are alike.
    row, mean = values[0], values[0].mean()
    sums = [sum(v - mean for v, c in zip(row, clusters, strict=True) if c == name) for name in "abcd"]
    share = np.array([7, 2, 5, 6]) / 20
    factor = (share**2).sum() / (share**2 * (1 - 2 * share + (share**2).sum())).sum()
    assert columns[0].var(ddof=1) / 4 == pytest.approx(sum(s**2 for s in sums) / 20**2 * factor)
    even = by_cluster(values, ["a"] * 5 + ["b"] * 5 + ["c"] * 5 + ["d"] * 5)
    assert even[0] == pytest.approx([row[start : start + 5].mean() for start in (0, 5, 10, 15)])


def test_the_variance_of_uneven_clusters_whose_tasks_are_alike_has_no_bias():
    """Every cluster is one value on all its tasks, with variance 1: that of the mean is the sum of squared shares."""
    sizes = [3, 3, 3, 5, 5, 7, 7]
    chance, clusters = np.random.default_rng(3), np.repeat(np.arange(len(sizes)), sizes)
    values = chance.standard_normal((20_000, len(sizes)))[:, clusters]
    columns = by_cluster(values, [str(one) for one in clusters])
    share = np.array(sizes) / sum(sizes)
    assert columns.shape[1] == len(sizes), "even enough to be left as they are"
    assert (columns.var(axis=1, ddof=1) / len(sizes)).mean() == pytest.approx((share**2).sum(), rel=0.02)


def world(chance, *, templates=10, each=20, seeds=1, effect=1.2):
    """Two equal arms that find different templates hard."""
    shape = (2, 1, templates, 1)
    logit = chance.normal(0.3, 0.8, (1, 1, templates, 1)) + effect * chance.standard_normal(shape)
    share = 1 / (1 + np.exp(-np.broadcast_to(logit, (2, seeds, templates, each))))
    return (chance.random(share.shape) < share).astype(float).reshape(2, seeds, -1)


def judged(values, clusters, **options):
    names = [f"t{i:03d}" for i in range(values.shape[2])]
    arms = [
        ArmScores(arm=f"a{i}", seeds={s: dict(zip(names, row.tolist(), strict=True)) for s, row in enumerate(arm)})
        for i, arm in enumerate(values)
    ]
    of = dict(zip(names, clusters, strict=True)) if clusters else None
    return judge_arms(arms, metric="pass@1", clusters=of, clustered_by="task ids" if of else "", **options)


@pytest.mark.parametrize(("seeds", "repeats"), [(1, 600), (3, 200)])
def test_equal_arms_on_templates_are_told_apart_in_6_of_100_at_most(seeds, repeats):
    chance, clusters = np.random.default_rng(5), [f"c{i // 20}" for i in range(200)]
    wrong = naive = 0
    for _ in range(repeats):
        values = world(chance, seeds=seeds)
        columns = [by_cluster(arm, clusters) for arm in values]
        wrong += difference(columns[1], columns[0], unit=True).p_value() < 0.05
        naive += difference(values[1], values[0], unit=True).p_value() < 0.05
    assert wrong / repeats <= 0.06 and naive / repeats >= 0.15, "tasks counted as independent: 23 to 30 %"


def test_the_verdict_says_so_and_counts_tasks_where_it_says_tasks():
    values = world(np.random.default_rng(2))
    verdict = judged(values, [f"c{i // 20}" for i in range(200)])
    assert verdict.n_clusters == 10 and verdict.arms[0].n_tasks == 200
    assert verdict.arms[1].vs_baseline.n_tasks == 200 and verdict.arms[1].vs_baseline.only_arm == 0
    assert any(
        "tasks come from 10 templates (task ids): intervals and tests count templates" in n for n in verdict.notes
    )
    plain = judged(values, None)
    assert plain.n_clusters is None and verdict.arms[0].mean == pytest.approx(plain.arms[0].mean)
    assert verdict.arms[0].high - verdict.arms[0].low > plain.arms[0].high - plain.arms[0].low


def test_a_run_has_the_clustered_interval_too():
    values = world(np.random.default_rng(3))
    clusters = [f"c{i // 20}" for i in range(200)]
    arm = judged(values, clusters).arms[0]
    assert (arm.low, arm.high) == interval(fmean, values[0, 0].tolist(), clusters=clusters)


@given(st.text(alphabet="ab1\u0663\"'` \n\u00a0.", max_size=30))
@example('ab"x1 y"2 \'c')
@example('a1"x y" ""a""a')
def test_fillings_are_quoted_texts_and_words_with_a_digit(text):
    plain = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|\S*\d\S*")
    assert without_fillings(text) == plain.sub("#", text)


@pytest.mark.parametrize(
    "text", ["a" * 200_000, '""a' * 100_000, "'a" * 100_000, "1" * 200_000 + "a", "\"a'b`" * 50_000]
)
def test_a_long_word_is_read_in_time_that_grows_with_its_length(text):
    ids = [f"{text}{n}" for n in "xyz"]
    begin = time.process_time()
    found(ids, [text, text, text])
    assert time.process_time() - begin < 20, "CPU seconds, below 1; where time grows with the square it is minutes"


FAMILIES = {
    "Zipf": [max(2, 60 // (i + 1)) for i in range(20)],
    "a few large among many": [3] * 30 + [40] * 3,
    "one of three times the size": [60] + [20] * 9,
    "wide": [40, 3, 9, 14, 80, 22, 6, 11, 31, 17, 5, 12],
    "one half": [110] + [10] * 11,
}


@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
def test_equal_arms_on_templates_of_any_sizes_are_told_apart_in_6_of_100_at_most(sizes):
    """Templates of which one is worth as much noise as another, whatever its size: a hard world for few large ones."""
    chance, clusters = np.random.default_rng(8), np.repeat(np.arange(len(sizes)), sizes)
    values = chance.standard_normal((40_000, len(sizes)))[:, clusters]
    columns = by_cluster(values, [f"c{one}" for one in clusters])
    count = columns.shape[1]
    reach = -stdtrit(count - 1, 0.025) * columns.std(axis=1, ddof=1) / count**0.5
    wrong = (abs(columns.mean(axis=1)) > reach).mean()
    assert 0.02 < wrong < 0.061, "0.060 to 0.073 where they were joined once, and 0.11 to 0.2 where they were not"


def test_a_gain_on_all_of_five_templates_is_found():
    """Their differences are nearly alike, and a template that goes the other way would not make up for them."""
    clusters = [f"c{i // 20}" for i in range(100)]
    low, high = np.zeros((1, 100)), np.ones((1, 100))
    low[0, ::7], high[0, ::8] = 1.0, 0.0
    gain = judged(np.stack([low, high]), clusters).arms[1].vs_baseline
    assert gain.verdict == "better" and gain.low > 0.1
    assert any("so few say little of other templates" in note for note in judged(np.stack([low, high]), clusters).notes)


def test_the_verdict_says_that_templates_of_very_different_size_were_joined():
    sizes = FAMILIES["one half"]
    clusters = [f"c{number}" for number, size in enumerate(sizes) for _ in range(size)]
    values = np.random.default_rng(5).integers(0, 2, (2, 1, sum(sizes))).astype(float)
    [note] = [one for one in judged(values, clusters).notes if "templates" in one]
    assert "tasks come from 12 templates (task ids)" in note and "new templates (their sizes differ much:" in note
    assert note.endswith("the small ones are joined, and 3 groups count); so few say little of other templates")
    even = judged(values[:, :, :200], [f"c{i // 20}" for i in range(200)])
    assert not any("joined" in one for one in even.notes)


UNEQUAL = [45, 30, 15, 15, 15, 8, 8, 7, 4, 3]


def test_clusters_of_very_different_size_are_joined_to_groups_of_about_one_size():
    clusters = [f"c{number}" for number, size in enumerate(UNEQUAL) for _ in range(size)]
    values = np.random.default_rng(3).random((2, len(clusters)))
    columns = by_cluster(values, clusters)
    assert columns.shape == (2, 6), "45, 30, 22, 19, 18 and 16 tasks: worth 5.2 groups of one size"
    assert columns.mean(axis=1) == pytest.approx(values.mean(axis=1))
    even = [f"c{number % 10}" for number in range(150)]
    assert by_cluster(values, even).shape == (2, 10)
    twice = [f"c{number}" for number in range(10) for _ in range(10 + number)]
    assert by_cluster(values[:, : len(twice)], twice).shape == (2, 10), "a factor of two is even enough"


@pytest.mark.parametrize("sizes", [UNEQUAL, [75, 15, 12, 12, 12, 12, 12]], ids=["30 to 2 %", "one half"])
def test_equal_arms_on_templates_of_unequal_size_are_rarely_told_apart(sizes):
    chance, wrong, repeats = np.random.default_rng(77), 0, 200
    template = np.repeat(np.arange(len(sizes)), sizes)
    names = [f"t{task:03d}" for task in range(len(template))]
    clusters = {name: f"c{number}" for name, number in zip(names, template, strict=True)}
    for _ in range(repeats):
        z = chance.normal(0, 1.2, len(names)) + chance.normal(0, 0.4, (2, len(names)))
        z = z + chance.normal(0, 1.0, (2, len(sizes)))[:, template]
        values = chance.binomial(1, 1 / (1 + np.exp(-z))).astype(float)
        arms = [
            ArmScores(arm=f"a{number}", seeds={0: dict(zip(names, row.tolist(), strict=True))})
            for number, row in enumerate(values)
        ]
        verdict = judge_arms(arms, metric="pass@1", share=True, clusters=clusters)
        wrong += any(arm.verdict in ("better", "worse") for arm in verdict.arms)
    assert wrong / repeats <= 0.06, "9 and 17 % where each template counted as one observation"
