"""Lab: what the filter means, the order, groups, pages and columns of the list, its downloads, and hostile texts."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest


def names(answer) -> list[str]:
    """Names of the experiments on a page, in its order."""
    text = answer.content.decode()
    return re.findall(r"<a data-open [^>]*><bdi>([^<]*)</bdi>", text)


def show(visitor, project, query: str = ""):
    answer = visitor.get(f"/p/{project.id}/{query}")
    assert answer.status_code == 200
    return answer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {"alpha", "beta", "gamma"}),
        ("temperature", {"beta"}),
        ("TEMPERATURE sampling", {"beta"}),
        ('"temperature sampling"', set()),
        ("status:running", {"gamma"}),
        ("status:running,failed", {"beta", "gamma"}),
        ("verdict:supported", {"alpha"}),
        ("verdict:none", {"beta", "gamma"}),
        ("tag:lora", {"alpha"}),
        ("tag:lor", set()),
        ('tag:"two words"', {"beta"}),
        ("tag:größe", {"gamma"}),
        ("-tag:lora", {"beta", "gamma"}),
        ("model:qwen", {"alpha", "gamma"}),
        ("pass@1>=0.5", {"alpha"}),
        ("val.pass@1>0.9", set()),
        ("score<0.5", {"beta"}),
        ("errors>0", {"beta"}),
        ("cost<=0.5 model:qwen", {"alpha"}),
        ("after:2026-09-22", {"gamma"}),
        ("before:2026-09-22", {"alpha", "beta"}),
        ("100%", {"beta"}),
        ("under_score", set()),
        ("'; drop table dashboard_experiment; --", set()),
    ],
)
def test_the_filter_finds(visitor, project, rows, text, found):
    rows.add_experiment(
        project, "alpha", verdict="supported", tags=["lora"], model="qwen3-4b", metric="val.pass@1", best_value=0.7,
        cost_usd=0.25, created=rows.START,
    )  # fmt: skip
    rows.add_experiment(
        project, "beta", status="failed", hypothesis="Sampling at a lower temperature is 100% as good", n_errors=3,
        tags=["two words"], metric="val.loss", best_value=0.3, created=rows.START + 1,
    )  # fmt: skip
    rows.add_experiment(
        project, "gamma", status="running", tags=["größe"], model="Qwen3-8b", created=rows.START + 3 * rows.DAY
    )
    answer = visitor.get(f"/p/{project.id}/", {"q": text})
    assert set(names(answer)) == found
    assert b'class="notice warn"' not in answer.content


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stattus:running", "stattus"),
        ("score>=high", "takes a number"),
        ("score>=nan", "takes a number"),
        ("after:yesterday", "2026-11-18"),
        ("tag:", "no value"),
        ("x " * 40, "more than 30 terms"),
    ],
)
def test_a_filter_that_is_not_understood_says_so_and_shows_the_rest(visitor, project, rows, text, said):
    rows.add_experiment(project, "x")
    answer = visitor.get(f"/p/{project.id}/", {"q": text})
    assert answer.status_code == 200
    assert said in re.findall(r'<p class="notice warn" role="alert">(.*?)</p>', answer.content.decode())[0]
    assert names(answer) == ["x"]


@pytest.mark.parametrize(
    ("query", "order"),
    [
        ("", ["c", "b", "a"]),
        ("?sort=date", ["a", "b", "c"]),
        ("?sort=name", ["a", "b", "c"]),
        ("?sort=-best", ["a", "b", "c"]),
        ("?sort=best", ["b", "a", "c"]),
        ("?sort=-errors", ["b", "c", "a"]),
    ],
)
def test_the_list_is_sorted_and_experiments_without_a_value_come_last(visitor, project, rows, query, order):
    rows.add_experiment(project, "a", best_value=0.9)
    rows.add_experiment(project, "b", best_value=0.1, n_errors=4)
    rows.add_experiment(project, "c")
    assert names(show(visitor, project, query)) == order


@pytest.mark.parametrize("query", ["?sort=record", "?sort=-project__name", "?group=owner", "?sort=spark"])
def test_an_order_or_group_that_does_not_exist_is_refused_in_words(visitor, project, rows, query):
    rows.add_experiment(project, "a")
    assert b'class="notice warn"' in show(visitor, project, query).content


def test_an_experiment_with_two_tags_stands_below_both(visitor, project, rows):
    rows.add_experiment(project, "one", tags=["x"])
    rows.add_experiment(project, "both", tags=["x", "y"])
    rows.add_experiment(project, "none")
    text = show(visitor, project, "?group=tag").content.decode()
    parts = re.findall(r'data-group="([^"]+)"|<a data-open [^>]*><bdi>([^<]*)<', text.partition("<tbody")[2])
    assert [group or name for group, name in parts] == ["no tag", "none", "x", "both", "one", "y", "both"]


@pytest.mark.parametrize("group", ["day", "model", "parent"])
def test_groups_count_all_their_rows_over_pages(visitor, project, rows, group):
    for number in range(130):
        rows.add_experiment(project, f"e{number}", model="m", parent_experiment_id="p", created=rows.START)
    first = visitor.get(f"/p/{project.id}/", {"group": group}).content.decode()
    assert first.count("data-row=") == 100
    assert re.search(r'scope="rowgroup"><bdi>[^<]+</bdi> <span class="muted">130<', first)
    second = visitor.get(f"/p/{project.id}/rows", {"group": group, "from": 100}).content.decode()
    assert second.count("data-row=") == 30
    assert "rowgroup" not in second


def test_a_hundred_rows_are_shown_and_the_rest_is_a_link(visitor, project, rows):
    for number in range(250):
        rows.add_experiment(project, f"e{number}")
    seen, query = [], ""
    for _ in range(3):
        page = visitor.get(f"/p/{project.id}/rows{query}")
        seen += names(page)
        more = re.search(r'href="(\?[^"]*)" data-more-link', page.content.decode())
        assert bool(more) == (b"data-more-link" in page.content)
        query = more[1].replace("&amp;", "&") if more else ""
    assert query == ""
    assert seen == [f"e{number}" for number in reversed(range(250))]


def test_columns_are_chosen_in_the_url(visitor, project, rows):
    rows.add_experiment(project, "a", model="qwen", cost_usd=1.5)
    text = show(visitor, project, "?cols=model,runs").content.decode()
    assert 'data-label="Model"' in text
    assert 'data-label="Cost"' not in text
    assert names(show(visitor, project, "?cols=model&cols=cost")) == ["a"]
    assert 'data-label="Cost"' in show(visitor, project, "?cols=nonsense").content.decode()


def test_a_row_says_verdict_score_interval_and_what_it_is_over(visitor, project, rows):
    rows.add_experiment(
        project, "a", verdict="supported", best_arm="lr", best_value=0.9, best_low=0.802, best_high=0.951, n_tasks=60,
        n_seeds=3, metric="val.pass@1", spark=[0.1, 0.5, None, 0.9], cost_usd=0.042, seconds=7200, n_errors=2,
    )  # fmt: skip
    text = show(visitor, project).content.decode()
    for part in ("0.900", "[0.802, 0.951]", "60 tasks, 3 seeds", "badge supported", "$0.042", "2.0 h", 'class="spark"'):
        assert part in text


@pytest.mark.parametrize(
    ("mark", "conclusion", "said"),
    [
        ("on training rows", "", "on training rows"),
        ("3 tasks in training rows", "", "3 tasks in training rows"),
        ("", "Leakage: 3 of 40 val/tools tasks appear in 5 of 200 training rows", "tasks in training rows"),
        ("", "Leakage: 3 of 40 test/tools tasks appear in 5 of 200 training rows", ""),
        ("", "", ""),
    ],
)
def test_a_row_says_that_its_score_is_on_training_rows(visitor, project, rows, mark, conclusion, said):
    from evsys_dashboard.summary import summarize

    record = {**rows.record_of("leaky", {"arm": ({}, [0.9, 0.92])}), "conclusion": conclusion}
    for run in record["runs"]:
        run["evals"][0] |= {"on_training_rows": mark.startswith("on"), "n_training_tasks": 3 if mark else 0}
    row = rows.add_experiment(project, "leaky", record=record)
    summarize(row)
    row.save()
    text = show(visitor, project).content.decode()
    assert re.findall(r'<div class="small caution">(.*?)</div>', text) == ([said] if said else [])
    [line] = csv.DictReader(io.StringIO(b"".join(show(visitor, project, "experiments.csv")).decode()))
    assert line["training_mark"] == said


@pytest.mark.parametrize(
    ("baseline", "candidate", "best", "why", "said"),
    [
        ("baseline", "better", "candidate", None, "better than the baseline"),
        ("baseline", "undecided", None, "no arm beats the baseline", "no arm beats the baseline"),
        ("baseline", "undecided", None, None, "no arm is proven best"),
        ("worse", "baseline", "candidate", None, "all other arms are worse"),
        (None, None, "candidate", None, ""),
    ],
)
def test_a_row_says_how_sure_it_is_that_the_best_arm_won(
    visitor, project, rows, baseline, candidate, best, why, said
):  # fmt: skip
    from evsys_dashboard.summary import summarize

    record = rows.record_of("sure", {"first": ({}, [0.5, 0.52]), "candidate": ({}, [0.9, 0.92])})
    record["best_arm"], record["verdict"]["why_no_best"] = best, why
    for arm, word in zip(record["verdict"]["arms"], (baseline, candidate), strict=True):
        arm["verdict"] = word
    row = rows.add_experiment(project, "sure", record=record)
    summarize(row)
    row.save()
    assert row.best_arm == "candidate"
    [cell] = re.findall(r'data-label="Best arm".*?</td>', show(visitor, project).content.decode(), re.DOTALL)
    assert re.findall(r'<div class="small clip"[^>]*>(.*?)</div>', cell) == ([said] if said else [])
    [line] = csv.DictReader(io.StringIO(b"".join(show(visitor, project, "experiments.csv")).decode()))
    assert line["standing"] == said


def test_a_single_arm_is_set_against_the_untrained_model(django_ready, rows):
    from evsys_dashboard.summary import standing_of
    from evsys_sdk.record.models import ExperimentRecord

    for word, said in (("better", "better than untrained"), ("undecided", "no clear difference from untrained")):
        record = rows.record_of("one", {"only": ({}, [0.5])})
        record["verdict"]["arms"][0]["vs_untrained"] = {"verdict": word}
        typed = ExperimentRecord.model_validate(record)
        assert standing_of(typed, typed.verdict.arms[0]) == said


@pytest.mark.parametrize(
    ("searched", "budget", "rollouts", "cost"),
    [
        ([0.5, 0.25], None, None, 0.75),
        ([0.5, 0.25], 0.1, None, 0.75),  # a budget that does not count searches
        ([0.5, 0.25], 1.0, None, 1.0),  # one that does
        ([0.5, 0.25], 1.0, 0.25, 1.0),
        ([0.5], None, 0.25, 0.75),
        ([], 0.1, None, 0.1),
        ([], None, None, None),
    ],
)
def test_what_prompt_searches_paid_is_in_the_cost_once(django_ready, searched, budget, rollouts, cost):
    from evsys_dashboard.summary import cost_of
    from evsys_sdk.record.models import ExperimentRecord

    runs = [{"run_id": f"e/r{n}", "metrics": {"cost_usd": usd}} for n, usd in enumerate(searched)]
    runs.append({"run_id": "e/again", "metrics": {"cost_usd": 9.0}, "reused_from": "../other/r0"})
    record = {"experiment": "e", "runs": runs, "budget": None if budget is None else {"spent": {"usd": budget}}}
    assert cost_of(ExperimentRecord.model_validate(record), rollouts_usd=rollouts) == cost


@pytest.mark.parametrize(
    ("status", "verdict", "badge"),
    [
        ("running", "", "running"),
        ("failed", "", "failed"),
        ("invalid", "supported", "invalid"),
        ("completed", "refuted", "refuted"),
        ("partial", "undecided", "undecided"),
    ],
)
def test_the_badge_is_the_verdict_unless_the_status_says_more(visitor, project, rows, status, verdict, badge):
    rows.add_experiment(project, "a", status=status, verdict=verdict)
    assert f'<span class="badge {badge}">{badge}</span>' in show(visitor, project).content.decode()


def test_a_completed_experiment_without_a_verdict_looks_like_no_win(visitor, project, rows):
    rows.add_experiment(project, "a", status="completed", verdict="", hypothesis="a higher rate helps")
    text = show(visitor, project).content.decode()
    assert '<span class="muted">hypothesis not judged</span><div class="muted small">completed</div>' in text
    assert "badge completed" not in text
    project.experiments.update(hypothesis="")
    text = show(visitor, project).content.decode()
    assert '<span class="muted">no hypothesis</span><div class="muted small">completed</div>' in text


def test_the_small_line_says_whether_it_is_a_score_or_the_loss(visitor, project, rows):
    rows.add_experiment(project, "a", metric="val.pass@1", spark={"of": "loss", "values": [2.0, 1.0]})
    rows.add_experiment(project, "b", metric="val.pass@1", spark={"of": "val.pass@1", "values": [0.1, 0.9]})
    text = show(visitor, project).content.decode()
    cells = re.findall(r'class="trend">.*?aria-label="([^"]*)".*?<bdi>(.*?)</bdi>', text)
    assert cells == [("val.pass@1 0.100 to 0.900", "val.pass@1"), ("loss 2.000 to 1.000", "loss")]


def test_the_reason_of_a_broken_record_is_in_its_row(visitor, project, rows):
    rows.add_experiment(project, "a", status="unreadable", problem="line 3 of journal.jsonl is torn")
    assert "<bdi>line 3 of journal.jsonl is torn</bdi>" in show(visitor, project).content.decode()


def test_csv_and_json_have_the_filtered_list_in_its_order(visitor, project, rows):
    for number in range(150):
        rows.add_experiment(project, f"e{number}", tags=["even"] if number % 2 == 0 else [], best_value=number / 150)
    query = {"q": "tag:even", "sort": "best"}
    given = visitor.get(f"/p/{project.id}/experiments.csv", query)
    lines = list(csv.DictReader(io.StringIO(given.getvalue().decode())))
    expected = [f"e{number}" for number in range(0, 150, 2)]
    assert [line["name"] for line in lines] == expected
    found = json.loads(visitor.get(f"/p/{project.id}/experiments.json", query).getvalue())
    assert [one["name"] for one in found] == expected
    assert found[0]["best_value"] == 0.0
    assert "record" not in found[0]
    assert json.loads(visitor.get(f"/p/{project.id}/experiments.json", {"q": "none"}).getvalue()) == []


def test_a_cell_that_begins_like_a_formula_is_text(visitor, project, rows):
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1"):
        rows.add_experiment(project, text)
    given = visitor.get(f"/p/{project.id}/experiments.csv")
    lines = list(csv.DictReader(io.StringIO(given.getvalue().decode())))
    assert all(line["name"].startswith("'") for line in lines)


def test_hostile_texts_are_only_shown(visitor, project, rows):
    for text in rows.HOSTILE:
        short = text[:300]
        rows.add_experiment(
            project, short, hypothesis=text, description=text, conclusion=text, tags=[text, text], best_value=0.5,
            model=short, best_arm=short, metric=text[:200], parent_experiment_id=short, spark=[text, 1, 2],
            algorithm=text[:100], id=f"{len(text)}-{text[:80] if text.isprintable() else ''}",
        )  # fmt: skip
    for query in ("", "?group=tag", "?group=parent", "?cols=name,model,algorithm,parent,tags,best,verdict"):
        text = show(visitor, project, query).content.decode()
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert "<svg onload" not in text
        assert 'href="javascript:' not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2066]", text)
        # Only what is meant to be searched for is long.
        assert len(text) < 200_000
    for text in rows.HOSTILE:
        assert visitor.get(f"/p/{project.id}/", {"q": text}).status_code == 200


def test_a_text_in_the_filter_is_only_shown(visitor, project, rows):
    rows.add_experiment(project, "a")
    text = visitor.get(f"/p/{project.id}/", {"q": '"><script>alert(1)</script>', "sort": "<b>"}).content.decode()
    assert "<script>alert" not in text
    assert "<b>" not in text.partition("<tbody")[0]


def test_another_project_is_not_seen(visitor, project, rows, team):
    from django.contrib.auth.models import User
    from django.test import Client

    from evsys_dashboard.models import Membership, Project

    rows.add_experiment(project, "secret")
    other = Project.objects.create(id=f"{project.id}-other", name="other", created=1.0)
    user = User.objects.create_user(f"user-{project.id}", password="a good password")
    Membership.objects.create(project=other, user=user)
    browser = Client()
    browser.force_login(user)
    for place in (
        "",
        "rows",
        "experiments.csv",
        "experiments.json",
        "progress",
        "progress.csv",
        "settings",
        "datasets",
    ):
        assert browser.get(f"/p/{project.id}/{place}").status_code == 404
    assert names(browser.get(f"/p/{other.id}/")) == []
    # An id of another project, asked for by the live page.
    found = browser.get(f"/p/{other.id}/rows", {"id": project.experiments.get().id})
    assert names(found) == []
    other.delete()
    user.delete()


def test_a_stranger_is_sent_to_the_login_page(project):
    from django.test import Client

    for place in ("", "rows", "experiments.csv", "progress", "settings", "datasets", "benchmarks"):
        answer = Client().get(f"/p/{project.id}/{place}")
        assert (answer.status_code, answer["Location"][:12]) == (302, "/login?next=")


def test_rows_by_id_are_those_that_the_filter_lets_through(visitor, project, rows):
    one, two = rows.add_experiment(project, "one", tags=["x"]), rows.add_experiment(project, "two")
    rows.add_experiment(project, "three", tags=["x"])
    answer = visitor.get(f"/p/{project.id}/rows", {"q": "tag:x", "id": [one.id, two.id]})
    assert names(answer) == ["one"]


def test_an_empty_project_says_what_to_do_next(visitor, project):
    text = show(visitor, project).content.decode()
    assert "No experiment yet" in text
    assert "evsys run config.yaml" in text
    assert f"EVSYS_PROJECT_ID={project.id}" in text


def test_a_filter_without_a_match_links_to_all(visitor, project, rows):
    rows.add_experiment(project, "a")
    assert "No experiment matches this filter" in show(visitor, project, "?q=zzz").content.decode()


def test_the_root_is_the_newest_project(visitor, project):
    from evsys_dashboard.models import Project

    newest = Project.objects.create(id=f"{project.id}/a b", name="newest", created=4e9)
    answer = visitor.get("/")
    assert (answer.status_code, answer["Location"]) == (302, f"/p/{project.id}%2Fa%20b/")
    newest.delete()


def test_the_list_reads_no_record_and_asks_few_questions(visitor, project, rows):
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    rows.add_study(project, 120)
    show(visitor, project)
    with CaptureQueriesContext(connection) as asked:
        show(visitor, project)
    assert len(asked) <= 6
    assert not any('"record"' in query["sql"] for query in asked)


@pytest.mark.parametrize(("compared", "verdict"), [("undecided", "undecided"), ("better", ""), (None, "")])
def test_a_single_arm_is_undecided_where_it_is_not_told_from_the_untrained_model(django_ready, compared, verdict):
    from evsys_dashboard.summary import verdict_of
    from evsys_sdk.record.models import ExperimentRecord

    arm = {"arm": "r0", "mean": 1.0, "vs_untrained": {"verdict": compared}}
    assert verdict_of(ExperimentRecord.model_validate({"experiment": "x", "verdict": {"arms": [arm]}})) == verdict
