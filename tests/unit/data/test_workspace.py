from __future__ import annotations

import gzip
import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.data import manifest as manifest_module
from evsys_sdk.data.manifest import DatasetManifest, Kind
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import DataError, WorkspaceError

ROWS = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}, {"q": "3+3", "a": "6"}]
TASK = {"instruction": "1+1?", "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": "2"}}


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / ".evsys", now=lambda: datetime(2026, 1, 2, tzinfo=UTC), who=lambda: "ada")


@pytest.fixture
def added(workspace: Workspace, tmp_path: Path) -> DatasetManifest:
    return workspace.add(write_jsonl(tmp_path / "sums.jsonl", ROWS), name="sums")


def overwrite(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def edit_manifest(workspace: Workspace, entry: DatasetManifest, **changes: Any) -> None:
    path = workspace.versions(entry.kind).manifest_path(entry.id)
    data = json.loads(path.read_text())
    overwrite(path, json.dumps({**data, **changes}).encode())


class Remote:
    """A source in this process that remembers what it was asked."""

    def __init__(self, rows: Iterable[Any] = ROWS, /, **info: Any):
        self.rows = rows
        self.asked: list[tuple[str, str]] = []
        self.info = {"id": "r-7", "name": "sums", "version": 7, "n_rows": 3, **info}

    def fetch(self, kind: Kind, ref: str) -> tuple[Mapping[str, Any], Iterable[Any]]:
        self.asked.append((kind, ref))
        return self.info, iter(self.rows)


def files_in(workspace: Workspace) -> list[str]:
    return sorted(p.name for p in workspace.root.rglob("*") if p.is_file() and p.name not in (".lock", ".gitignore"))


# --- finding


def test_the_workspace_is_beside_the_nearest_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    deep = tmp_path / "experiments" / "one"
    deep.mkdir(parents=True)
    assert Workspace.find(deep).root == tmp_path / ".evsys"


def test_a_workspace_nearer_than_pyproject_wins(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "sub" / ".evsys").mkdir(parents=True)
    assert Workspace.find(tmp_path / "sub").root == tmp_path / "sub" / ".evsys"


def test_a_file_as_start_means_its_folder(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "config.yaml").touch()
    assert Workspace.find(tmp_path / "config.yaml").root == tmp_path / ".evsys"


def test_looking_creates_nothing(workspace: Workspace) -> None:
    assert workspace.list() == [] and workspace.unusable() == []
    with pytest.raises(WorkspaceError):
        workspace.pull_dataset("sums")
    assert not workspace.root.exists()


# --- adding


def test_an_added_file_is_described_by_its_manifest(added: DatasetManifest, workspace: Workspace) -> None:
    stored = workspace.root / "datasets" / f"{added.id}.jsonl"
    digest = hashlib.sha256(stored.read_bytes()).hexdigest()
    assert added.id == f"sums-v1-{digest[:8]}"
    on_disk = json.loads((workspace.root / "datasets" / f"{added.id}.manifest.json").read_text())
    assert on_disk == {
        "id": added.id,
        "name": "sums",
        "version": 1,
        "kind": "dataset",
        "n_rows": 3,
        "bytes": stored.stat().st_size,
        "sha256": digest,
        "lineage": {
            "source": "sums.jsonl",
            "parents": [],
            "transforms": [],
            "transforms_sha256": hashlib.sha256(b"[]").hexdigest(),
            "created_at": "2026-01-02T00:00:00+00:00",
            "who": "ada",
            "note": "",
        },
        "complete": True,
    }


def test_stored_files_are_read_only(added: DatasetManifest, workspace: Workspace) -> None:
    folder = workspace.root / "datasets"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir() if p.name != ".lock"}
    assert modes == {f"{added.id}.jsonl": 0o444, f"{added.id}.manifest.json": 0o444}


