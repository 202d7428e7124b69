"""Datasets and benchmarks on the server: whole or absent, byte for byte, and test rows for people only."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any

import pytest

PATH = "/api/dashboard/api/sdk/suites/"


def lines(*rows: object) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


class Uploader:
    """A client that sends what it is told to, right or wrong."""

    def __init__(self, key: str):
        from django.test import Client

        self.client, self.headers = Client(), {"Authorization": f"Bearer {key}"}

    def post(self, path: str, body: object = None) -> Any:
        return self.client.post(path, body, content_type="application/json", headers=self.headers)

    def announce(self, data: bytes, name: str = "sums", **fields: object) -> Any:
        about = {
            "kind": "dataset",
            "name": name,
            "sha256": hashlib.sha256(data).hexdigest(),
            "n_rows": data.count(b"\n"),
        }
        return self.post(PATH, about | fields)

    def send(self, suite: str, first: int, data: bytes, **headers: str) -> Any:
        return self.client.put(f"{PATH}{suite}/rows/?from={first}", data, headers=self.headers | headers)

    def upload(self, data: bytes, name: str = "sums", **fields: object) -> Any:
        begun = self.announce(data, name, **fields).json()
        if begun["status"] != "uploading":
            return begun
        suite = begun["suite"]["id"]
        assert self.send(suite, 0, data).status_code == 200
        return self.post(f"{PATH}{suite}/complete/").json()

    def get(self, path: str) -> Any:
        return self.client.get(path, headers=self.headers)


@pytest.fixture
def uploader(key: str) -> Uploader:
    return Uploader(key)


def key_with(project: Any, scope: str) -> Uploader:
    from evsys_dashboard.auth import make_key

    return Uploader(make_key(project, scope, scope)[1])


def all_rows(uploader: Uploader, project: Any, ref: str, limit: int = 100) -> bytes:
    found, at = b"", 0
    while at is not None:
        page = uploader.get(f"/api/v1/projects/{project.pk}/suites/{ref}/rows?from={at}&limit={limit}").json()
        found += b"".join(text.encode() + b"\n" for text in page["rows"])
        at = page["next"]
    return found


def test_an_upload_is_created_then_unchanged_then_a_new_version(uploader, project):
    first, second = lines({"q": 1}, {"q": 2}), lines({"q": 3})
    made = uploader.upload(first, lineage={"source": "a.jsonl"})
    assert (made["status"], made["suite"]["version"], made["suite"]["n_rows"]) == ("created", "1", 2)
    assert made["suite"]["ref"] == f"sums-v1-{hashlib.sha256(first).hexdigest()[:8]}"
    assert uploader.upload(first)["status"] == "unchanged"
    again = uploader.upload(second)
    assert (again["status"], again["suite"]["version"]) == ("new version", "2")
    newest = uploader.get(f"/api/v1/projects/{project.pk}/suites/sums").json()
    assert newest["ref"] == again["suite"]["ref"]
    assert made["suite"]["lineage"] == {"source": "a.jsonl"}


def test_rows_come_back_byte_for_byte(uploader, project):
    data = lines(
        b'{"a": "x"}\r\n',
        b'{"a":1.0,  "b":[ ]}\n',
        b'{"nul": "\\u0000", "half": "\\ud800"}\n',
        '{"é": "日本\u2028"}\n'.encode(),
        b'  {"spaces": 1}\t\n',
    )
    made = uploader.upload(data)
    assert made["suite"]["n_bytes"] == len(data)
    assert all_rows(uploader, project, made["suite"]["ref"], limit=2) == data


def test_nothing_is_seen_of_an_upload_that_is_not_complete(uploader, project):
    data = lines({"q": 1}, {"q": 2})
    suite = uploader.announce(data).json()["suite"]["id"]
    uploader.send(suite, 0, lines({"q": 1}))
    assert uploader.get(f"/api/v1/projects/{project.pk}/suites").json() == {"suites": []}
    for ref in ("sums", suite):
        assert uploader.get(f"/api/v1/projects/{project.pk}/suites/{ref}").status_code == 404
    answer = uploader.post(f"{PATH}{suite}/complete/")
    assert answer.status_code == 409
    assert "1 of 2 rows" in answer.json()["error"]
    # It is taken up where it stopped.
    assert uploader.announce(data).json()["received"] == 1
    uploader.send(suite, 1, lines({"q": 2}))
    assert uploader.post(f"{PATH}{suite}/complete/").json()["status"] == "created"


def test_content_other_than_announced_leaves_nothing(uploader, project):
    from evsys_dashboard.models import SuiteRow, SuiteVersion

    suite = uploader.announce(lines({"q": 1})).json()["suite"]["id"]
    uploader.send(suite, 0, lines({"q": 2}))
    answer = uploader.post(f"{PATH}{suite}/complete/")
    assert answer.status_code == 422
    assert "sha256 differs" in answer.json()["error"]
    assert not SuiteVersion.objects.filter(project=project).exists()
    assert not SuiteRow.objects.filter(suite_id=suite).exists()
    assert uploader.upload(lines({"q": 1}))["status"] == "created"


def test_two_uploads_of_one_file_at_once_are_one_version(key, project):
    data = lines(*({"q": n} for n in range(10)))
    one, other = Uploader(key), Uploader(key)
    first, second = one.announce(data).json(), other.announce(data).json()
    assert first["suite"]["id"] == second["suite"]["id"]
    suite = first["suite"]["id"]
    rows = data.splitlines(keepends=True)
    one.send(suite, 0, b"".join(rows[:6]))
    other.send(suite, 0, b"".join(rows[:3]))
    other.send(suite, 3, b"".join(rows[3:]))
    one.send(suite, 6, b"".join(rows[6:]))
    assert other.post(f"{PATH}{suite}/complete/").json()["status"] == "created"
    assert one.post(f"{PATH}{suite}/complete/").json()["status"] == "unchanged"
    assert all_rows(one, project, "sums") == data


def test_versions_of_two_clients_at_once_get_two_numbers(key, project):
    one, other = Uploader(key), Uploader(key)
    data = [lines({"q": 1}), lines({"q": 2})]
    ids = [
        client.announce(part, version=1).json()["suite"]["id"] for client, part in zip((one, other), data, strict=True)
    ]
    for client, suite, part in zip((one, other), ids, data, strict=True):
        client.send(suite, 0, part)
    versions = [one.post(f"{PATH}{suite}/complete/").json()["suite"]["version"] for suite in ids]
    assert versions == ["1", "2"]


def test_the_number_of_the_senders_workspace_is_kept(uploader, project):
    made = uploader.upload(lines({"q": 1}), version=3)["suite"]
    assert made["ref"].startswith("sums-v3-")
    assert uploader.get(f"/api/v1/projects/{project.pk}/suites/{made['ref']}").json()["id"] == made["id"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": 1}', "line feed"),
        (b'{"a": 1}\n\n', "row 1"),
        (b"[1]\n", "expected a JSON object"),
        (b'{"a": \xff}\n', "no JSON"),
        (b'{"a": "\xed\xa0\x80"}\n', "no JSON"),
        (b'{"a": "\x00"}\n', "no JSON"),
        (b"[" * 100_000 + b"\n", "no JSON"),
        (b'{"a": 1}\n{"a": 2}\n', "only 1 were announced"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_row_is_refused(uploader, data, why):
    suite = uploader.announce(lines({"q": 1})).json()["suite"]["id"]
    answer = uploader.send(suite, 0, data)
    assert answer.status_code == 422
    assert why in answer.json()["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""}, {"name": "x" * 81}, {"name": "sums-v1-01234567"}, {"sha256": "../../etc"}, {"n_rows": 0},
        {"n_rows": 10**12}, {"kind": "keys"}, {"version": -1}, {"lineage": []}, {"nonsense": 1}, {"n_rows": "many"},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_announcement_is_refused_with_the_field(uploader, fields):
    answer = uploader.announce(lines({"q": 1}), **fields)
    assert answer.status_code == 422
    assert next(iter(fields)) in answer.json()["error"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "C:\\x", "a\u202eb", "\u0000\ud800x", "' or 1=1 --"])
def test_a_name_that_looks_like_a_path_is_only_a_name(uploader, project, name):
    made = uploader.upload(lines({"q": 1}), name)["suite"]
    assert "/" not in made["ref"]
    assert ".." not in made["ref"].split("-")
    assert all_rows(uploader, project, made["ref"]) == lines({"q": 1})


def test_names_that_would_share_ids_are_refused(uploader):
    uploader.upload(lines({"q": 1}), "my set")
    answer = uploader.announce(lines({"q": 2}), "My Set")
    assert answer.status_code == 409
    assert "my set" in answer.json()["error"]


def test_a_packed_chunk_is_unpacked_and_a_bomb_refused(uploader, project):
    data = lines(*({"q": "x" * 1000} for _ in range(100)))
    suite = uploader.announce(data).json()["suite"]["id"]
    headers = {"Content-Encoding": "gzip"}
    assert uploader.send(suite, 0, gzip.compress(b"\n" * 200_000_000), **headers).status_code == 413
    assert uploader.send(suite, 0, gzip.compress(data), **headers).status_code == 200
    assert uploader.post(f"{PATH}{suite}/complete/").json()["status"] == "created"


def test_a_hundred_megabytes_go_up_in_chunks_and_come_back(uploader, project):
    row = json.dumps({"text": "abcdefghij" * 5000}).encode() + b"\n"
    chunk = row * 80
    data_hash, n = hashlib.sha256(), 0
    for _ in range(25):
        data_hash.update(chunk)
        n += 80
    about = {"kind": "dataset", "name": "big", "sha256": data_hash.hexdigest(), "n_rows": n}
    suite = uploader.post(PATH, about).json()["suite"]["id"]
    for number in range(25):
        assert uploader.send(suite, number * 80, chunk).status_code == 200
    made = uploader.post(f"{PATH}{suite}/complete/").json()
    assert (made["status"], made["suite"]["n_bytes"]) == ("created", len(row) * n)
    found, at, pages = hashlib.sha256(), 0, 0
    while at is not None:
        answer = uploader.get(f"/api/v1/projects/{project.pk}/suites/big/rows?from={at}&limit=5000")
        assert len(answer.content) < 6_000_000
        page = answer.json()
        for text in page["rows"]:
            found.update(text.encode() + b"\n")
        at, pages = page["next"], pages + 1
    assert found.hexdigest() == data_hash.hexdigest()
    assert pages > 10


def test_test_rows_never_go_through_an_agents_key(uploader, project, visitor):
    made = uploader.upload(lines({"q": "secret"}), split="test")["suite"]
    agent, reader = key_with(project, "agent"), key_with(project, "read")
    place = f"/api/v1/projects/{project.pk}/suites/{made['ref']}"
    for ref in (made["ref"], made["id"], "sums"):
        answer = agent.get(f"/api/v1/projects/{project.pk}/suites/{ref}/rows")
        assert answer.status_code == 403
        assert "agent-scoped key" in answer.json()["error"]
        assert b"secret" not in answer.content
    assert agent.get(place).status_code == 200
    assert b"secret" not in agent.get(place).content
    assert reader.get(f"{place}/rows").json()["rows"] == ['{"q": "secret"}']
    assert visitor.get(f"{place}/rows").json()["rows"] == ['{"q": "secret"}']


def test_a_test_split_stays_one(uploader, project):
    data = lines({"q": 1})
    uploader.upload(data, split="val")
    assert uploader.upload(data, split="test")["suite"]["split"] == "test"
    answer = key_with(project, "agent").announce(data, split="val")
    assert answer.status_code == 409
    assert uploader.upload(data)["suite"]["split"] == "test"


def test_a_test_split_stays_one_while_its_rows_arrive(uploader, project):
    data, agent = lines({"q": "secret"}), key_with(project, "agent")
    identifier = uploader.announce(data, split="test").json()["suite"]["id"]
    agent.announce(data, split="val")
    agent.post("/api/dashboard/api/sdk/benchmarks/", {"id": identifier, "ts": 4e9, "split": "val"})
    made = uploader.upload(data)["suite"]
    assert made["split"] == "test"


def test_a_key_that_may_only_read_uploads_nothing(project):
    answer = key_with(project, "read").announce(lines({"q": 1}))
    assert answer.status_code == 403


def test_two_projects_never_see_each_others_suites(uploader, project):
    from evsys_dashboard.models import Project

    other = Project.objects.create(id=f"{project.pk}-other", name="other", created=1.0)
    stranger = key_with(other, "write")
    made = uploader.upload(lines({"q": 1}))["suite"]
    for path in ("", f"/{made['id']}", f"/{made['ref']}/rows"):
        assert stranger.get(f"/api/v1/projects/{project.pk}/suites{path}").status_code == 404
    for ref in (made["id"], made["ref"]):
        assert stranger.get(f"/api/v1/projects/{other.pk}/suites/{ref}/rows").status_code == 404
    assert stranger.send(made["id"], 0, lines({"q": 1})).status_code == 404
    assert stranger.post(f"{PATH}{made['id']}/complete/").status_code == 404
    # The same file in another project is another suite.
    assert stranger.upload(lines({"q": 1}))["status"] == "created"
    other.delete()


def test_an_abandoned_upload_is_deleted_when_the_next_one_begins(uploader, project):
    from evsys_dashboard.models import SuiteVersion

    old = uploader.announce(lines({"q": 1})).json()["suite"]["id"]
    SuiteVersion.objects.filter(pk=old).update(created=1.0)
    uploader.announce(lines({"q": 2}))
    assert not SuiteVersion.objects.filter(pk=old).exists()


def test_a_benchmark_that_was_only_recorded_has_no_rows(uploader, project):
    from evsys_dashboard.ingest import save_benchmark

    row = save_benchmark(project, {"id": "b1", "name": "tools", "ts": 1.0, "n_tasks": 3})
    assert uploader.get(f"/api/v1/projects/{project.pk}/suites").json()["suites"][0]["complete"] is False
    answer = uploader.get(f"/api/v1/projects/{project.pk}/suites/{row.pk}/rows")
    assert answer.status_code == 404
    assert "never uploaded" in answer.json()["error"]
