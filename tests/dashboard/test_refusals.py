"""What the server refuses, and how it says so: keys, bodies, names of hosts, pages of other sites."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from servers import WAIT_SECONDS, ServerProcess

LIMIT = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    found = ServerProcess(f"sqlite://{tmp_path_factory.mktemp('d') / 'd.sqlite'}", projects=["p1", "p2"]).start()
    found.make_run()
    yield found
    found.stop()


STEP = {"steps": [{"step": 1, "ts": 1.0, "metrics": {"loss": 1.0}}]}
ROUTES = [
    ("POST", "generations/g1/step/", STEP),
    ("POST", "generations/g1/predictions/", {"predictions": []}),
    ("POST", "experiments/", {"id": "e9", "name": "n", "ts": 1.0}),
    ("PATCH", "experiments/e1/", {"status": "failed", "ts": 1.0}),
    ("POST", "generations/", {"id": "g9", "experiment_id": "e1", "name": "n", "ts": 1.0}),
    ("PATCH", "generations/g1/", {"status": "failed", "ts": 1.0}),
    ("POST", "generations/g1/eval/", {"id": "v9", "ts": 1.0}),
    ("POST", "benchmarks/", {"id": "b9", "name": "b", "ts": 1.0}),
]


def reason(answer: requests.Response) -> str:
    assert answer.headers["content-type"].startswith("application/json"), answer.text
    assert "set-cookie" not in answer.headers
    return str(answer.json()["error"])


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=[f"{method} {path}" for method, path, _ in ROUTES])
def test_every_route_wants_a_key_of_its_project(server, method, path, body):
    def ask(authorization: str, project: str = "p1") -> requests.Response:
        headers = {"Authorization": authorization, "X-Evsys-Project": project}
        return server.post(path, body, method=method, headers=headers)

    def count() -> list[object]:
        return [server.rows(f"SELECT count(*) FROM dashboard_{table}") for table in ("experiment", "eval", "suite")]

    before = count()
    for wrong in ("", "Bearer", "Bearer evk_wrong", f"Basic {server.key}", "Bearer " + "x" * 5000):
        answer = ask(wrong)
        assert answer.status_code == 401, wrong
        assert "API key" in reason(answer)
    assert ask(f"Bearer {server.key}", "p2").status_code == 403
    assert count() == before


@pytest.mark.parametrize(("method", "path", "body"), [one for one in ROUTES if "1/" in one[1]])
def test_a_key_of_another_project_finds_nothing_and_changes_nothing(server, method, path, body):
    headers = {"Authorization": f"Bearer {server.keys['p2']}", "X-Evsys-Project": "p2"}
    answer = server.post(path, body, method=method, headers=headers)
    unknown = server.post(path.replace("e1/", "x1/").replace("g1/", "x1/"), body, method=method, headers=headers)
    assert (answer.status_code, unknown.status_code) == (404, 404)
    assert reason(answer).replace("e1", "x1").replace("g1", "x1") == reason(unknown)
    assert server.rows("SELECT status FROM dashboard_experiment WHERE id = 'e1'") == [("running",)]


def test_an_id_of_another_project_is_taken(server):
    headers = {"Authorization": f"Bearer {server.keys['p2']}", "X-Evsys-Project": "p2"}
    answer = server.post("experiments/", {"id": "e1", "name": "mine", "ts": 9e9}, headers=headers)
    assert (answer.status_code, "taken" in reason(answer)) == (409, True)
    assert server.rows("SELECT name, project_id FROM dashboard_experiment WHERE id = 'e1'") == [("e", "p1")]


def test_a_prediction_cannot_overwrite_one_of_another_project(server):
    item = {"id": "shared", "ts": 1.0, "task_id": "t", "completion": "of p1"}
    assert server.post("generations/g1/predictions/", {"predictions": [item]}).status_code == 200
    headers = {"Authorization": f"Bearer {server.keys['p2']}", "X-Evsys-Project": "p2"}
    run = {"id": "g-of-p2", "experiment_id": "e-of-p2", "name": "r", "ts": 1.0}
    assert server.post("generations/", run, headers=headers).status_code == 200
    stolen = {**item, "completion": "of p2", "ts": 9.0}
    server.post("generations/g-of-p2/predictions/", {"predictions": [stolen]}, headers=headers)
    found = server.rows("SELECT completion, project_id FROM dashboard_prediction WHERE id = 'shared'")
    assert found == [("of p1", "p1")]


def test_a_key_of_an_agent_adds_rollouts_and_changes_none(server):
    path, item = "generations/g1/predictions/", {"id": "graded", "ts": 1.0, "task_id": "t", "completion": "wrong"}
    assert server.post(path, {"predictions": [{**item, "reward": 0.0}]}).status_code == 200
    text = "evk_agent"
    values = f"('p1', 'agent', '{text}', '{hashlib.sha256(text.encode()).hexdigest()}', 'agent', 1.0)"
    server.write(f"INSERT INTO dashboard_apikey (project_id, name, prefix, sha256, scope, created) VALUES {values}")
    better = [{**item, "ts": 9.0, "reward": 1.0}, {**item, "id": "graded-2", "ts": 9.0, "reward": 1.0}]
    headers = {"Authorization": f"Bearer {text}"}
    assert server.post(path, {"predictions": better}, headers=headers).status_code == 200
    query = "SELECT id, reward FROM dashboard_prediction WHERE id LIKE 'graded%' ORDER BY id"
    assert server.rows(query) == [("graded", 0.0), ("graded-2", 1.0)]
    assert server.post(path, {"predictions": better}).status_code == 200
    assert server.rows(query) == [("graded", 1.0), ("graded-2", 1.0)]  # a person's key may


def test_a_key_of_an_agent_adds_evaluations_and_changes_none(server):
    text = "evk_agent_of_evals"
    values = f"('p1', 'agent', '{text}', '{hashlib.sha256(text.encode()).hexdigest()}', 'agent', 1.0)"
    server.write(f"INSERT INTO dashboard_apikey (project_id, name, prefix, sha256, scope, created) VALUES {values}")
    agent, path = {"Authorization": f"Bearer {text}"}, "generations/g1/eval/"
    first = {"id": "judged", "ts": 5.0, "name": "tools", "split": "val", "metrics": {"pass@1": 0.25}, "seconds": 1.5}
    assert server.post(path, {**first, "note": "from elsewhere"}, headers=agent).status_code == 200
    assert server.post(path, {**first, "note": "from elsewhere", "ts": 6.0}, headers=agent).status_code == 200
    changes = [{"metrics": {"pass@1": 1.0}}, {"split": "train"}, {"name": "easier"}, {"note": "x"}, {"step": 3}]
    for ts in (1.0, 9.0):
        for change in changes:
            answer = server.post(path, {**first, "note": "from elsewhere", "ts": ts, **change}, headers=agent)
            assert (answer.status_code, "changes none" in reason(answer)) == (409, True), change
    query = "SELECT name, split, step, metrics FROM dashboard_eval WHERE id = 'judged'"
    assert server.rows(query) == [("tools", "val", None, '{"pass@1": 0.25}')]
    assert server.post(path, {**first, "id": "judged-2", "ts": 9.0}, headers=agent).status_code == 200
    assert server.post(path, {**first, "ts": 9.0, "metrics": {"pass@1": 0.5}}).status_code == 200  # a person's key
    assert server.rows(query) == [("tools", "val", None, '{"pass@1": 0.5}')]


def test_a_taken_id_tells_nothing_of_the_other_project(server):
    headers = {"Authorization": f"Bearer {server.keys['p2']}", "X-Evsys-Project": "p2"}
    secret = {"name": "secret name", "ts": 1.0, "description": "secret"}
    assert server.post("experiments/", {"id": "of-p1", **secret}).status_code == 200
    answer = server.post("experiments/", {"id": "of-p1", "name": "mine", "ts": 2.0}, headers=headers)
    assert (answer.status_code, reason(answer)) == (409, "the id 'of-p1' is taken; make a new one")
    # A benchmark's id follows from its name, which can be guessed: nothing tells that another project has it.
    suite = {"id": "suite-of-p1", "name": "secret benchmark", "version": "7", "ts": 1.0}
    assert server.post("benchmarks/", suite).status_code == 200
    for ts in (2.0, 3.0):
        answer = server.post("benchmarks/", {"id": "suite-of-p1", "name": "mine", "ts": ts}, headers=headers)
        assert (answer.status_code, list(answer.json())) == (200, ["id"])
    query = "SELECT project_id, name, version FROM dashboard_suite WHERE project_id < 'p3' ORDER BY 1, 2"
    found = [row for row in server.rows(query) if row[1] in ("mine", "secret benchmark")]
    assert found == [("p1", "secret benchmark", "7"), ("p2", "mine", "")]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"steps": 1}', b'{"steps": [1]}', b'{"steps": [{}]}',
        b'{"steps": [{"step": "1", "ts": 1, "metrics": {}}]}', b'{"steps": [{"step": 1.5, "ts": 1, "metrics": {}}]}',
        b'{"steps": [{"step": 1e300, "ts": 1, "metrics": {}}]}', b'{"steps": [{"step": true, "ts": 1, "metrics": {}}]}',
        b'{"steps": [{"step": 1, "ts": "now", "metrics": {}}]}',
        b'{"steps": [{"step": 1, "ts": 1e300, "metrics": {}}]}',
        b'{"steps": [{"step": 1, "ts": 1, "metrics": {"loss": null}}]}',
        b'{"steps": [{"step": 1, "ts": 1, "metrics": {"loss": "high"}}]}',
        b'{"steps": [{"step": 1, "ts": 1, "metrics": {"loss": NaN}}]}',
        b'{"steps": [{"step": 1, "ts": 1, "metrics": [1]}]}', b"[" * 100_000,
        b'{"steps": [{"step": 1, "ts": 1, "metrics": {"loss": ' + b"9" * 5000 + b"}}]}",
    ],
)  # fmt: skip
def test_a_malformed_batch_is_refused_with_a_reason_and_nothing_of_it_is_stored(server, body):
    before = server.rows("SELECT count(*) FROM dashboard_point")
    answer = server.post("generations/g1/step/", data=body)
    assert answer.status_code == 422
    assert reason(answer)
    assert server.rows("SELECT count(*) FROM dashboard_point") == before


@pytest.mark.parametrize(
    "body",
    [
        {"name": "n", "ts": 1.0}, {"id": "", "name": "n", "ts": 1.0}, {"id": "x" * 101, "name": "n", "ts": 1.0},
        {"id": "a/b", "name": "n", "ts": 1.0}, {"id": 7, "name": "n", "ts": 1.0}, {"id": "ok", "name": "n"},
        {"id": "ok", "name": 7, "ts": 1.0}, {"id": "ok", "ts": 1.0, "status": "fine"}, {"id": "ok", "ts": "x"},
        {"id": "ok", "ts": 1.0, "tags": "t"}, {"id": "ok", "ts": 1.0, "config": []},
    ],
)  # fmt: skip
def test_a_malformed_experiment_is_refused_with_the_name_of_the_field(server, body):
    answer = server.post("experiments/", body)
    assert answer.status_code == 422
    assert any(reason(answer).startswith(f"{key}:") for key in ("id", "name", "ts", "status", "tags", "config"))
    assert server.rows("SELECT count(*) FROM dashboard_experiment WHERE id = 'ok'") == [(0,)]


def test_scores_notes_and_checkpoints_that_no_page_could_show_are_refused(server):
    wrong = [[1], ["x"], [None], [{"value": [1]}], [{"value": "high"}], [{"n_tasks": "x"}], [{"low": {}}], {"a": 1}]
    for scores in wrong:
        answer = server.post("generations/g1/eval/", {"id": "odd", "ts": 1.0, "scores": scores})
        assert (answer.status_code, reason(answer).partition(":")[0]) == (422, "scores"), scores
    for field, value in (("checkpoints", [1]), ("checkpoints", [{"step": "x"}]), ("checkpoints", [{"path": "a"}])):
        answer = server.post("generations/g1/", {"ts": 2.0, field: value}, method="PATCH")
        assert (answer.status_code, reason(answer).partition(":")[0]) == (422, field), value
    assert server.post("experiments/e1/", {"ts": 2.0, "notes": ["x"]}, method="PATCH").status_code == 422
    numbers = {"id": "words", "ts": 1.0, "metrics": {"odd": {"a": [1]}, "nan": "NaN", "fine": 0.5}}
    assert server.post("generations/g1/eval/", numbers).status_code == 200
    scores = [{"metric": "m", "value": "NaN", "low": None, "high": 1.0, "n_tasks": 3}, {"metric": ["l"], "value": 1}]
    assert server.post("generations/g1/eval/", {"id": "nan", "ts": 1.0, "scores": scores}).status_code == 200
    browser = requests.Session()
    browser.get(server.url + server.link, timeout=WAIT_SECONDS)
    for page in ("p/p1/runs/g1", "p/p1/rollouts?run=g1", "p/p1/experiments/e1", "api/v1/projects/p1/runs/g1"):
        assert browser.get(f"{server.url}/{page}", timeout=WAIT_SECONDS).status_code == 200, page


@pytest.mark.parametrize("path", ["generations/g1/step/", "experiments/"])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(server, path):
    url = f"/api/dashboard/api/sdk/{path}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as line:
        head = f"POST {url} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}\r\n"
        line.sendall(f"{head}Content-Length: {LIMIT + 1}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_a_stranger_may_not_send_much(server):
    answer = requests.post(f"{server.url}/login", data=b"x" * 100_000, timeout=WAIT_SECONDS)
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["generations/g1/step/", "experiments/"])
def test_a_small_body_that_unpacks_to_gigabytes_is_refused(server, path):
    bomb = gzip.compress(b"0" * (LIMIT + 1000))
    assert len(bomb) < 100_000
    answer = server.post(path, data=bomb, headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, "unpacks" in reason(answer)) == (413, True)


def test_a_compressed_batch_is_taken_and_a_broken_stream_is_not(server):
    item = {"steps": [{"step": 1, "ts": 1.0, "metrics": {"zipped": 1.0}}]}
    packed = gzip.compress(json.dumps(item).encode())
    headers = {"Content-Encoding": "gzip"}
    assert server.post("generations/g1/step/", data=packed, headers=headers).status_code == 200
    assert server.rows("SELECT n FROM dashboard_metrickey WHERE name = 'zipped'") == [(1,)]
    for broken in (packed[:-5], b"plain", b""):
        assert server.post("generations/g1/step/", data=broken, headers=headers).status_code == 422
    assert server.post("generations/g1/step/", data=packed, headers={"Content-Encoding": "br"}).status_code == 415


@pytest.mark.parametrize("path", ["/login", "/api/dashboard/api/sdk/generations/g1/step/"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "127.0.0.1@evil.example"])
def test_a_foreign_host_name_is_refused(server, path, host):
    answer = requests.post(
        server.url + path, data="{}", timeout=WAIT_SECONDS,
        headers={"Host": host, "Authorization": f"Bearer {server.key}"},
    )  # fmt: skip
    assert answer.status_code == 400


@pytest.mark.parametrize("path", ["/login", "/api/dashboard/api/sdk/generations/g1/step/"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example"]
)
def test_requests_from_pages_of_other_sites_are_refused(server, path, origin):
    headers = {"Origin": origin, "Authorization": f"Bearer {server.key}"}
    answer = requests.post(server.url + path, data="{}", timeout=WAIT_SECONDS, headers=headers)
    assert (answer.status_code, "other sites" in reason(answer)) == (403, True)


def test_a_page_of_ours_may_send_requests(server):
    headers = {"Origin": server.url}
    assert requests.get(f"{server.url}/login", timeout=WAIT_SECONDS, headers=headers).status_code == 401


def test_no_method_but_the_right_one(server):
    assert server.post("generations/g1/step/", STEP, method="GET").status_code == 405
    assert server.post("experiments/", {}, method="PUT").status_code == 405


def test_unknown_runs_and_experiments_are_named(server):
    for method, path, body in [
        ("POST", "generations/none/step/", STEP),
        ("POST", "generations/none/eval/", {"id": "v", "ts": 1.0}),
        ("PATCH", "generations/none/", {"ts": 1.0}),
        ("PATCH", "experiments/none/", {"ts": 1.0}),
    ]:
        answer = server.post(path, body, method=method)
        assert (answer.status_code, "none" in reason(answer)) == (404, True)


def test_every_answer_forbids_frames_and_foreign_scripts(server):
    answer = requests.get(f"{server.url}/login", timeout=WAIT_SECONDS)
    assert answer.headers["x-frame-options"] == "DENY"
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_a_thousand_connections_at_once_are_all_answered(server):
    lines: list[socket.socket] = []
    request = b"GET /login HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    try:
        for _ in range(1000):
            lines.append(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS))
        for line in lines:
            line.sendall(request)
        assert all(line.recv(20).startswith(b"HTTP/1.1 401") for line in lines)
    finally:
        for line in lines:
            line.close()


def test_a_slow_client_holds_up_no_other(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as slow:
        head = "POST /api/dashboard/api/sdk/generations/g1/step/ HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        slow.sendall(f"{head}Authorization: Bearer {server.key}\r\nContent-Length: 1000\r\n\r\n{{".encode())
        done: list[Any] = []
        threads = [
            threading.Thread(target=lambda: done.append(server.post("generations/g1/step/", STEP).status_code))
            for _ in range(20)
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert done == [200] * 20
        assert time.monotonic() - began < WAIT_SECONDS


def test_a_bomb_is_not_unpacked_before_it_is_refused(django_ready):
    import tracemalloc

    from evsys_dashboard.auth import Refusal
    from evsys_dashboard.request_body import unpack

    bomb = gzip.compress(b"0" * 20_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="unpacks"):
            unpack(bomb, "gzip", limit=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_page_that_does_not_exist_leads_back_to_the_lab(visitor, project):
    for path in (f"p/{project.id}/experiments/none", "p/none/", "nothing/here"):
        answer = visitor.get(f"/{path}")
        assert answer.status_code == 404
        assert '<a href="/">Open the Lab</a>' in answer.content.decode(), path