def test_rows_come_out_as_they_went_in(added: DatasetManifest, workspace: Workspace) -> None:
    lines = workspace.pull_dataset("sums").read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_the_same_content_again_is_the_same_version(
    added: DatasetManifest, workspace: Workspace, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((tmp_path / "sums.jsonl").read_bytes().replace(b"\n", b"\r\n\n"))
    assert workspace.add(copy, name="sums") == added
    assert len(workspace.list()) == 1


def test_other_content_is_the_next_version_and_the_name_means_it(
    added: DatasetManifest, workspace: Workspace, tmp_path: Path
) -> None:
    second = workspace.add(write_jsonl(tmp_path / "more.jsonl", ROWS[:2]), name="sums")
    assert second.version == 2
    assert workspace.pull_dataset("sums") == workspace.path(second)
    assert workspace.pull_dataset(added.id) == workspace.path(added)


def test_version_ten_is_newer_than_version_nine(workspace: Workspace, tmp_path: Path) -> None:
    for number in range(1, 11):
        workspace.add(write_jsonl(tmp_path / "n.jsonl", [{"n": number}]), name="n")
    assert workspace.get("n").version == 10
    assert json.loads(workspace.pull_dataset("n").read_text()) == {"n": 10}


def test_a_json_list_is_stored_as_jsonl(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"text": "é"}, {"text": "\ud83d"}]))
    workspace.add(tmp_path / "rows.json", name="rows")
    lines = workspace.pull_dataset("rows").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "é"}, {"text": "\ud83d"}]


def test_a_packed_file_is_stored_unpacked(workspace: Workspace, tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "sums.jsonl", ROWS)
    (tmp_path / "sums.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert workspace.add(tmp_path / "sums.jsonl.gz", name="sums") == workspace.add(plain, name="sums")


def test_a_packed_file_that_was_cut_short_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(1000)))
    (tmp_path / "n.jsonl.gz").write_bytes(packed[:-200])
    with pytest.raises(DataError, match=r"n\.jsonl\.gz: cannot be read to its end"):
        workspace.add(tmp_path / "n.jsonl.gz", name="n")
    assert files_in(workspace) == []


def test_a_benchmark_folder_means_its_tasks(workspace: Workspace, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "benchmark" / "sums" / "tasks.jsonl", [TASK])
    entry = workspace.add(tmp_path / "data" / "benchmark" / "sums", name="sums", kind="benchmark")
    assert entry.lineage.source == "data/benchmark/sums/tasks.jsonl"
    assert workspace.pull_benchmark("sums") == workspace.root / "benchmarks" / f"{entry.id}.jsonl"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"q": 1,}', "not valid JSON"),
        (b"[1, 2]", "expected an object in braces, found [1, 2]"),
        (b'{"q": "\xff"}', "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_a_malformed_line_names_file_and_number_and_leaves_nothing(
    line: bytes, said: str, workspace: Workspace, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"q": 0}\n\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        workspace.add(path, name="bad")
    assert str(caught.value).startswith(f"{path}:3: {said}")
    assert files_in(workspace) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"q": 1}, "needs `instruction` and `verifier`; this one has: q"),
        ({"instruction": "x", "verifier": {"kind": "in_proces"}}, "closest: in_process"),
    ],
)
def test_a_benchmark_takes_only_tasks(row: Any, said: str, workspace: Workspace, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "tasks.jsonl", [TASK, row])
    with pytest.raises(DataError) as caught:
        workspace.add(path, name="bench", kind="benchmark")
    assert str(caught.value).startswith(f"{path}:2: ") and said in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.touch(), "has no rows"),
        (lambda p: p.mkdir(), "is a folder, not a file"),
    ],
)
def test_what_cannot_be_added_is_told(make: Any, said: str, workspace: Workspace, tmp_path: Path) -> None:
    make(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match=said):
        workspace.add(tmp_path / "x.jsonl", name="x")


@pytest.mark.parametrize("name", ["", "   ", "n" * 81, "sums-v1-0123abcd"])
def test_a_name_that_could_not_be_found_again_is_refused(name: str, workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError):
        workspace.add(write_jsonl(tmp_path / "x.jsonl", ROWS), name=name)


def test_two_names_that_make_the_same_id_are_refused(
    added: DatasetManifest, workspace: Workspace, tmp_path: Path
) -> None:
    with pytest.raises(WorkspaceError, match="would share its ids with 'sums'"):
        workspace.add(tmp_path / "sums.jsonl", name="Sums")


