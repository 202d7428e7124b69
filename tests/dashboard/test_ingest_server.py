"""A real server, the real client, SQLite and PostgreSQL: nothing lost, nothing doubled, whoever is killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from servers import WAIT_SECONDS, ServerProcess

from evsys_sdk import DashboardClient, ExperimentRun

POINTS = (
    "SELECT k.name, p.step, p.kind, p.value FROM dashboard_point p JOIN dashboard_metrickey k ON k.id = p.key_id "
    "ORDER BY k.name, p.step"
)
COUNT_POINTS = "SELECT count(*) FROM dashboard_point"


def client_of(server: ServerProcess, folder: Path, **how: Any) -> DashboardClient:
    return DashboardClient(
        api_url=server.url, api_key=server.key, project_id=server.projects[0], log_dir=folder / "mirror", **how
    )


def dump(server: ServerProcess) -> dict[str, list[Any]]:
    """Everything that was sent, as the database has it; without what the server adds (its clock)."""
    tables = {
        "experiment": "id, name, hypothesis, status, tags, conclusion, best_score, created, ended, field_times",
        "generation": "id, name, status, run_config, metrics, checkpoints, error, created, ended, last_step",
        "eval": "id, name, split, step, metrics, scores, n_rollouts, created",
        "prediction": "id, task_id, reward, status, completion, body, created",
        "metrickey": "name, n, last_step, last, last_kind, low, high",
        "suite": "id, name, kind, fields, created",
    }
    found = {
        name: server.rows(f"SELECT {columns} FROM dashboard_{name} ORDER BY 1") for name, columns in tables.items()
    }
    return {**found, "point": server.rows(POINTS)}


def send_everything(client: DashboardClient) -> None:
    with ExperimentRun(client, experiment_name="sft", recipe_kind="sft", run_config={"lr": 1e-5}, tags=["t"]) as run:
        for step in range(1, 21):
            run.log_step(step, loss=1 / step, norm=math.nan if step == 3 else math.inf if step == 4 else 2.0)
        with run.benchmark("tools", split="val", step=20) as scoring:
            scoring.log_metrics({"pass@1": 0.5})
            scoring.log_prediction(task_id="t1", completion="yes \u2028 \x00 é", reward=1.0, turns=[{"text": "yes"}])
            scoring.log_prediction(task_id="t2", completion="no", reward=0.0, error="boom")
        run.set_best_score(0.5)
        run.set_conclusion("it works")
        run.update_generation(last_checkpoint={"step": 20, "path": "/w"})
    assert client.finish(WAIT_SECONDS)


def test_what_the_client_sends_is_what_the_server_has(server, tmp_path):
    send_everything(client_of(server, tmp_path))
    [(name, status, conclusion, best)] = server.rows(
        "SELECT name, status, conclusion, best_score FROM dashboard_experiment"
    )
    assert (name, status, conclusion, best) == ("sft", "completed", "it works", 0.5)
    [(arm, kind, last_step)] = server.rows("SELECT arm, recipe_kind, last_step FROM dashboard_generation")
    assert (arm, kind, last_step) == ("sft", "sft", 20)
    points = server.rows(POINTS)
    loss = [(step, value) for metric, step, _, value in points if metric == "loss"]
    assert loss == [(step, 1 / step) for step in range(1, 21)]
    norm = {step: (code, value) for metric, step, code, value in points if metric == "norm"}
    assert (norm[3], norm[4], norm[5]) == ((1, None), (2, None), (0, 2.0))
    assert server.rows("SELECT n, low, high FROM dashboard_metrickey ORDER BY name") == [
        (20, 0.05, 1.0),
        (20, 2.0, 2.0),
    ]
    assert server.rows("SELECT name, split, step, n_rollouts FROM dashboard_eval") == [("tools", "val", 20, 2)]
    told = server.rows("SELECT task_id, completion, reward FROM dashboard_prediction ORDER BY task_id")
    assert told == [("t1", "yes \u2028 \ufffd é", 1.0), ("t2", "no", 0.0)]  # NUL is no text of a database


def test_a_replay_changes_nothing(server, tmp_path):
    client = client_of(server, tmp_path)
    send_everything(client)
    before = dump(server)
    assert client.mirror_path is not None
    for _ in range(2):
        again = client_of(server, tmp_path / "other")
        again.replay(client.mirror_path)
        assert again.finish(WAIT_SECONDS)
        assert dump(server) == before


def test_per_field_the_newest_value_counts_in_whichever_order_it_arrives(server):
    server.make_run()
    now = time.time()
    patch = {"status": "completed", "conclusion": "late", "ts": now + 10}
    assert server.post("experiments/e1/", patch, method="PATCH").status_code == 200
    older = {"status": "failed", "conclusion": "early", "description": "d", "ts": now + 5}
    assert server.post("experiments/e1/", older, method="PATCH").status_code == 200
    found = server.rows("SELECT status, conclusion, description FROM dashboard_experiment")
    assert found == [("completed", "late", "d")]


def test_a_run_may_arrive_before_its_experiment(server):
    run = {"id": "g1", "experiment_id": "later", "name": "r", "status": "running", "ts": 20.0}
    assert server.post("generations/", run).status_code == 200
    assert server.post("experiments/", {"id": "later", "name": "real", "ts": 10.0}).status_code == 200
    assert server.rows("SELECT name, created, n_runs FROM dashboard_experiment") == [("real", 10.0, 1)]


def test_a_killed_server_loses_nothing_that_it_acknowledged_and_doubles_nothing(server, tmp_path):
    client = client_of(server, tmp_path, timeout_seconds=5)
    sent, stop = 0, threading.Event()
    with ExperimentRun(client, experiment_name="killed") as run:

        def write() -> None:
            nonlocal sent
            while not stop.is_set():
                sent += 1
                run.log_step(sent, loss=float(sent))

        thread = threading.Thread(target=write)
        thread.start()
        for _ in range(3):
            wanted = server.rows(COUNT_POINTS)[0][0] + 200
            wait_for(lambda wanted=wanted: server.rows(COUNT_POINTS)[0][0] >= wanted)
            server.kill()
            server.start()
        stop.set()
        thread.join()
        assert client.flush(WAIT_SECONDS)
    assert client.finish(WAIT_SECONDS)
    found = [(step, value) for _, step, _, value in server.rows(POINTS)]
    assert found == [(step, float(step)) for step in range(1, sent + 1)]
    assert server.rows("SELECT n, last FROM dashboard_metrickey") == [(sent, float(sent))]
    assert server.rows("SELECT status FROM dashboard_experiment") == [("completed",)]


def wait_for(condition: Any) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def test_what_a_killed_client_left_is_sent_by_the_next(sqlite_server, tmp_path):
    server = sqlite_server
    script = textwrap.dedent(
        """
        import os, signal, sys
        from evsys_sdk import DashboardClient, ExperimentRun

        client = DashboardClient()
        with ExperimentRun(client, experiment_name="killed") as run:
            for step in range(1, 1001):
                run.log_step(step, loss=float(step))
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    environ = {
        **os.environ, "EVSYS_API_URL": server.url, "EVSYS_API_KEY": server.key, "EVSYS_PROJECT_ID": "p1",
        "EVSYS_LOG_DIR": str(tmp_path / "mirror"),
    }  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", script], env=environ, timeout=WAIT_SECONDS)
    assert ended.returncode == -signal.SIGKILL
    following = client_of(server, tmp_path)
    following.record_benchmark("anything")
    assert following.finish(WAIT_SECONDS)
    assert [(step, value) for _, step, _, value in server.rows(POINTS)] == [(n, float(n)) for n in range(1, 1001)]


