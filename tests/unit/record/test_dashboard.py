from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.errors import DashboardClientError, EvsysAuthError, EvsysError
from evsys_sdk.record.dashboard.client import DashboardClient, ExperimentRun

Environ = dict[str, str]


def messages(lines: list[logging.LogRecord], level: int = logging.WARNING) -> list[str]:
    return [line.getMessage() for line in lines if line.levelno >= level]


def test_a_run_arrives_whole_and_in_order(dashboard: Any, environ: Environ) -> None:
    with DashboardClient(environ=environ) as client:
        experiment = client.create_experiment("exp", hypothesis="h", tags=["a"])
        run = client.create_generation(experiment, name="r0", recipe_kind="sft", run_config={"lr": 1e-5})
        for step in range(1, 101):
            client.log_step_metric(run, step, {"loss": 1 / step})
        evaluation = client.log_eval_run(run, metrics={"pass@1": 0.5}, name="tools", split="val", step=100)
        client.log_predictions(run, [{"task_id": "t", "reward": 1.0}], eval_run_id=evaluation)
        client.update_generation(run, status="completed")
        client.update_experiment(experiment, conclusion="it works")
    routes = [(method, path.removeprefix("/api/dashboard/api/sdk")) for method, path, _ in dashboard.requests]
    assert routes[:2] == [("POST", "/experiments/"), ("POST", "/generations/")]
    assert routes[-2:] == [("PATCH", f"/generations/{run}/"), ("PATCH", f"/experiments/{experiment}/")]
    assert [item["step"] for item in dashboard.items("steps")] == list(range(1, 101))
    assert dashboard.items("predictions")[0]["eval_run_id"] == evaluation
    assert dashboard.bodies("/eval/")[0]["metrics"] == {"pass@1": 0.5}
    assert dashboard.requests[0][2]["tags"] == ["a"]
    sent = dashboard.headers[0]
    assert (sent["Authorization"], sent["X-Evsys-Project"]) == ("Bearer evk_secret", "p1")


def test_steps_travel_in_batches(dashboard: Any, environ: Environ) -> None:
    with DashboardClient(environ=environ) as client:
        for step in range(5000):
            client.log_step_metric(f"g{step % 3}", step, {"loss": 1.0})
    assert len(dashboard.items("steps")) == 5000
    assert len(dashboard.requests) < 100


def test_missing_credentials_are_named_with_the_way_out() -> None:
    with pytest.raises(EvsysAuthError, match=r"needs EVSYS_API_KEY and EVSYS_PROJECT_ID.*EVSYS_OFFLINE=1"):
        DashboardClient(environ={})
    with pytest.raises(EvsysAuthError, match=r"needs EVSYS_PROJECT_ID \("):
        DashboardClient(api_key="k", environ={})


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(EvsysError, match="EVSYS_API_URL = 'localhost:8000' is no http"):
        DashboardClient(api_url="localhost:8000", environ={"EVSYS_OFFLINE": "1"})


def test_arguments_win_over_the_environment(tmp_path: Path) -> None:
    environ = {"EVSYS_OFFLINE": "true", "EVSYS_PROJECT_ID": "a", "EVSYS_LOG_DIR": "/nowhere"}
    client = DashboardClient(project_id="b", log_dir=tmp_path, environ=environ)
    assert (client.project_id, client.mirror_dir, client.offline) == ("b", tmp_path / "b", True)


def test_offline_everything_is_in_the_mirror_and_nothing_is_sent(
    dashboard: Any, environ: Environ, tmp_path: Path
) -> None:
    with DashboardClient(environ={"EVSYS_OFFLINE": "1", "EVSYS_LOG_DIR": str(tmp_path / "m")}) as client:
        run = client.create_generation(client.create_experiment("exp"))
        client.log_step_metric(run, 1, {"loss": float("nan")})
        path = client.mirror_path
        assert client.flush() and path is not None
    assert path.parent == tmp_path / "m" / "local"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("path", "").rsplit("/sdk/")[-1] for line in lines] == [
        "", "experiments/", "generations/", f"generations/{run}/step/",
    ]  # fmt: skip
    assert lines[3]["body"]["metrics"] == {"loss": "NaN"}
    assert dashboard.requests == []