def test_parents_are_recorded_by_id(added: DatasetManifest, workspace: Workspace, tmp_path: Path) -> None:
    child = workspace.add(
        write_jsonl(tmp_path / "c.jsonl", ROWS[:1]), name="child", parents=["sums"], transforms=["head"], note="short"
    )
    assert workspace.get("child").lineage == child.lineage
    assert (child.lineage.parents, child.lineage.transforms, child.lineage.note) == ((added.id,), ("head",), "short")


def test_a_parent_that_does_not_exist_is_refused(added: DatasetManifest, workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"no dataset 'sumz'.*closest: sums"):
        workspace.add(tmp_path / "sums.jsonl", name="child", parents=["sumz"])


# --- pulling without a source


def test_a_miss_names_what_there_is_and_the_next_command(added: DatasetManifest, workspace: Workspace) -> None:
    with pytest.raises(WorkspaceError) as caught:
        workspace.pull_dataset("sum")
    assert "closest: sums; known: sums\nnext: evsys data add PATH --name sum" in str(caught.value)


def test_a_miss_that_exists_as_the_other_kind_says_so(added: DatasetManifest, workspace: Workspace) -> None:
    with pytest.raises(WorkspaceError, match="there is a dataset of that name"):
        workspace.pull_benchmark("sums")


def test_a_reference_cannot_walk_out_of_the_workspace(workspace: Workspace, tmp_path: Path) -> None:
    other = Workspace(tmp_path / "other")
    entry = other.add(write_jsonl(tmp_path / "sums.jsonl", ROWS), name="sums")
    workspace.add(tmp_path / "sums.jsonl", name="mine")
    with pytest.raises(WorkspaceError, match="no dataset"):
        workspace.pull_dataset(f"../../other/datasets/{entry.id}")


def tamper(path: Path) -> None:
    overwrite(path, path.read_bytes().replace(b'"4"', b'"5"'))


def truncate(path: Path) -> None:
    overwrite(path, path.read_bytes()[:-20])


def drop_last_row(path: Path) -> None:
    overwrite(path, b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (tamper, "was changed: sha256"),
        (truncate, "bytes and the manifest says"),
        (drop_last_row, "bytes and the manifest says"),
        (Path.unlink, "its data file is missing"),
    ],
)
@pytest.mark.parametrize("by", ["id", "name"])
def test_a_damaged_file_is_never_handed_out(
    by: str, damage: Any, said: str, added: DatasetManifest, workspace: Workspace
) -> None:
    workspace.pull_dataset("sums")
    damage(workspace.path(added))
    with pytest.raises(WorkspaceError) as caught:
        workspace.pull_dataset(getattr(added, by))
    assert said in str(caught.value)
    assert "next: register the original again: evsys data add sums.jsonl --name sums" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"complete": False}, "lacks `complete: true`"),
        ({"complete": None}, "lacks `complete: true`"),
        ({"n_rows": 4}, "has 3 rows and the manifest says 4"),
        ({"n_rows": "3"}, "has no 'n_rows' of type int"),
        ({"sha256": "0" * 64}, "was changed: sha256"),
        ({"id": "other"}, "is that of dataset 'other'"),
        ({"kind": "benchmark"}, "is that of benchmark"),
    ],
)
def test_a_manifest_that_does_not_vouch_is_not_believed(
    changes: dict[str, Any], said: str, added: DatasetManifest, workspace: Workspace
) -> None:
    edit_manifest(workspace, added, **changes)
    with pytest.raises(WorkspaceError) as caught:
        workspace.pull_dataset(added.id)
    assert said in str(caught.value)


@pytest.mark.parametrize("ref", ["sums", "the id"])
def test_data_without_a_manifest_is_half_written(ref: str, added: DatasetManifest, workspace: Workspace) -> None:
    workspace.versions("dataset").manifest_path(added.id).unlink()
    with pytest.raises(WorkspaceError, match="no manifest, so it was never finished"):
        workspace.pull_dataset(added.id if ref == "the id" else ref)
    assert workspace.list() == [] and [fault.id for fault in workspace.unusable()] == [added.id]


