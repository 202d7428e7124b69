"""Datasets and benchmarks: versions, rows, and which experiments used them."""

from __future__ import annotations

import html
import json
import re

import pytest


def add_suite(project, name: str = "tools", *, texts: tuple[str, ...] = (), **given):
    from evsys_dashboard.models import SuiteRow, SuiteVersion

    fields = {"id": f"{project.id}-{name[:50]}-{given.get('version', '')}", "kind": "dataset", "complete": True}
    fields |= {"created": 1.0, "n_rows": len(texts), **given}
    suite = SuiteVersion.objects.create(project=project, name=name, **fields)
    SuiteRow.objects.bulk_create(SuiteRow(suite=suite, number=n, text=text) for n, text in enumerate(texts))
    return suite


def test_versions_of_a_name_are_one_line_with_the_newest(visitor, project):
    add_suite(project, version="1", created=1.0)
    newest = add_suite(project, version="2", created=2.0, n_rows=240, n_bytes=77_000, sha256="ab" * 32)
    add_suite(project, "other", kind="benchmark")
    text = visitor.get(f"/p/{project.id}/datasets").content.decode()
    assert re.findall(r'data-row="([^"]+)"', text) == [newest.id]
    for part in ("240", "77.0 kB", "abababababab", "of 2"):
        assert part in text
    assert "other" in visitor.get(f"/p/{project.id}/benchmarks").content.decode()


@pytest.mark.parametrize("page", ["", "progress", "datasets", "benchmarks"])
def test_an_empty_page_names_commands_that_exist(visitor, project, page):
    from evsys_sdk.cli.main import parse

    text = html.unescape(visitor.get(f"/p/{project.id}/{page}").content.decode())
    commands = [line for part in re.findall(r"<code>(.*?)</code>", text, re.DOTALL) for line in part.splitlines()]
    found = [line.split()[1:] for line in commands if line.startswith("evsys ")]
    assert found
    for words in found:
        parse(words)  # raises for a verb or an option that does not exist


def test_files_that_experiments_read_are_listed_with_who_used_them(visitor, project, rows):
    ids = [
        rows.add_experiment(project, f"e{n}", record=rows.record_of(f"e{n}", {"a": ({}, [0.5])})).id for n in range(5)
    ]
    text = visitor.get(f"/p/{project.id}/benchmarks").content.decode()
    assert "No benchmark yet" not in text and "val/tools" in text and "5f0c1a2b5f0c" in text
    assert [one for one in ids if f"experiments/{one}" in text] == ids[2:] and "and 2 more" in text
    text = visitor.get(f"/p/{project.id}/datasets").content.decode()
    assert "No dataset yet" not in text and "data/train.jsonl" in text and "val/tools" not in text
    add_suite(project, "train", sha256="77ea92f4" * 8)
    text = visitor.get(f"/p/{project.id}/datasets").content.decode()
    assert "data/train.jsonl" not in text, "it was uploaded, and is listed as that"


def test_the_val_and_the_test_split_of_a_name_are_two_benchmarks(visitor, project):
    for split in ("val", "test"):
        add_suite(project, kind="benchmark", split=split, id=f"{project.id}-{split}")
    assert visitor.get(f"/p/{project.id}/benchmarks").content.decode().count("data-row=") == 2


def test_users_are_found_by_hash_id_and_name(visitor, project, rows):
    suite = add_suite(project, version="2", sha256="5f0c1a2b" * 8)
    other = add_suite(project, version="1", sha256="00" * 32)
    record = rows.record_of("by-hash", {"a": ({}, [0.5])})
    record["config"]["runs"][0]["data"] = {"dataset_name": "tools"}
    rows.add_experiment(project, "by-hash", record=record)
    rows.add_experiment(project, "by-id", config={"base_run": {"data": {"dataset_id": suite.id}}})
    rows.add_experiment(project, "by-name", config={"run": {"data": {"dataset_name": "tools"}}})
    rows.add_experiment(project, "no-user", config={"run": {"data": {"path": "tools"}}})
    text = visitor.get(f"/p/{project.id}/suites/{suite.id}").content.decode().partition('id="users"')[2]
    assert set(re.findall(r"<bdi>([\w-]+)</bdi></a> <span", text)) == {"by-hash", "by-id", "by-name"}
    text = visitor.get(f"/p/{project.id}/suites/{other.id}").content.decode().partition('id="users"')[2]
    # The hash of `by-hash` says which version it was: not this one.
    assert set(re.findall(r"<bdi>([\w-]+)</bdi></a> <span", text)) == {"by-name"}


