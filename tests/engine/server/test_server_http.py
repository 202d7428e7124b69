"""The server seen from the wire: order, repetition, bad bodies, keys, silence."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import tarfile
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

import numpy as np
import pytest
from plain_http import Plain
from toy_engine import EOS, ToyEngine

from evsys_engine.server import ServerAddress, ServerLimits, background_server
from evsys_engine.server.wire import FLOAT32, INT64, message
from evsys_engine.types import EngineError

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def batch(model, number, loss_fn="cross_entropy", forward_only=False):
    request = message("ForwardBackwardRequest")
    request.model_id, request.seq_id, request.loss_fn, request.forward_only = model, number, loss_fn, forward_only
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([2, 3, 4], dtype=np.int32).tobytes()
    for name, values, dtype in [("target_tokens", [3, 4, EOS], INT64), ("weights", [1.0, 1.0, 1.0], FLOAT32)]:
        tensor = datum.loss_fn_inputs[name]
        kind = np.int64 if dtype == INT64 else np.float32
        tensor.dense, tensor.dtype = np.array(values, dtype=kind).tobytes(), dtype
    return request.SerializeToString()


def optim_step(model, number):
    return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 0.1}}


def eventually(check, seconds=300):
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


@pytest.fixture
def patient(toy, tmp_path):
    """A server on which no number is given up while a busy machine is slow to send it."""
    with background_server(toy, tmp_path / "patient", limits=ServerLimits(quiet_seconds=120.0)) as server:
        yield Plain(server.url)


def test_calls_run_in_the_order_of_their_numbers_whatever_order_they_come_in(patient, toy):
    plain = patient
    _, model = plain.open_model(toy.info.name)
    late = [plain("optim_step", optim_step(model, 4)), plain("optim_step", optim_step(model, 2))]
    late.append(plain("forward_backward", batch(model, 3), **PROTOBUF))
    time.sleep(0.2)
    assert toy.log == []
    plain("forward_backward", batch(model, 1, forward_only=True), **PROTOBUF)
    for _, ticket in late[:2]:
        assert plain("retrieve_future", {"request_id": ticket["request_id"]})[0] == 200
    assert toy.log == ["forward", "optim_step", "forward_backward", "optim_step"]


def test_a_call_sent_twice_is_done_once(plain, toy):
    _, model = plain.open_model(toy.info.name)
    first = plain("optim_step", optim_step(model, 1))
    assert plain("optim_step", optim_step(model, 1)) == first
    answer = plain("retrieve_future", {"request_id": first[1]["request_id"]})
    assert plain("optim_step", optim_step(model, 1)) == first
    assert plain("retrieve_future", {"request_id": first[1]["request_id"]}) == answer
    assert toy.log == ["optim_step"]


def test_a_model_and_a_sampler_asked_for_twice_are_made_once(plain, toy, server):
    session, model = plain.open_model(toy.info.name)
    again = {"session_id": session, "model_seq_id": 0, "base_model": toy.info.name}
    made = plain("create_model", again)[1]
    assert plain("retrieve_future", {"request_id": made["request_id"]})[1]["model_id"] == model
    ask = {"session_id": session, "sampling_session_seq_id": 0, "base_model": toy.info.name}
    sampler = plain("create_sampling_session", ask)[1]["sampling_session_id"]
    assert plain("create_sampling_session", ask)[1]["sampling_session_id"] == sampler
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [2]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    assert plain("asample", sample) == plain("asample", sample)
    assert len(server.service.sessions.all()[0].models) == 1
    eventually(lambda: toy.batches)
    assert toy.batches == [1]


def test_a_number_that_never_comes_does_not_stop_the_model_for_ever(toy, tmp_path):
    with background_server(toy, tmp_path, limits=ServerLimits(gap_seconds=0.3)) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(toy.info.name)
        ticket = plain("optim_step", optim_step(model, 3))[1]
        assert "grad_norm" in plain("retrieve_future", {"request_id": ticket["request_id"]})[1]["metrics"]
        status, answer = plain("optim_step", optim_step(model, 1))
        assert status == 400 and "late" in answer["detail"]
        assert plain("optim_step", optim_step(model, 4))[0] == 200
        eventually(lambda: toy.log == ["optim_step"] * 2)


def test_a_number_whose_body_is_still_arriving_is_waited_for(toy, tmp_path):
    with background_server(toy, tmp_path, limits=ServerLimits(quiet_seconds=0.2)) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(toy.info.name)
        body = batch(model, 1)
        connection = http.client.HTTPConnection(plain.url.removeprefix("http://"), timeout=300)
        connection.putrequest("POST", "/api/v1/forward_backward")
        connection.putheader("Content-Type", PROTOBUF["Content-Type"])
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:10])
        eventually(lambda: server.service.arriving == 1)
        last = plain("optim_step", optim_step(model, 2))[1]
        time.sleep(1.0)  # five times as long as a number that is not arriving is waited for
        assert toy.log == []
        connection.send(body[10:])
        assert connection.getresponse().status == 200
        assert plain("retrieve_future", {"request_id": last["request_id"]})[0] == 200
        assert toy.log == ["forward_backward", "optim_step"] and server.service.arriving == 0


def test_a_body_that_never_ends_holds_up_later_calls_for_a_while_only(toy, tmp_path):
    with background_server(toy, tmp_path, limits=ServerLimits(quiet_seconds=0.1, gap_seconds=0.5)) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(toy.info.name)
        connection = http.client.HTTPConnection(plain.url.removeprefix("http://"), timeout=300)
        connection.putrequest("POST", "/api/v1/forward_backward")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"x")
        eventually(lambda: server.service.arriving == 1)
        last = plain("optim_step", optim_step(model, 2))[1]
        assert "metrics" in plain("retrieve_future", {"request_id": last["request_id"]})[1]
        connection.close()


def post_piece(plain, body, length):
    """Announce `length` bytes, send `body`, and do not wait for leave to send the rest."""
    connection = http.client.HTTPConnection(plain.url.removeprefix("http://"), timeout=300)
    connection.putrequest("POST", "/api/v1/forward_backward")
    connection.putheader("Content-Type", PROTOBUF["Content-Type"])
    connection.putheader("Content-Length", str(length))
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


REFUSALS = {
    "a route that does not exist": lambda plain, model: plain(
        "save_weights_external", {"model_id": model, "seq_id": 1}
    ),
    "a bad field": lambda plain, model: plain("save_weights", {"model_id": model, "seq_id": 1, "ttl_seconds": -5}),
    "a number that JSON does not have": lambda plain, model: plain(
        "optim_step", f'{{"model_id": "{model}", "seq_id": 1, "adam_params": {{"learning_rate": NaN}}}}'.encode()
    ),
    "the wrong content type": lambda plain, model: plain("forward_backward", {"model_id": model, "seq_id": 1}),
    "garbage behind the number": lambda plain, model: plain(
        "forward_backward", batch(model, 1)[: 2 + len(model) + 2] + b"\xff\xff", **PROTOBUF
    ),
    "a body that is too large": lambda plain, model: post_piece(plain, batch(model, 1), 2**40),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_call_does_not_hold_up_the_next_one(patient, toy, refusal):
    plain = patient
    _, model = plain.open_model(toy.info.name)
    status, _ = REFUSALS[refusal](plain, model)
    assert 400 <= status < 500
    ticket = plain("optim_step", optim_step(model, 2))[1]
    # A missing number is waited for: for 120 s on this server; the answer is polled for at most 25.
    assert "metrics" in plain("retrieve_future", {"request_id": ticket["request_id"]}, timeout=60)[1]
    status, answer = plain("optim_step", optim_step(model, 1))
    assert status == 409 and "refused" in answer["detail"]


def test_a_refused_call_may_be_corrected_under_its_number(plain, toy):
    _, model = plain.open_model(toy.info.name)
    assert plain("save_weights", {"model_id": model, "seq_id": 1, "ttl_seconds": -5})[0] == 400
    ticket = plain("optim_step", optim_step(model, 1))[1]
    assert "metrics" in plain("retrieve_future", {"request_id": ticket["request_id"]})[1]


def test_a_refused_call_does_not_let_a_later_one_overtake_those_before_it(patient, toy):
    plain = patient
    _, model = plain.open_model(toy.info.name)
    assert plain("save_weights_external", {"model_id": model, "seq_id": 2})[0] == 404
    last = plain("optim_step", optim_step(model, 3))[1]
    assert toy.log == []
    plain("forward_backward", batch(model, 1), **PROTOBUF)
    assert plain("retrieve_future", {"request_id": last["request_id"]})[0] == 200
    assert toy.log == ["forward_backward", "optim_step"]


def test_the_same_number_with_another_payload_is_a_conflict(plain, toy):
    session, model = plain.open_model(toy.info.name)
    first = plain("optim_step", optim_step(model, 1))
    other = {**optim_step(model, 1), "adam_params": {"learning_rate": 0.2}}
    status, answer = plain("optim_step", other)
    assert status == 409 and "different request" in answer["detail"]
    assert plain("forward_backward", batch(model, 1), **PROTOBUF)[0] == 409
    assert plain("optim_step", {**optim_step(model, 1), "retries": 3}) == first  # a key the server does not read
    plain("forward_backward", batch(model, 2), **PROTOBUF)
    assert plain("forward_backward", batch(model, 2, forward_only=True), **PROTOBUF)[0] == 409

    again = {"session_id": session, "model_seq_id": 0, "base_model": toy.info.name}
    assert plain("create_model", {**again, "lora_config": {"rank": 1}})[0] == 409
    ask = {"session_id": session, "sampling_session_seq_id": 0, "base_model": toy.info.name}
    sampler = plain("create_sampling_session", ask)[1]["sampling_session_id"]
    path = "tinker://run/sampler_weights/one"
    assert plain("create_sampling_session", {**ask, "base_model": None, "model_path": path})[0] == 409
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [2]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    assert plain("asample", sample)[0] == 200
    assert plain("asample", {**sample, "num_samples": 2})[0] == 409


def test_a_run_without_checkpoints_does_not_break_the_lists(plain, toy, server):
    session, model = plain.open_model(toy.info.name)
    other_session, other = plain.open_model(toy.info.name)
    for name, number in ((model, 1), (other, 1)):
        ticket = plain("save_weights", {"model_id": name, "path": "one", "seq_id": number})[1]
        assert "path" in plain("retrieve_future", {"request_id": ticket["request_id"]})[1]
    assert plain(f"training_runs/{model}/checkpoints/weights/one", method="DELETE")[0] == 200
    plain(f"sessions/{session}/finish", b"{}")
    plain(f"sessions/{other_session}/finish", b"{}")
    (server.service.checkpoints.folder / "torn" / "weights" / "one").mkdir(parents=True)
    (server.service.checkpoints.folder / "torn" / "weights" / "one" / "checkpoint.json").write_text("{")
    status, answer = plain("training_runs")
    assert status == 200 and [run["training_run_id"] for run in answer["training_runs"]] == [other]
    assert plain(f"training_runs/{model}")[0] == 404
    status, answer = plain("checkpoints")
    assert status == 200 and [found["checkpoint_id"] for found in answer["checkpoints"]] == ["weights/one"]


def test_a_checkpoint_id_without_its_kind_is_named_as_such(plain, toy):
    _, model = plain.open_model(toy.info.name)
    for method, path in (("DELETE", "one"), ("PUT", "one/ttl")):
        status, answer = plain(f"training_runs/{model}/checkpoints/{path}", method=method)
        assert (
            status == 400
            and "Invalid checkpoint identifier 'one'. Expected format 'weights/<name>'" in answer["detail"]
        )
    assert plain(f"training_runs/{model}/checkpoints/a/b/c", method="DELETE")[0] == 400
    assert plain(f"training_runs/{model}/checkpoints/weights/one", method="DELETE")[0] == 404


@pytest.mark.parametrize("key", [None, "tml-secret"])
def test_a_checkpoint_can_be_downloaded_as_an_archive(toy, tmp_path, key):
    headers = {"X-API-Key": key} if key else {}
    with background_server(toy, tmp_path, ServerAddress(key=key), limits=ServerLimits(archive_seconds=600)) as server:
        plain = Plain(server.url)
        session = plain("create_session", {}, **headers)[1]["session_id"]
        ask = {"session_id": session, "model_seq_id": 0, "base_model": toy.info.name}
        made = plain("create_model", ask, **headers)[1]
        model = plain("retrieve_future", {"request_id": made["request_id"]}, **headers)[1]["model_id"]
        for route in ("save_weights_for_sampler", "save_weights"):
            ticket = plain(route, {"model_id": model, "path": "one"}, **headers)[1]
            assert "path" in plain("retrieve_future", {"request_id": ticket["request_id"]}, **headers)[1]
        names = {}
        for checkpoint in ("sampler_weights/one", "one", "weights/one"):
            path = f"training_runs/{model}/checkpoints/{checkpoint}/archive"
            assert key is None or plain(path)[0] == 401
            status, found = plain(path, **headers)
            assert status == 200 and datetime.fromisoformat(found["expires"]) > datetime.now(UTC)
            with urllib.request.urlopen(found["url"], timeout=300) as answer:  # no key: the address is the secret
                packed = io.BytesIO(answer.read())
            with tarfile.open(fileobj=packed, mode="r:gz") as archive:
                names[checkpoint] = archive.getnames()
        assert names["one"] == names["sampler_weights/one"] == ["checkpoint.json", "delta.json"]
        assert "steps.json" in names["weights/one"]
        assert plain(f"training_runs/{model}/checkpoints/two/archive", **headers)[0] == 404
        assert plain("archives/../checkpoint.json", **headers)[0] == 404
        now = [time.monotonic() + 601]
        server.service.archives._clock = lambda: now[0]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(found["url"], timeout=300)
        server.service.archives.sweep()
        assert list((tmp_path / ".archives").iterdir()) == []
    assert not (tmp_path / ".archives").exists()


def test_an_answer_is_json_whatever_the_numbers(plain, toy, monkeypatch):
    monkeypatch.setattr(
        "toy_engine.ToyAdapter.optim_step", lambda self, settings: {"grad_norm": float("nan"), "x": float("-inf")}
    )
    _, model = plain.open_model(toy.info.name)
    ticket = plain("optim_step", optim_step(model, 1))[1]
    answer = plain("retrieve_future", {"request_id": ticket["request_id"]})[1]
    assert answer["metrics"] == {"grad_norm": "NaN", "x": "-Infinity"}


def test_a_client_that_does_not_count_is_served_in_the_order_it_comes(plain, toy):
    _, model = plain.open_model(toy.info.name)
    tickets = [plain("optim_step", optim_step(model, None))[1] for _ in range(3)]
    assert len({ticket["request_id"] for ticket in tickets}) == 3
    for ticket in tickets:
        assert plain("retrieve_future", {"request_id": ticket["request_id"]})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "said"),
    [
        ("optim_step", b"{not json", {}, 400, "not JSON"),
        ("optim_step", b"[" * 100_000, {}, 400, "not JSON"),
        ("optim_step", b"\xff\xfe", {}, 400, "not JSON"),
        ("optim_step", b"[]", {}, 400, "body"),
        ("create_session", b'{"user_metadata": {"x": NaN}}', {}, 400, "not a finite number"),
        ("create_session", b'{"user_metadata": {"x": -Infinity}}', {}, 400, "not a finite number"),
        ("create_session", b'{"user_metadata": {"x": 1e999}}', {}, 400, "1e999 is not a finite number"),
        ("optim_step", {"seq_id": 1}, {}, 400, "model_id"),
        ("optim_step", {"model_id": "session-x-train-0", "seq_id": 1}, {}, 404, "unknown"),
        ("forward_backward", b"\x00\x01garbage", PROTOBUF, 400, "not a ForwardBackwardRequest"),
        ("forward_backward", b"", PROTOBUF, 404, "unknown"),
        ("forward_backward", b"{}", {"Content-Type": "application/json"}, 415, "0.25"),
        ("forward_backward", b"x", {**PROTOBUF, "Content-Encoding": "zstd"}, 415, "compressed"),
        ("session_heartbeat", {"session_id": "session-nobody"}, {}, 404, "unknown"),
        ("retrieve_future", {"request_id": "nothing"}, {}, 410, "no result"),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 0}, {}, 404, "unknown"),
        ("weights_info", {"tinker_path": "tinker://a/weights/../../x"}, {}, 400, "not a path"),
        ("no_such_thing", {}, {}, 404, "not offered"),
    ],
)
def test_a_bad_request_is_answered_with_what_is_wrong(plain, path, body, headers, status, said):
    answered, answer = plain(path, body, **headers)
    assert answered == status and said in answer["detail"]


@pytest.mark.parametrize("name", ["..", "a/b", "../x", ".hidden", "", "a\x00b", "x" * 300, "%2e%2e", "é"])
def test_a_name_cannot_leave_its_folder(plain, toy, server, name):
    _, model = plain.open_model(toy.info.name)
    for path in ("save_weights", "save_weights_for_sampler"):
        ticket = plain(path, {"model_id": model, "path": name, "sampling_session_seq_id": None})[1]
        answer = plain("retrieve_future", {"request_id": ticket["request_id"]})[1]
        assert answer["category"] == "user"
    outside = list(server.service.checkpoints.folder.parent.rglob("*.json"))
    assert all(server.service.checkpoints.folder in file.parents for file in outside)


def test_a_body_that_is_too_large_is_refused_even_when_it_does_not_say_so(toy, tmp_path):
    with background_server(toy, tmp_path, limits=ServerLimits(body_bytes=1000)) as server:
        plain = Plain(server.url)
        assert plain("create_session", b"x" * 1001)[0] == 413
        host = server.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=300)
        connection.request("POST", "/api/v1/create_session", iter([b"x" * 600] * 3), encode_chunked=True)
        assert connection.getresponse().status == 413


def test_a_long_json_body_is_refused_before_it_is_read(toy, tmp_path):
    with background_server(toy, tmp_path, limits=ServerLimits(json_bytes=1000)) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(toy.info.name)
        assert plain("create_session", b"x" * 1001)[0] == 413
        request = batch(model, 1) + b"\0" * 1001  # protobuf has a limit of its own
        assert "not a ForwardBackwardRequest" in plain("forward_backward", request, **PROTOBUF)[1]["detail"]


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("save_weights", {"path": "half of a pair: \ud800"}),
        ("save_weights", {"path": "kept", "ttl_seconds": 10**30}),
        ("save_weights", {"path": "kept", "user_metadata": {"deep": DEEP}}),
        ("optim_step", {"adam_params": {"learning_rate": "\udc00"}}),
        ("create_model", {"user_metadata": {"deep": DEEP}}),
    ],
)
def test_a_body_that_cannot_be_kept_is_a_400(plain, toy, path, body, caplog):
    session, model = plain.open_model(toy.info.name)
    names = {"session_id": session, "model_seq_id": 1, "base_model": toy.info.name, "model_id": model, "seq_id": 1}
    status, answer = plain(path, names | body)
    assert status == 400 and answer["detail"], answer
    assert "Traceback" not in caplog.text


def test_a_checkpoint_cannot_be_kept_longer_than_dates_go(plain, toy):
    _, model = plain.open_model(toy.info.name)
    status, answer = plain(f"training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": 10**30}, method="PUT")
    assert status == 400 and "ttl_seconds" in answer["detail"]


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\0\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])
def test_what_is_no_http_is_answered_in_json(server, sent):
    with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=300) as connection:
        connection.sendall(sent)
        head, _, body = b"".join(iter(lambda: connection.recv(1000), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["message"]


def test_a_websocket_is_refused(server):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a2V5\r\n"
    head = b"GET /api/v1/socket HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n"
    assert first_line(server, head).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("params", [{"top_k": -2}, {"temperature": -1}, {"top_p": 0}, {"max_tokens": 0},
                                    {"stop": ["x"] * 65}, {"stop": "x" * 1001}, {"stop": list(range(65))}])  # fmt: skip
def test_settings_that_make_no_sense_are_refused_at_once(plain, toy, params):
    session, _ = plain.open_model(toy.info.name)
    ask = {"session_id": session, "sampling_session_seq_id": 0, "base_model": toy.info.name}
    sampler = plain("create_sampling_session", ask)[1]["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [2]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": params}
    status, answer = plain("asample", sample)
    assert status == 400 and next(iter(params)) in answer["detail"]


def test_with_a_key_nothing_works_without_it(toy, tmp_path, connect):
    tinker = pytest.importorskip("tinker")
    with background_server(toy, tmp_path, ServerAddress(key="tml-secret")) as server:
        plain = Plain(server.url)
        for path in ("healthz", "get_server_capabilities", "create_session"):
            assert plain(path, b"{}" if path == "create_session" else None)[0] == 401
            assert plain(path, b"{}" if path == "create_session" else None, **{"X-API-Key": "tml-wrong"})[0] == 401
        assert plain("healthz", **{"X-API-Key": "tml-secret"}) == (200, {"status": "ok"})
        with pytest.raises(tinker.AuthenticationError):
            connect(server, "tml-wrong").get_server_capabilities()
        training = connect(server, "tml-secret").create_lora_training_client(base_model=toy.info.name)
        assert training.get_info().lora_rank == 32


def test_an_address_that_others_can_reach_needs_a_key(toy, tmp_path):
    with pytest.raises(EngineError, match="give a key"):
        with background_server(toy, tmp_path, ServerAddress(host="0.0.0.0")):
            pass
    with pytest.raises(EngineError, match="tml-"):
        with background_server(toy, tmp_path, ServerAddress(key="secret")):
            pass


def test_web_pages_cannot_reach_a_server_without_a_key(plain):
    assert plain("healthz")[0] == 200
    assert plain("healthz", Origin="https://example.org")[0] == 403
    assert plain("healthz", Host="rebound.example.org")[0] == 403
    assert plain("healthz", Host="localhost:1")[0] == 200
    for site, status in {"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200}.items():
        assert plain("healthz", **{"Sec-Fetch-Site": site})[0] == status


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /api/v1/create_session HT", b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\n"],
)
def test_a_request_whose_head_does_not_arrive_is_given_up(toy, tmp_path, sent):
    with background_server(toy, tmp_path, limits=ServerLimits(head_seconds=0.3)) as server:
        assert first_line(server, sent).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("limits", [ServerLimits(pause_seconds=0.3), ServerLimits(body_seconds=0.3)])
def test_a_request_whose_body_does_not_arrive_is_given_up(toy, tmp_path, limits):
    head = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with background_server(toy, tmp_path, limits=limits) as server:
        assert first_line(server, head).startswith(b"HTTP/1.1 408")


def test_the_head_of_the_second_request_on_a_connection_has_its_time_too(toy, tmp_path):
    whole = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with background_server(toy, tmp_path, limits=ServerLimits(head_seconds=3)) as server:
        with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=300) as connection:
            connection.sendall(whole)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(3.5)  # between two requests there is more time
            connection.sendall(whole[:10])
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def first_line(server, sent):
    with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=300) as connection:
        connection.sendall(sent)
        return connection.recv(1000).partition(b"\r\n")[0]


def test_a_result_that_is_not_there_yet_is_asked_for_again(toy_folder, tmp_path):
    slow = ToyEngine(toy_folder, shut=True)
    with background_server(slow, tmp_path, limits=ServerLimits(poll_seconds=0.2)) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(slow.info.name)
        ticket = plain("optim_step", optim_step(model, 1))[1]
        status, answer = plain("retrieve_future", {"request_id": ticket["request_id"]})
        assert (status, answer["type"], answer["queue_state"]) == (408, "try_again", "active")
        slow.gate.set()
        eventually(lambda: plain("retrieve_future", {"request_id": ticket["request_id"]})[0] == 200)


def test_the_server_answers_while_the_engine_works(toy_folder, tmp_path):
    slow = ToyEngine(toy_folder, shut=True)
    with background_server(slow, tmp_path) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(slow.info.name)
        for number in range(1, 4):
            plain("optim_step", optim_step(model, number))
        eventually(lambda: slow.log == ["optim_step"])
        for _ in range(5):
            assert plain("healthz")[0] == 200
        assert slow.log == ["optim_step"] and slow.done == []
        slow.gate.set()


async def test_an_answer_is_not_held_back_on_its_way():
    """By Nagle's algorithm, for 40 ms."""
    connected = asyncio.get_running_loop().create_future()
    listener = ServerAddress().listen()
    async with await asyncio.start_server(lambda _, writer: connected.set_result(writer), sock=listener):
        _, ours = await asyncio.open_connection(*listener.getsockname())
        theirs = await connected
        at_once = theirs.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        theirs.close()
        ours.close()
    assert at_once