def test_a_manifest_that_is_no_json_is_told(added: DatasetManifest, workspace: Workspace) -> None:
    overwrite(workspace.versions("dataset").manifest_path(added.id), b'{"id": "su')
    with pytest.raises(WorkspaceError, match="its manifest cannot be read"):
        workspace.pull_dataset(added.id)


@pytest.mark.parametrize("damage", [tamper, truncate, Path.unlink])
def test_adding_the_original_again_repairs_the_version(
    damage: Any, added: DatasetManifest, workspace: Workspace, tmp_path: Path
) -> None:
    damage(workspace.path(added))
    assert workspace.add(tmp_path / "sums.jsonl", name="sums") == added
    assert workspace.get(added.id) == added


def test_adding_again_repairs_a_manifest_with_a_wrong_count(
    added: DatasetManifest, workspace: Workspace, tmp_path: Path
) -> None:
    edit_manifest(workspace, added, rows=99)
    assert workspace.add(tmp_path / "sums.jsonl", name="sums") == added
    assert workspace.get("sums") == added


def test_a_name_whose_newest_version_is_broken_is_refused_and_the_older_still_has_its_id(
    added: DatasetManifest, workspace: Workspace, tmp_path: Path
) -> None:
    second = workspace.add(write_jsonl(tmp_path / "more.jsonl", ROWS[:2]), name="sums")
    tamper(workspace.path(second))
    with pytest.raises(WorkspaceError, match=f"(?s)not to be trusted.*{second.id}"):
        workspace.get("sums")
    assert workspace.get(added.id) == added


def test_a_broken_version_keeps_its_number(added: DatasetManifest, workspace: Workspace, tmp_path: Path) -> None:
    tamper(workspace.path(added))
    assert workspace.add(write_jsonl(tmp_path / "more.jsonl", ROWS[:2]), name="sums").version == 2