def test_a_benchmark_in_the_metadata_is_a_use(visitor, project, rows):
    suite = add_suite(project, "bench", kind="benchmark")
    rows.add_experiment(project, "user", config={"metadata": {"benchmark": [{"name": "bench", "path": "x"}]}})
    assert "user" in visitor.get(f"/p/{project.id}/suites/{suite.id}").content.decode().partition('id="users"')[2]


def test_rows_are_paged(visitor, project):
    suite = add_suite(project, texts=tuple(json.dumps({"n": number}) for number in range(120)))
    url = f"/p/{project.id}/suites/{suite.id}"
    seen = []
    for start in (0, 50, 100):
        text = visitor.get(url, {"from": start}).content.decode()
        seen += [int(number) for number in re.findall(r"&quot;n&quot;: (\d+)", text)]
    assert seen == list(range(120))
    assert "from=100" in visitor.get(url, {"from": 50}).content.decode()
    assert visitor.get(url, {"from": "-1; drop"}).status_code == 200
    assert "No rows" in visitor.get(url, {"from": 999_999_999}).content.decode()


@pytest.mark.parametrize(("split", "is_noted"), [("test", True), ("val", False), ("", False)])
def test_rows_of_a_test_split_are_shown_with_a_notice(visitor, project, split, is_noted):
    suite = add_suite(project, kind="benchmark", split=split, texts=('{"question": "q1"}',))
    text = visitor.get(f"/p/{project.id}/suites/{suite.id}").content.decode()
    assert "q1" in text
    assert ("rows of a test split" in text) is is_noted


def test_a_suite_that_was_only_recorded_has_no_rows(visitor, project):
    suite = add_suite(project, complete=False, n_rows=None, sha256="ab" * 32)
    assert "its rows were not uploaded" in visitor.get(f"/p/{project.id}/suites/{suite.id}").content.decode()


def test_hostile_texts_are_only_shown(visitor, project, rows):
    for number, text in enumerate(rows.HOSTILE):
        suite = add_suite(
            project, text[:300], texts=(text, json.dumps({text: text})), id=f"{project.id}-{number}", version=text[:50],
            split=text[:50], description=text, lineage={text: text, "list": [text]}, sha256=text[:64],
        )  # fmt: skip
        for page in (f"suites/{suite.id}", "datasets"):
            found = visitor.get(f"/p/{project.id}/{page}").content.decode()
            assert "<script>alert" not in found
            assert "<img src=x" not in found
            assert "<svg onload" not in found
            assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2066]", found)


def test_a_long_row_is_cut_and_says_by_how_much(visitor, project):
    suite = add_suite(project, texts=("y" * 10_000,))
    text = visitor.get(f"/p/{project.id}/suites/{suite.id}").content.decode()
    assert text.count("y" * 4000) == 1
    assert "6000 more characters" in text


def test_a_suite_of_another_project_is_not_found(visitor, project):
    from evsys_dashboard.models import Project

    other = Project.objects.create(id=f"{project.id}-other", name="other", created=1.0)
    suite = add_suite(other, texts=("secret",))
    assert visitor.get(f"/p/{project.id}/suites/{suite.id}").status_code == 404
    other.delete()


@pytest.mark.parametrize(
    ("page", "command"), [("datasets", "evsys data upload"), ("benchmarks", "evsys benchmark upload")]
)
def test_an_empty_list_says_what_to_do_next(visitor, project, page, command):
    assert command in visitor.get(f"/p/{project.id}/{page}").content.decode()


def test_both_pages_say_how_far_they_looked_for_users(visitor, project, rows, monkeypatch):
    from evsys_dashboard.pages import suites

    suite = add_suite(project)
    for number in range(3):
        rows.add_experiment(project, f"e{number}")
    pages = [f"/p/{project.id}/datasets", f"/p/{project.id}/suites/{suite.id}"]
    assert not any("in the newest" in visitor.get(page).content.decode() for page in pages)
    monkeypatch.setattr(suites, "LOOKED_THROUGH", 2)
    assert all("in the newest 2 experiments" in visitor.get(page).content.decode() for page in pages)