def test_a_silent_session_is_over_and_a_heard_one_is_not(toy, tmp_path):
    limits = ServerLimits(session_seconds=0.8)
    with background_server(toy, tmp_path, limits=limits) as server:
        plain, now = Plain(server.url), [0.0]
        server.service.sessions._clock = lambda: now[0]
        silent, _ = plain.open_model(toy.info.name)
        heard, _ = plain.open_model(toy.info.name)
        now[0] = 0.5
        assert plain("session_heartbeat", {"session_id": heard})[0] == 200
        now[0] = 1.0
        eventually(lambda: toy.closed == 1)
        assert plain("session_heartbeat", {"session_id": silent})[0] == 410
        assert [session.session_id for session in server.service.sessions.all()] == [heard]


def test_finished_results_do_not_pile_up(toy, tmp_path):
    limits = ServerLimits(collected_seconds=0.2, uncollected_seconds=0.6)
    with background_server(toy, tmp_path, limits=limits) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(toy.info.name)
        for number in range(1, 21):
            ticket = plain("optim_step", optim_step(model, number))[1]
            if number % 2:
                plain("retrieve_future", {"request_id": ticket["request_id"]})
        eventually(lambda: len(server.service.futures) == 0)
        assert plain("optim_step", optim_step(model, 20))[1]["request_id"] == ticket["request_id"]
        assert plain("retrieve_future", {"request_id": ticket["request_id"]})[0] == 410
        assert toy.log.count("optim_step") == 20