def test_listing_tells_sound_from_unusable(added: DatasetManifest, workspace: Workspace, tmp_path: Path) -> None:
    short = workspace.add(write_jsonl(tmp_path / "b.jsonl", ROWS[:1]), name="b")
    bench = workspace.add(write_jsonl(tmp_path / "t.jsonl", [TASK]), name="a", kind="benchmark")
    truncate(workspace.path(short))
    assert workspace.list() == [added, bench] and workspace.list("benchmark") == [bench]
    assert [(fault.id, fault.manifest) for fault in workspace.unusable()] == [(short.id, short)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time a stored file is read in full."""
    seen: list[Any] = []
    real = manifest_module.Contents

    def counting(**fields: Any) -> Any:  # made once for each file that is read to its end
        seen.append(fields)
        return real(**fields)

    monkeypatch.setattr(manifest_module, "Contents", counting)
    return seen


def test_repeated_pulls_read_the_file_once(
    added: DatasetManifest, workspace: Workspace, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "_STAMPS_SETTLE_NS", -1)
    for _ in range(5):
        workspace.pull_dataset("sums")
    assert len(reads) == 1
    tamper(workspace.path(added))
    with pytest.raises(WorkspaceError):
        workspace.pull_dataset("sums")


def test_a_file_written_a_moment_ago_is_read_each_time(
    added: DatasetManifest, workspace: Workspace, reads: list[Any]
) -> None:
    for _ in range(2):
        workspace.pull_dataset("sums")
    assert len(reads) == 2


# --- pulling with a source


def with_source(workspace: Workspace, source: Remote) -> Workspace:
    return Workspace(workspace.root, source=source, now=workspace.now, who=workspace.who)


def test_a_pull_is_stored_with_version_and_lineage(workspace: Workspace) -> None:
    remote = Remote(lineage={"source": "raw.csv", "parents": ["r-1"], "transforms": ["clean"], "who": "bob"})
    path = with_source(workspace, remote).pull_dataset("sums")
    entry = workspace.get("r-7")
    assert path == workspace.root / "datasets" / "r-7.jsonl"
    assert (entry.name, entry.version, entry.n_rows, entry.bytes) == ("sums", 7, 3, path.stat().st_size)
    assert (entry.lineage.source, entry.lineage.parents, entry.lineage.who) == ("remote: raw.csv", ("r-1",), "bob")


@pytest.mark.parametrize("ref", ["r-7", "sums"])
def test_a_hit_does_not_ask_the_source(ref: str, workspace: Workspace) -> None:
    remote = Remote()
    first = with_source(workspace, remote).pull_dataset(ref)
    assert with_source(workspace, remote).pull_dataset(ref) == first
    assert remote.asked == [("dataset", ref)]
    assert workspace.pull_dataset(ref) == first


def test_a_hit_writes_nothing_so_that_a_read_only_workspace_will_do(workspace: Workspace) -> None:
    with_source(workspace, Remote()).pull_dataset("r-7")
    (workspace.root / "datasets" / ".lock").unlink()
    with_source(workspace, Remote()).pull_dataset("r-7")
    assert not (workspace.root / "datasets" / ".lock").exists()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_byte_chunks_may_be_cut_anywhere(size: int, workspace: Workspace) -> None:
    text = "\n".join(json.dumps(row) for row in ROWS).encode()
    remote = Remote([text[at : at + size] for at in range(0, len(text), size)])
    remote.info["sha256"] = hashlib.sha256(text + b"\n").hexdigest()
    assert with_source(workspace, remote).pull_dataset("r-7").read_bytes() == text + b"\n"


@pytest.mark.parametrize(
    ("rows", "info", "said"),
    [
        (ROWS[:2], {}, "2 rows came and 3 were announced"),
        (ROWS + ROWS, {}, "6 rows came and 3 were announced"),
        (ROWS, {"sha256": "0" * 64}, "sha256 differs"),
        (ROWS, {"n_rows": None}, "did not say 'n_rows'"),
        (ROWS, {"id": "../r-7"}, "cannot be a file name"),
        (ROWS, {"id": "r-8", "name": "other"}, "asked for dataset 'sums', the source answered with 'r-8'"),
    ],
)
def test_a_pull_that_is_not_as_announced_is_refused(
    rows: Any, info: dict[str, Any], said: str, workspace: Workspace
) -> None:
    with pytest.raises(WorkspaceError, match=said):
        with_source(workspace, Remote(rows, **info)).pull_dataset("sums")
    assert files_in(workspace) == [] and workspace.list() == []


def test_a_source_that_breaks_off_is_blamed_and_leaves_nothing(workspace: Workspace) -> None:
    def broken() -> Iterable[Any]:
        yield ROWS[0]
        raise ConnectionError("gone")

    with pytest.raises(WorkspaceError, match="pulling dataset 'sums' failed: ConnectionError: gone"):
        with_source(workspace, Remote(broken())).pull_dataset("sums")
    assert files_in(workspace) == []


def test_a_malformed_row_from_the_source_is_refused(workspace: Workspace) -> None:
    with pytest.raises(DataError, match="pulling dataset 'sums': row 2: not valid JSON"):
        with_source(workspace, Remote([b'{"a": 1}\n{"b"\n{"c": 1}'])).pull_dataset("sums")
    assert files_in(workspace) == []


@pytest.mark.parametrize("damage", [tamper, truncate, Path.unlink])
@pytest.mark.parametrize("ref", ["r-7", "sums"])
def test_a_damaged_pull_is_pulled_again(ref: str, damage: Any, workspace: Workspace) -> None:
    remote = Remote()
    path = with_source(workspace, remote).pull_dataset("r-7")
    good = path.read_bytes()
    damage(path)
    assert with_source(workspace, remote).pull_dataset(ref).read_bytes() == good
    assert len(remote.asked) == 2 and workspace.get("r-7").n_rows == 3


def test_a_manifest_without_the_flag_is_pulled_again(workspace: Workspace) -> None:
    remote = Remote()
    with_source(workspace, remote).pull_dataset("r-7")
    edit_manifest(workspace, workspace.get("r-7"), complete=False)
    with_source(workspace, remote).pull_dataset("r-7")
    assert len(remote.asked) == 2 and workspace.get("r-7").complete