def test_an_offline_session_can_be_replayed_into_a_server(dashboard: Any, environ: Environ, tmp_path: Path) -> None:
    with DashboardClient(environ={**environ, "EVSYS_OFFLINE": "1"}) as offline:
        offline.create_experiment("exp")
        session = offline.mirror_path
        assert session is not None
    with DashboardClient(environ=environ) as client:
        assert client.flush() and dashboard.requests == []
        client.replay(session)
        assert client.flush()
        with pytest.raises(EvsysError, match="no such file"):
            client.replay(tmp_path / "nothing.jsonl")
    assert [body["name"] for body in dashboard.bodies("/experiments/")] == ["exp"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_wrong_request_raises_where_it_was_made(dashboard: Any, environ: Environ, status: int) -> None:
    with DashboardClient(environ=environ) as client:
        dashboard.rule = lambda path, body: status
        with pytest.raises(DashboardClientError, match=rf"HTTP {status}: .*no such thing") as caught:
            client.create_experiment("exp")
        assert caught.value.status == status
        dashboard.rule = lambda path, body: 200


def test_refused_credentials_raise_at_every_call_and_send_all_when_they_are_mended(
    dashboard: Any, environ: Environ
) -> None:
    with DashboardClient(environ=environ) as client:
        dashboard.rule = lambda path, body: 401
        for name in ("a", "b"):
            with pytest.raises(DashboardClientError):
                client.create_experiment(name)
        client.log_step_metric("g", 1, {"loss": 1.0})
        assert client.flush(2) is False
        dashboard.rule = lambda path, body: 200
        assert client.flush(5)
    assert [body["name"] for body in dashboard.bodies("/experiments/")] == ["a", "b"]
    assert len(dashboard.items("steps")) == 1


def test_a_rejected_record_does_not_hold_up_the_rest(dashboard: Any, environ: Environ) -> None:
    def no_thirteen(path: str, body: dict[str, Any]) -> int:
        return 422 if any(item["step"] == 13 for item in body.get("steps", [])) else 200

    dashboard.rule = no_thirteen
    with DashboardClient(environ=environ) as client:
        for step in range(20):
            client.log_step_metric("g", step, {"loss": 1.0})
        assert client.flush()
        rejected = client.mirror_path.with_suffix(".rejected")  # type: ignore[union-attr]
    assert [item["step"] for item in dashboard.items("steps")] == [n for n in range(20) if n != 13]
    assert [json.loads(line)["body"]["step"] for line in rejected.read_text().splitlines()] == [13]


def test_a_server_that_is_down_costs_one_warning_and_gets_everything_later(
    dashboard: Any, environ: Environ, log_lines: list[logging.LogRecord]
) -> None:
    dashboard.stop()
    with DashboardClient(environ=environ) as client:
        experiment = client.create_experiment("exp")
        run = client.create_generation(experiment)
        for step in range(10):
            client.log_step_metric(run, step, {"loss": 1.0})
        assert client.flush(0.2) is False
        client.update_generation(run, status="completed")
        assert len(messages(log_lines)) == 1 and "out of reach" in messages(log_lines)[0]
        dashboard.start()
        assert client.flush(10)
    assert [path.rsplit("/sdk/")[-1] for _, path, _ in dashboard.requests] == [
        "experiments/", "generations/", f"generations/{run}/step/", f"generations/{run}/",
    ]  # fmt: skip
    assert "the dashboard is back; the mirror has been sent" in messages(log_lines, logging.INFO)


def test_an_answer_of_500_is_tried_again(dashboard: Any, environ: Environ) -> None:
    dashboard.answers = [500, 503]
    with DashboardClient(environ=environ) as client:
        client.create_experiment("exp")
        assert dashboard.requests == []
        assert client.flush(10)
    assert [body["name"] for body in dashboard.bodies("/experiments/")] == ["exp"]


def test_a_server_that_does_not_answer_blocks_only_once_and_briefly(dashboard: Any, environ: Environ) -> None:
    silent = threading.Event()
    dashboard.rule = lambda path, body: 200 + 0 * silent.wait(10)
    client = DashboardClient(environ=environ, timeout_seconds=0.5)
    started = time.monotonic()
    for name in "abcdefgh":
        client.create_experiment(name)
    client.log_step_metric("g", 1, {"loss": 1.0})
    blocked = time.monotonic() - started
    assert client.finish(0.5) is False
    assert blocked < 2 and time.monotonic() - started < 5
    silent.set()


def test_finish_says_what_is_left_and_where(
    dashboard: Any, environ: Environ, log_lines: list[logging.LogRecord]
) -> None:
    dashboard.stop()
    client = DashboardClient(environ=environ)
    client.create_experiment("exp")
    client.log_step_metric("g", 1, {"loss": 1.0})
    assert client.finish(0.3) is False
    assert f"2 records were not sent; the next client sends them from {client.mirror_path}" in messages(log_lines)
    with pytest.raises(EvsysError, match="closed"):
        client.log_step_metric("g", 2, {"loss": 1.0})
    dashboard.start()
    with DashboardClient(environ=environ) as following:
        assert following.flush(10)
    assert len(dashboard.bodies("/experiments/")) == len(dashboard.items("steps")) == 1


KILLED = """
import sys, time
from evsys_sdk.record.dashboard.client import DashboardClient
client = DashboardClient()
run = client.create_generation(client.create_experiment("exp"), generation_id="g")
for step in range(300):
    client.log_step_metric(run, step, {"loss": 1.0})
assert client.flush(20)
print("half", flush=True)
sys.stdin.readline()
for step in range(300, 600):
    client.log_step_metric(run, step, {"loss": 1.0})
print("logged", flush=True)
time.sleep(60)
"""


def test_a_killed_client_loses_nothing_and_the_next_one_sends_the_rest_once(dashboard: Any, environ: Environ) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], env={**os.environ, **environ}, stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "half\n"
            dashboard.stop()
            process.stdin.write("on\n")
            process.stdin.flush()
            assert process.stdout.readline() == "logged\n"
        finally:
            process.send_signal(signal.SIGKILL)
    assert len(dashboard.items("steps")) == 300
    dashboard.start()
    for _ in range(2):
        with DashboardClient(environ=environ) as client:
            assert client.flush(10)
    assert [item["step"] for item in dashboard.items("steps")] == list(range(600))