def test_an_unloaded_model_refuses_what_was_waiting(toy_folder, tmp_path):
    slow = ToyEngine(toy_folder, shut=True)
    with background_server(slow, tmp_path) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(slow.info.name)
        running, waiting = (plain("optim_step", optim_step(model, number))[1] for number in (1, 2))
        eventually(lambda: slow.log == ["optim_step"])
        ticket = plain("unload_model", {"model_id": model})[1]
        slow.gate.set()
        assert plain("retrieve_future", {"request_id": ticket["request_id"]})[1]["model_id"] == model
        assert "metrics" in plain("retrieve_future", {"request_id": running["request_id"]})[1]
        assert "unloaded" in plain("retrieve_future", {"request_id": waiting["request_id"]})[1]["error"]
        assert plain("get_info", {"model_id": model})[0] == 404
        assert slow.closed == 1 and slow.log == ["optim_step"]


def test_who_waits_is_sent_away_when_the_server_stops(toy_folder, tmp_path):
    slow = ToyEngine(toy_folder, shut=True)
    found = []
    with background_server(slow, tmp_path) as server:
        plain = Plain(server.url)
        _, model = plain.open_model(slow.info.name)
        ticket = plain("optim_step", optim_step(model, 1))[1]
        ask = {"request_id": ticket["request_id"]}

        def wait():
            found.append((plain("retrieve_future", ask)[0], list(slow.done)))
            slow.gate.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: server.service.futures._closing._waiters)
    waiting.join()
    assert found == [(408, [])]  # before the engine was done
    assert slow.log == slow.done == ["optim_step"]  # what ran was let finish


def test_two_servers_do_not_share_a_folder(toy, tmp_path):
    with background_server(toy, tmp_path):
        with pytest.raises(EngineError, match="another server"):
            with background_server(toy, tmp_path):
                pass


def test_an_error_of_the_engine_is_the_servers_fault(plain, toy, monkeypatch):
    def break_down(_):
        raise RuntimeError("out of memory")

    _, model = plain.open_model(toy.info.name)
    monkeypatch.setattr(toy, "work", break_down)
    ticket = plain("optim_step", optim_step(model, 1))[1]
    answer = plain("retrieve_future", {"request_id": ticket["request_id"]})[1]
    assert answer == {"error": "RuntimeError: out of memory", "category": "server"}
    monkeypatch.undo()
    ticket = plain("optim_step", optim_step(model, 2))[1]
    assert "metrics" in plain("retrieve_future", {"request_id": ticket["request_id"]})[1]


def test_telemetry_is_taken_and_forgotten(plain):
    assert plain("telemetry", {"events": [{"event": "x"}], "session_id": "s"}) == (200, {"status": "accepted"})
    assert json.loads(json.dumps(plain("client/config", {"sdk_version": "0.36.0"})[1]))["pjwt_auth_enabled"] is False
