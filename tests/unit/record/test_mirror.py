from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from evsys_sdk import redaction
from evsys_sdk.record.dashboard import mirror, wire
from evsys_sdk.record.dashboard.mirror import MirrorSession, left_behind, project_folder
from evsys_sdk.record.dashboard.sender import SEND_BYTES, Sender, Unreachable, send_group

TARGET = {"api_url": "http://x", "project_id": "p", "offline": False}


def step(number: int, text: str = "") -> wire.WireEvent:
    return (
        wire.step_event("g", number, {"loss": 1.0}, ts=0.0)
        if not text
        else wire.prediction_event("g", {"id": str(number), "text": text}, ts=0.0)
    )


def test_what_was_not_acknowledged_is_read_again_by_the_next_owner(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    for number in range(3):
        session.append(step(number))
    window = session.read()
    session.acknowledge(window.ends[0])
    session.close()
    (claimed,) = left_behind(tmp_path, TARGET)
    assert [line.event().body["step"] for line in claimed.read().lines] == [1, 2]


def test_a_session_whose_owner_lives_is_left_alone(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    session.append(step(1))
    assert list(left_behind(tmp_path, TARGET)) == []
    session.close()
    assert len(list(left_behind(tmp_path, TARGET))) == 1


def test_sessions_for_another_server_project_or_offline_are_left_alone(tmp_path: Path) -> None:
    for change in ({"api_url": "http://y"}, {"project_id": "q"}, {"offline": True}):
        session = MirrorSession.create(tmp_path, TARGET | change)
        session.append(step(1))
        session.close()
    assert list(left_behind(tmp_path, TARGET)) == []


def test_a_finished_session_is_not_taken_up_again(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    session.append(step(1))
    session.acknowledge(session.read().end)
    session.close()
    assert list(left_behind(tmp_path, TARGET)) == []


def test_a_window_is_bounded_in_lines_and_bytes_yet_takes_one_huge_line(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    for number in range(wire.MAX_BATCH_LINES + 10):
        session.append(step(number))
    window = session.read()
    assert len(window.lines) == wire.MAX_BATCH_LINES
    session.acknowledge(window.end)
    session.acknowledge(session.read().end)
    for number in range(3):
        session.append(step(number, text="x" * (wire.MAX_BATCH_BYTES + 1)))
    assert len(session.read().lines) == 1


def test_torn_and_foreign_lines_are_stepped_over(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    session.append(step(1))
    with open(session.path, "a") as handle:
        handle.write('{"torn\n[1]\n')
    session.append(step(2))
    with open(session.path, "a") as handle:
        handle.write('{"half')
    window = session.read()
    assert [line.event().body["step"] for line in window.lines] == [1, 2]
    session.acknowledge(window.end)
    assert session.unsent_bytes == len('{"half')


def test_an_unreadable_acknowledgement_means_send_again(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    session.append(step(1))
    session.acknowledge(session.read().end)
    session.close()
    session.path.with_suffix(".ack").write_text("garbage")
    (claimed,) = left_behind(tmp_path, TARGET)
    assert len(claimed.read().lines) == 1


def test_the_first_line_says_where_a_session_belongs_and_holds_no_secret(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    header = json.loads(session.path.read_text().splitlines()[0])
    assert header == {"session": session.path.stem, **TARGET}


def test_a_project_id_cannot_leave_the_mirror(tmp_path: Path) -> None:
    assert project_folder(tmp_path, "../../etc").parent == tmp_path
    assert project_folder(tmp_path, None).name == project_folder(tmp_path, "..").name == mirror.LOCAL


def test_steps_hold_no_secret_also_where_it_is_learnt_after_the_first_ones(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(redaction, "_known", redaction._Known())
    session = MirrorSession.create(tmp_path, TARGET)
    names = {"loss": 0.5, "correct horse battery": 1.0}
    for step in range(3):
        session.append(wire.step_event("g", step, names, ts=1.0))
    assert session.path.read_text().count("correct horse battery") == 3
    redaction.add_secrets(["correct horse battery", "1234567890123"])
    for step in range(3):
        session.append(wire.step_event("g", step, names, ts=1.0))
        session.append(wire.step_event("g", step, {"loss": 1234567890123}, ts=1.0))
        session.append(wire.step_event("g", step, {"sk-proj-aB3dE5gH7jK9mN1pQ3sT5vX7": float("nan")}, ts=1.0))
    text = session.path.read_text()
    session.close()
    assert text.count("correct horse battery") == 3 and "1234567890123" not in text and "sk-proj" not in text
    assert text.count('"NaN"') == 3


def test_a_secret_learnt_after_a_line_was_written_does_not_leave_with_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(redaction, "_known", redaction._Known())
    sent: list[bytes] = []

    class Transport:
        def send(self, request: wire.WireRequest) -> None:
            sent.append(request.body)

    session = MirrorSession.create(tmp_path, TARGET)
    session.append(step(1, "the answer is correct horse battery"))
    assert session.is_searched
    send_group(Transport(), session, session.read().lines)
    assert b"correct horse battery" in sent[0], "not known as a secret yet, so it is sent as it is"
    redaction.add_secrets(["correct horse battery"])
    assert not session.is_searched
    send_group(Transport(), session, session.read().lines)
    assert b"correct horse battery" not in sent[1] and redaction.REDACTED.encode() in sent[1]
    session.close()
    # Another process may have known fewer secrets when it wrote.
    claimed = MirrorSession.claim(session.path)
    assert claimed is not None and not claimed.is_searched
    send_group(Transport(), claimed, claimed.read().lines)
    claimed.close()
    assert b"correct horse battery" not in sent[2]


def test_lines_that_come_while_much_is_sent_wait_for_more(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    first_left, much_came, second_left = threading.Event(), threading.Event(), threading.Event()
    sizes: list[int] = []

    class Transport:
        def send(self, request: wire.WireRequest) -> None:
            sizes.append(request.body.count(b'"ts"'))
            if len(sizes) == 1:
                first_left.set()
                assert much_came.wait(60)
            elif len(sizes) == 2:
                sender.submit(session, step(3))
                second_left.set()

    sender = Sender(Transport(), list, linger_seconds=3600)
    sender.submit(session, step(1, "x" * SEND_BYTES))
    assert first_left.wait(60)
    sender.submit(session, step(2, "x" * SEND_BYTES))
    much_came.set()
    assert second_left.wait(60)
    for number in range(4, 103):
        sender.submit(session, step(number))
    assert sender.flush(60)
    sender.stop(60)
    session.close()
    assert sizes == [1, 1, 100]


def test_much_to_send_does_not_end_the_pause_after_a_failure(tmp_path: Path) -> None:
    session = MirrorSession.create(tmp_path, TARGET)
    tries: list[int] = []
    failed = threading.Event()

    class Transport:
        def send(self, request: wire.WireRequest) -> None:
            tries.append(1)
            failed.set()
            raise Unreachable("away")

    sender = Sender(Transport(), list, linger_seconds=0, pause_seconds=3600)
    sender.submit(session, step(1, "x" * SEND_BYTES))
    assert failed.wait(60)
    while not sender._failures:
        time.sleep(0.001)
    for number in range(2, 200):
        sender.submit(session, step(number, "x" * 2000))
        time.sleep(0.0001)
    sender.stop(60)
    session.close()
    assert len(tries) == 1
