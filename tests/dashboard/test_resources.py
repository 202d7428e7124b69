"""The read API: what its document says is what it answers, and one project never shows another."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from evsys_sdk.record.dashboard import wire


@pytest.fixture
def get(key: str) -> Any:
    from django.test import Client

    client = Client()
    return lambda path, **more: client.get(path, headers={"Authorization": f"Bearer {key}"}, **more)


def test_every_route_of_the_document_answers_as_its_schema_says(get, project, key, fill):
    jsonschema = pytest.importorskip("jsonschema")
    from django.test import Client

    from evsys_dashboard import suites

    experiment, run = fill(project, record={"experiment": "lr", "metrics": {"x": "NaN"}})
    announced = suites.SuiteAnnouncement(kind="dataset", name="d", sha256="0" * 64, n_rows=1)
    suite, _ = suites.announce(project, announced)
    suite.complete, suite.version, suite.fields = True, "1", {}
    suite.save()
    suites.SuiteRow.objects.create(suite=suite, number=0, text="{}")
    document = Client().get("/api/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    parts = {"project": project.pk, "experiment_id": experiment, "run_id": run, "suite_id": suite.pk}
    assert len(document["paths"]) >= 10
    for template, operations in document["paths"].items():
        for method, operation in operations.items():
            path = template.format(**parts)
            if method == "post":
                body = {"sql": "select * from experiments"}
                headers = {"Authorization": f"Bearer {key}"}
                answer = Client().post(path, body, content_type="application/json", headers=headers)
            else:
                answer = get(path)
            assert answer.status_code == 200, (path, answer.content)
            shape = operation["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(answer.json(), {**shape, "components": document["components"]})
            refused = Client().get(path)
            if method == "get":
                assert refused.status_code == 401, path
                error = operation["responses"]["401"]["content"]["application/json"]["schema"]
                jsonschema.validate(refused.json(), {**error, "components": document["components"]})


def test_a_schema_of_the_document_is_strict(get, project):
    from django.test import Client

    shapes = Client().get("/api/openapi.json").json()["components"]["schemas"]
    assert shapes["ExperimentSummary"]["additionalProperties"] is False
    assert "best_value" in shapes["ExperimentSummary"]["required"]


def test_pages_follow_each_other_newest_first_whatever_arrives_in_between(get, project, fill):
    for number in range(1, 8):
        fill(project, number)
    place = f"/api/v1/projects/{project.pk}/experiments?limit=3"
    first = get(place).json()
    fill(project, 9)
    names, after = [one["name"] for one in first["experiments"]], first["next"]
    while after:
        page = get(place, query_params={"limit": 3, "cursor": after}).json()
        names += [one["name"] for one in page["experiments"]]
        after = page["next"]
    assert names == [f"lr {number}" for number in range(7, 0, -1)]


def test_experiments_are_filtered(get, project, fill):
    fill(project, 1, status="completed", tags=["a", "b"])
    fill(project, 2, status="failed", tags=["b"])
    fill(project, 3, hypothesis="something ELSE entirely")

    def names(**query: Any) -> set[str]:
        found = get(f"/api/v1/projects/{project.pk}/experiments", query_params=query).json()
        return {one["name"] for one in found["experiments"]}

    assert names(status=["completed", "failed"]) == {"lr 1", "lr 2"}
    assert names(tag="b") == {"lr 1", "lr 2"}
    assert names(tag=["a", "b"]) == {"lr 1"}
    assert names(q="else ent") == {"lr 3"}
    assert names(q="' or 1=1 --") == set()
    assert names(min_value="0.5") == set()


@pytest.mark.parametrize(
    "query",
    ["limit=-1", "limit=x", "cursor=%00", "cursor=bm90anNvbg==", "cursor=WzFlOTk5LCJhIl0=", "min_value=nan", "q=%00",
     "since=abc", "limit=99999999999999999999"],
)  # fmt: skip
def test_a_wrong_parameter_is_refused_in_words(get, project, query):
    answer = get(f"/api/v1/projects/{project.pk}/experiments?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(query.split("=")[0])


def test_one_run_has_its_curves_and_evaluations(get, project, fill):
    _, run = fill(project)
    found = get(f"/api/v1/projects/{project.pk}/runs/{run}").json()
    assert {one["name"]: one["last"] for one in found["curves"]} == {"loss": 0.5, "bad": "NaN"}
    assert [(one["name"], one["split"], one["n_rollouts"]) for one in found["evals"]] == [("tools", "test", 2)]
    listed = get(f"/api/v1/projects/{project.pk}/runs", query_params={"experiment": found["experiment_id"]}).json()
    assert [one["id"] for one in listed["runs"]] == [run]


def test_changes_name_what_changed_since_a_cursor(get, project, fill):
    fill(project, 1)
    place = f"/api/v1/projects/{project.pk}/changes"
    start = get(place).json()
    assert (start["experiments"], start["runs"]) == ([], [])
    experiment, run = fill(project, 2)
    found = get(place, query_params={"since": start["cursor"]}).json()
    assert (found["experiments"], found["runs"], found["more"]) == ([experiment], [run], False)
    assert get(place, query_params={"since": found["cursor"]}).json()["experiments"] == []


def test_changes_beyond_one_answer_follow_in_the_next(get, project, monkeypatch, fill):
    from evsys_dashboard import changes

    monkeypatch.setattr(changes, "MAX_CHANGES", 2)
    monkeypatch.setattr(changes, "MOST_MARKS", 0)
    place = f"/api/v1/projects/{project.pk}/changes"
    cursor = get(place).json()["cursor"]
    made = {fill(project, number)[0] for number in range(1, 6)}
    seen: set[str] = set()
    more = True
    while more:
        found = get(place, query_params={"since": cursor}).json()
        assert float(found["cursor"]) > float(cursor.partition("~")[0])
        seen |= {*found["experiments"]}
        cursor, more = found["cursor"], found["more"]
    assert seen == made


def test_a_change_that_was_stamped_earlier_and_committed_later_is_told_once(get, project, fill):
    from evsys_dashboard.models import ExperimentRow

    place = f"/api/v1/projects/{project.pk}/changes"
    first, second = fill(project, 1)[0], fill(project, 2)[0]
    start = get(place).json()["cursor"]
    stamp = ExperimentRow.objects.get(pk=second).updated
    ExperimentRow.objects.filter(pk=second).update(updated=stamp + 1)
    found = get(place, query_params={"since": start}).json()
    assert found["experiments"] == [second]
    # Another process stamped this before the change above, and its commit is seen only now.
    ExperimentRow.objects.filter(pk=first).update(updated=stamp + 0.5)
    late = get(place, query_params={"since": found["cursor"]}).json()
    assert late["experiments"] == [first]
    assert get(place, query_params={"since": late["cursor"]}).json()["experiments"] == []


@pytest.mark.parametrize("since", ["x", "nan", "inf~", "~", "~abc", "1e999"])
def test_a_cursor_that_is_none_is_refused(get, project, since):
    answer = get(f"/api/v1/projects/{project.pk}/changes", query_params={"since": since})
    assert answer.status_code == 422 and "cursor" in answer.json()["error"]


def test_another_projects_key_sees_nothing(project, fill):
    from django.test import Client

    from evsys_dashboard.auth import make_key
    from evsys_dashboard.models import Project

    other = Project.objects.create(id=f"{project.pk}-other", name="other", created=1.0)
    headers = {"Authorization": f"Bearer {make_key(other, 'k', 'write')[1]}"}
    experiment, run = fill(project)
    for path in (f"experiments/{experiment}", "experiments", f"runs/{run}", "runs", "suites", "changes"):
        assert Client().get(f"/api/v1/projects/{project.pk}/{path}", headers=headers).status_code == 404
    for path in (f"experiments/{experiment}", f"runs/{run}"):
        assert Client().get(f"/api/v1/projects/{other.pk}/{path}", headers=headers).status_code == 404
    assert [one["id"] for one in Client().get("/api/v1/projects", headers=headers).json()["projects"]] == [other.pk]
    other.delete()


def test_only_get_is_answered(project, key):
    from django.test import Client

    answer = Client().post(f"/api/v1/projects/{project.pk}/experiments", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 405


def test_ids_that_are_none_are_not_found(get, project):
    for bad in ("%00", "..%2f..%2fetc", "'%20or%201=1"):
        for kind in ("experiments", "runs", "suites"):
            assert get(f"/api/v1/projects/{project.pk}/{kind}/{bad}").status_code == 404


def test_numbers_in_answers_are_json(get, project, fill):
    _, run = fill(project)
    text = get(f"/api/v1/projects/{project.pk}/runs/{run}").content.decode()
    json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert wire.number(json.loads(text)["curves"][0]["last"]) or math.nan