def test_two_clients_of_one_mirror_keep_out_of_each_others_way(dashboard: Any, environ: Environ) -> None:
    with DashboardClient(environ=environ) as one, DashboardClient(environ=environ) as two:
        for step in range(200):
            one.log_step_metric("one", step, {"loss": 1.0})
            two.log_step_metric("two", step, {"loss": 1.0})
        assert one.mirror_path != two.mirror_path
    for name in ("one", "two"):
        sent = [item["step"] for body in dashboard.bodies(f"/{name}/step/") for item in body["steps"]]
        assert sent == list(range(200))


def test_a_script_that_forgets_to_finish_still_delivers(dashboard: Any, environ: Environ) -> None:
    code = (
        "from evsys_sdk.record.dashboard.client import DashboardClient as C; C().log_step_metric('g', 1, {'loss': 1.0})"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ}, check=True, timeout=300)
    assert len(dashboard.items("steps")) == 1


def test_the_example_of_the_reference(dashboard: Any, environ: Environ) -> None:
    client = DashboardClient(environ=environ)
    with ExperimentRun(client, experiment_name="sft_run_v9", recipe_kind="sft", run_config={"lr": 1e-5}) as run:
        for step in range(1, 11):
            run.log_step(step, {"reward/mean": 0.5}, loss=1 / step)
        run.log_eval(metrics={"pass_at_1": 0.83}, benchmark_id="b1")
        run.set_best_score(0.83)
        run.set_conclusion("rank-8 LoRA wins")
    client.finish()
    assert dashboard.items("steps")[0]["metrics"] == {"reward/mean": 0.5, "loss": 1.0}
    updates = dashboard.bodies(f"/experiments/{run.experiment_id}/")
    merged = {key: value for body in updates for key, value in body.items()}
    assert (merged["best_score"], merged["conclusion"]) == (0.83, "rank-8 LoRA wins")
    assert dashboard.bodies(f"/generations/{run.generation_id}/")[-1]["status"] == "completed"
    assert dashboard.bodies("/eval/")[0]["benchmark_id"] == "b1"


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("boom"), "failed"), (KeyboardInterrupt(), "cancelled")])
def test_an_exception_is_recorded_and_resumes(
    dashboard: Any, environ: Environ, error: BaseException, status: str
) -> None:
    with DashboardClient(environ=environ) as client:
        run = ExperimentRun(client, experiment_name="exp")
        with pytest.raises(type(error)), run:
            raise error
    last = dashboard.bodies(f"/generations/{run.generation_id}/")[-1]
    assert (last["status"], last["error"]) == (status, f"{type(error).__name__}: {error}")


def test_an_exception_is_not_hidden_by_a_dashboard_that_refuses(dashboard: Any, environ: Environ) -> None:
    def refuse_and_fail() -> None:
        dashboard.rule = lambda path, body: 404
        raise RuntimeError("boom")

    with DashboardClient(environ=environ) as client:
        with pytest.raises(RuntimeError, match="boom"), ExperimentRun(client, experiment_name="exp"):
            refuse_and_fail()


def test_a_benchmark_block_becomes_one_eval_with_its_predictions(dashboard: Any, environ: Environ) -> None:
    with DashboardClient(environ=environ) as client, ExperimentRun(client, experiment_name="exp") as run:
        with run.benchmark("tools", version=2) as scoring:
            scoring.log_prediction(task_id="t1", completion="x", reward=1.0)
            scoring.log_metrics({"pass@1": 1.0})
        with pytest.raises(RuntimeError), run.benchmark("tools", version=2):
            raise RuntimeError("judge gone")
    first, second = dashboard.bodies("/benchmarks/")
    assert first["id"] == second["id"]
    good, bad = dashboard.bodies("/eval/")
    assert (good["metrics"], good["benchmark_id"]) == ({"pass@1": 1.0}, first["id"]) and "error" not in good
    assert (bad["metrics"], bad["error"]) == ({}, "RuntimeError: judge gone")
    assert [p["eval_run_id"] for p in dashboard.items("predictions")] == [good["id"]]