def test_a_frozen_server_does_not_hold_up_the_client(sqlite_server, tmp_path):
    server = sqlite_server
    client = client_of(server, tmp_path, timeout_seconds=5)
    with ExperimentRun(client, experiment_name="frozen") as run:
        run.log_step(0, loss=0.0)
        assert client.flush(WAIT_SECONDS)
        server.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            for step in range(1, 1001):
                run.log_step(step, loss=float(step))
            took = time.monotonic() - began
        finally:
            server.signal(signal.SIGCONT)
        # 1,000 steps take milliseconds; a single request to a frozen server takes the whole timeout of 5 seconds.
        assert took < 4.5
        assert client.flush(WAIT_SECONDS)
    assert client.finish(WAIT_SECONDS)
    assert server.rows(COUNT_POINTS) == [(1001,)]


def test_batches_of_several_clients_at_once_are_all_there(server):
    server.make_run()
    answers: list[int] = []

    def send(number: int) -> None:
        for step in range(20):
            metrics = {f"m{number}": float(step)}
            item = {"steps": [{"step": step, "ts": 1.0, "metrics": metrics}]}
            answers.append(server.post("generations/g1/step/", item).status_code)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 160
    assert server.rows(COUNT_POINTS) == [(160,)]
    assert server.rows("SELECT DISTINCT n FROM dashboard_metrickey") == [(20,)]


def test_one_bad_item_is_set_aside_and_the_others_arrive(server, tmp_path):
    client = client_of(server, tmp_path)
    with ExperimentRun(client, experiment_name="bad") as run:
        run.log_predictions([{"task_id": f"t{n}", "completion": 7 if n == 5 else "x"} for n in range(20)])
        assert client.flush(WAIT_SECONDS)
    client.finish(WAIT_SECONDS)
    found = {task for (task,) in server.rows("SELECT task_id FROM dashboard_prediction")}
    assert found == {f"t{n}" for n in range(20)} - {"t5"}


def test_the_server_ends_cleanly_on_ctrl_c(sqlite_server):
    assert sqlite_server.stop() == 0


def test_the_schema_of_both_databases_is_the_one_of_the_models(server):
    script = textwrap.dedent(
        """
        import sys
        from evsys_dashboard.settings import ServerOptions, configure
        configure(ServerOptions(database_url=sys.argv[1], secret_key="x"))
        from django.core.management import call_command
        call_command("makemigrations", "--check", "--dry-run", verbosity=1)
        """
    )
    subprocess.run([sys.executable, "-c", script, server.database_url], check=True, timeout=WAIT_SECONDS)


def test_records_arrive_whole(server):
    server.make_run()
    record = {"experiment": "e", "metrics": {"loss": "NaN"}, "deep": [[{"a": "ü\u2028"}]]}
    assert server.post("experiments/e1/", {"record": record, "ts": 9e9}, method="PATCH").status_code == 200
    [(text,)] = server.rows("SELECT record FROM dashboard_experiment")
    assert (json.loads(text) if isinstance(text, str) else text) == record


@pytest.mark.parametrize("text", ["a\x00b", "half \ud83d pair"])
def test_texts_that_no_database_can_store_are_stored_without_those_characters(server, text):
    server.make_run()
    item = {"id": "x", "ts": 1.0, "task_id": text, "completion": text, "metadata": {text: text}}
    assert server.post("generations/g1/predictions/", {"predictions": [item]}).status_code == 200
    clean = text.replace("\x00", "\ufffd").replace("\ud83d", "\ufffd")
    assert server.rows("SELECT task_id, completion FROM dashboard_prediction") == [(clean, clean)]
