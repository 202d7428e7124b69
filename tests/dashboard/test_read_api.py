"""Curves and rollouts of the read API: columns, zoom, non-finite numbers, and who may ask."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("django_ready")


def make_run(project: Any, values: dict[int, float], *, metric: str = "loss", seed: int = 1) -> Any:
    from evsys_dashboard.models import ExperimentRow, GenerationRow
    from evsys_dashboard.points import write_points

    row, _ = ExperimentRow.objects.get_or_create(
        id=f"e-{project.pk}", defaults={"project": project, "name": "exp", "created": 1.0, "updated": 1.0}
    )
    run = GenerationRow.objects.create(
        id=f"g-{project.pk}-{seed}", project=project, experiment=row, name=f"a__s{seed}", arm="a", seed=seed,
        created=1.0, updated=1.0, last_step=max(values),
    )  # fmt: skip
    write_points({(run.pk, metric): {step: (value, 1) for step, value in values.items()}})
    return run


def ask(client: Any, project: Any, path: str, **headers: str) -> Any:
    return client.get(f"/api/v1/projects/{project.pk}/{path}", headers=headers)


def test_a_curve_is_columns_with_words_for_what_is_not_finite(visitor, project):
    run = make_run(project, {1: 0.5, 2: math.nan, 3: math.inf, 4: -math.inf})
    found = ask(visitor, project, f"runs/{run.pk}/curves?metric=loss").json()
    assert found["metrics"] == ["loss"]
    [series] = found["series"]
    assert (series["run"], series["arm"], series["seed"], series["n"]) == (run.pk, "a", 1, 4)
    assert series["step"] == [1, 2, 3, 4] and series["value"] == [0.5, "NaN", "Infinity", "-Infinity"]


def test_a_spike_survives_downsampling_and_zoom_gives_finer_points(visitor, project):
    values = dict.fromkeys(range(10000), 1.0) | {5_123: 99.0}
    run = make_run(project, values)
    [coarse] = ask(visitor, project, f"runs/{run.pk}/curves?metric=loss&width=50").json()["series"]
    assert coarse["n"] == 10_000 and len(coarse["step"]) <= 110 and 99.0 in coarse["value"]
    [fine] = ask(visitor, project, f"runs/{run.pk}/curves?metric=loss&width=50&from=5100&to=5150").json()["series"]
    assert fine["step"] == list(range(5100, 5151))


def test_an_experiment_gives_a_series_per_run_and_scores_with_their_intervals(visitor, sweep):
    row = sweep["sweep"]
    path = f"experiments/{row.pk}/curves?metric=loss&metric=val/words/pass@1"
    found = ask(visitor, row.project, path).json()
    assert found["metrics"][:2] == ["loss", "test/held_out/pass@1"]
    assert len(found["series"]) == 12
    scores = next(one for one in found["series"] if one["metric"] != "loss" and one["arm"] == "all")
    assert scores["step"] == [0, 10, 20, 30] and scores["value"][-1] == 1.0
    assert scores["low"][-1] == pytest.approx(0.824, abs=1e-3) and scores["high"][-1] == 1.0


@pytest.mark.parametrize("query", ["width=many", "from=x", "to=1e999"])
def test_a_number_that_is_none_is_refused_with_its_name(visitor, project, query):
    run = make_run(project, {1: 0.5})
    answer = ask(visitor, project, f"runs/{run.pk}/curves?metric=loss&{query}")
    assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]


def test_a_key_reads_its_own_project_only(project, key):
    from django.test import Client

    from evsys_dashboard.auth import make_key
    from evsys_dashboard.models import Project

    run = make_run(project, {1: 0.5})
    other = Project.objects.create(id=f"other-{project.pk}", name="Other", created=1.0)
    try:
        for path in (f"runs/{run.pk}/curves", f"experiments/e-{project.pk}/curves", f"runs/{run.pk}/rollouts"):
            assert ask(Client(), project, path, Authorization=f"Bearer {key}").status_code == 200
            assert ask(Client(), project, path).status_code == 401
            stranger = make_key(other, "x", "read")[1]
            assert ask(Client(), project, path, Authorization=f"Bearer {stranger}").status_code == 404
            assert ask(Client(), other, path, Authorization=f"Bearer {stranger}").status_code == 404
    finally:
        other.delete()


def test_an_agents_key_gets_no_rollouts_of_a_test_split(sweep):
    from django.test import Client

    from evsys_dashboard.auth import make_key

    row = sweep["sweep"]
    run = row.generations.get(name="all__s42")
    agent, reader = (make_key(row.project, scope, scope)[1] for scope in ("agent", "read"))
    path = f"runs/{run.pk}/rollouts?limit=500"
    seen = [ask(Client(), row.project, path, Authorization=f"Bearer {one}").json() for one in (agent, reader)]
    assert [found["n"] for found in seen] == [72, 78]
    held_out = {one["task_id"] for one in seen[1]["rollouts"]} - {one["task_id"] for one in seen[0]["rollouts"]}
    assert len(held_out) == 6


def test_an_agents_key_cannot_turn_a_test_into_something_else(project):
    from django.test import Client

    from evsys_dashboard.auth import make_key
    from evsys_dashboard.ingest import read_predictions, save_predictions

    run = make_run(project, {1: 0.5})
    agent, writer = (make_key(project, scope, scope)[1] for scope in ("agent", "write"))

    def send(key: str, name: str, split: str, ts: float, status: int = 200) -> None:
        place = f"/api/dashboard/api/sdk/generations/{run.pk}/eval/"
        body = {"id": f"{name}-{project.pk}", "ts": ts, "name": "tools", "split": split}
        answer = Client().post(place, body, "application/json", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status, answer.content

    send(writer, "after", "test", 10.0)
    send(agent, "after", "val", 20.0, status=409)
    send(agent, "before", "val", 20.0)
    send(writer, "before", "test", 10.0)
    send(writer, "open", "val", 10.0)
    for name in ("after", "before", "open"):
        item = {"id": f"r-{name}-{project.pk}", "ts": 10.0, "task_id": name, "eval_run_id": f"{name}-{project.pk}"}
        save_predictions(read_predictions(project, run.pk, item))
    found = ask(Client(), project, f"runs/{run.pk}/rollouts", Authorization=f"Bearer {agent}").json()
    assert [one["task_id"] for one in found["rollouts"]] == ["open"]


def test_a_rollout_that_names_an_evaluation_of_another_project_learns_nothing_of_it(project):
    from django.test import Client

    from evsys_dashboard.auth import make_key
    from evsys_dashboard.ingest import read_predictions, save_eval, save_predictions
    from evsys_dashboard.models import Project

    other = Project.objects.create(id=f"other-{project.pk}", name="Other", created=1.0)
    try:
        theirs = save_eval(
            other, make_run(other, {1: 0.5}), {"id": f"v-{other.pk}", "ts": 1.0, "name": "secret", "split": "val"}
        )
        run = make_run(project, {1: 0.5})
        item = {"id": f"r-{project.pk}", "ts": 1.0, "task_id": "t", "completion": "x", "eval_run_id": theirs.pk}
        save_predictions(read_predictions(project, run.pk, item))
        theirs.refresh_from_db()
        assert theirs.n_rollouts == 0
        headers = {"Authorization": f"Bearer {make_key(project, 'agent', 'agent')[1]}"}
        place, sql = (
            f"/api/v1/projects/{project.pk}/query",
            "select task_id, benchmark, split, completion from rollouts",
        )
        found = Client().post(place, {"sql": sql}, "application/json", headers=headers).json()
        assert found["rows"] == [["t", None, None, None]]
        assert ask(Client(), project, f"runs/{run.pk}/rollouts", **headers).json()["n"] == 0
    finally:
        other.delete()


def test_rollouts_come_with_question_turns_and_expected_answer(visitor, sweep):
    row = sweep["sweep"]
    run = row.generations.get(name="half__s42")
    one = run.evals.get(step=30)
    found = ask(visitor, row.project, f"runs/{run.pk}/rollouts?eval={one.pk}&passed=0&limit=2").json()
    assert found["n"] == 8 and len(found["rollouts"]) == 2
    first = found["rollouts"][0]
    assert first["outcome"] == "failed" and first["messages"][0]["text"] == f"say {first['expected']}"
    assert first["messages"][-1]["n_tokens"] > 0


def test_an_answer_says_how_many_curves_it_left_out(visitor, sweep, monkeypatch):
    from evsys_dashboard import curves

    row = sweep["sweep"]
    path = f"experiments/{row.pk}/curves?metric=loss&metric=val/words/pass@1"
    assert ask(visitor, row.project, path).json()["left_out"] == 0
    monkeypatch.setattr(curves, "MOST_SERIES", 5)
    found = ask(visitor, row.project, path).json()
    assert (len(found["series"]), found["left_out"]) == (5, 7)
