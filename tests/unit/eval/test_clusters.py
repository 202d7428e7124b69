"""Tasks made from one template are not independent: templates are counted."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from evsys_sdk.eval.arm_scores import ArmScores
from evsys_sdk.eval.clusters import by_cluster, find_clusters
from evsys_sdk.eval.judging import judge_arms
from evsys_sdk.eval.paired import difference
from evsys_sdk.eval.statistics import interval


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
    # Liang and Zeger: sum over clusters of (sum of residuals)^2 / n^2, times C / (C - 1)
    row, mean = values[0], values[0].mean()
    sums = [sum(v - mean for v, c in zip(row, clusters, strict=True) if c == name) for name in "abcd"]
    assert columns[0].var(ddof=1) / 4 == pytest.approx(sum(s**2 for s in sums) / 20**2 * 4 / 3)


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
