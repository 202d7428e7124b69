"""What changed since a live page last asked."""

from __future__ import annotations

import time


def ask(visitor, project, since: str = "") -> dict:
    answer = visitor.get(f"/api/v1/projects/{project.id}/changes", {"since": since} if since else {})
    assert answer.status_code == 200
    return answer.json()


def test_the_first_question_gets_a_cursor_and_no_ids(visitor, project, rows):
    rows.add_experiment(project, "old", updated=time.time())
    found = ask(visitor, project)
    assert (found["experiments"], found["runs"]) == ([], [])
    assert float(found["cursor"]) < time.time()


def test_what_changed_after_the_cursor_is_named_also_if_it_was_committed_a_moment_late(visitor, project, rows):
    from evsys_dashboard.models import Generation

    rows.add_experiment(project, "old", updated=time.time() - 3600)
    cursor = ask(visitor, project)["cursor"]
    new = rows.add_experiment(project, "new", updated=time.time() - 1)
    run = Generation.objects.create(
        id=f"{project.id}-run", project=project, experiment=new, name="r", created=1.0, updated=time.time()
    )
    found = ask(visitor, project, cursor)
    assert (found["experiments"], found["runs"]) == ([new.id], [run.id])
    assert float(found["cursor"]) >= float(cursor)


def test_what_was_told_long_enough_ago_is_not_told_again(visitor, project, rows):
    rows.add_experiment(project, "a", updated=time.time() - 60)
    found = ask(visitor, project, repr(time.time() - 120))
    assert len(found["experiments"]) == 1
    assert ask(visitor, project, found["cursor"])["experiments"] == []


def test_more_changes_than_an_answer_holds_come_with_the_next(visitor, project, rows):
    from evsys_dashboard.models import Experiment

    start = time.time() - 3600
    Experiment.objects.bulk_create(
        Experiment(id=f"{project.id}-{n}", project=project, name="x", created=1.0, updated=start + n)
        for n in range(700)
    )
    seen, cursor = set(), repr(start - 1)
    for _ in range(3):
        found = ask(visitor, project, cursor)
        assert len(found["experiments"]) <= 500
        seen |= set(found["experiments"])
        cursor = found["cursor"]
    assert len(seen) == 700


def test_a_cursor_that_is_none_is_refused_in_words(visitor, project):
    for text in ("yesterday", "nan", "inf"):
        answer = visitor.get(f"/api/v1/projects/{project.id}/changes", {"since": text})
        assert answer.status_code == 400
        assert "no cursor" in answer.json()["error"]


def test_only_the_own_project_is_told_and_only_to_its_people_and_keys(project, key, rows):
    from django.test import Client

    from evsys_dashboard.models import Project

    other = Project.objects.create(id=f"{project.id}-other", name="other", created=1.0)
    rows.add_experiment(other, "theirs", updated=time.time())
    mine = rows.add_experiment(project, "mine", updated=time.time())
    url, since = f"/api/v1/projects/{project.id}/changes", {"since": repr(time.time() - 60)}
    assert Client().get(url, since).status_code == 401
    found = Client().get(url, since, headers={"Authorization": f"Bearer {key}"})
    assert found.json()["experiments"] == [mine.id]
    theirs = f"/api/v1/projects/{other.id}/changes"
    assert Client().get(theirs, since, headers={"Authorization": f"Bearer {key}"}).status_code == 404
    other.delete()
