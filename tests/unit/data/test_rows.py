"""Loading rows: source and transforms in order, lazily where possible, and who is to blame when it fails."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.config.base import TransformSpec
from evsys_sdk.config.reading import forget, settings_of, unread
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.data.rows import build_transforms, collector_paused, load_rows
from evsys_sdk.data.stores import InMemoryDataStore, LocalDataStore
from evsys_sdk.data.transforms import Dedupe, Filter, Identity, JsonlToChat
from evsys_sdk.errors import ConfigError, DataError, UnknownKind
from evsys_sdk.protocols import Row

ROWS = [{"query": "a", "tool_slug": "A"}, {"query": "b", "tool_slug": "B"}, {"query": "a", "tool_slug": "C"}]


def load(*transforms: Any, rows: list[Any] = ROWS, names: str = "abcdef") -> Any:
    config = DataConfig(source_kind="in_memory", rows=rows)
    return load_rows(config, store=InMemoryDataStore(), transforms=list(zip(names, transforms, strict=False)))


class Trace:
    """Notes when each row passes."""

    def __init__(self, label: str, log: list[str]) -> None:
        self.label, self.log = label, log

    def __call__(self, rows: list[Row]) -> list[Row]:
        return list(self.stream(rows))

    def stream(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            self.log.append(f"{self.label}{row['query']}")
            yield row


def test_transforms_apply_in_order_and_keep_the_columns() -> None:
    chat = JsonlToChat(user_template="Query: {query}", assistant_template="<answer>{tool_slug}</answer>")
    loaded = load(chat, Dedupe(key="query"))
    assert [row["query"] for row in loaded.rows] == ["a", "b"]
    assert loaded.rows[0]["messages"][1]["content"] == "<answer>A</answer>"
    assert loaded.n_raw == 3


def test_streaming_transforms_see_one_row_after_the_other() -> None:
    log: list[str] = []
    load(Trace("1", log), Trace("2", log), rows=ROWS[:2])
    assert log == ["1a", "2a", "1b", "2b"]


def test_a_transform_without_stream_gets_the_whole_list() -> None:
    log: list[str] = []
    load(Trace("1", log), lambda rows: rows[::-1], Trace("2", log), rows=ROWS[:2])
    assert log == ["1a", "1b", "2b", "2a"]


def test_a_transform_may_stop_before_the_end() -> None:
    class First:
        def stream(self, rows: Iterable[Row]) -> Iterator[Row]:
            yield next(iter(rows))

    loaded = load(First())
    assert (loaded.rows, loaded.n_raw) == (ROWS[:1], 1)


def test_a_transform_that_raises_is_named_with_its_place() -> None:
    def broken(rows: list[Row]) -> list[Row]:
        return [row["nope"] for row in rows]

    with pytest.raises(DataError, match=r"transform 'b' \(number 2\) failed: KeyError: 'nope'"):
        load(lambda rows: rows, broken)


def test_the_transform_that_failed_is_blamed_and_not_the_next_one() -> None:
    class Broken:
        def stream(self, rows: Iterable[Row]) -> Iterator[Row]:
            for row in rows:
                yield {"n": 1 / (row["query"] != "b")}

    with pytest.raises(DataError, match=r"transform 'a' \(number 1\) failed: ZeroDivisionError"):
        load(Broken(), Filter(key="n", min=0), Identity())


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "it is None"),
        ([{}, "text"], r"row 1 \(counting from 0\) is 'text'"),
        ({}, "it is {}"),
    ],
)
def test_a_transform_that_returns_no_rows_is_named(result: Any, words: str) -> None:
    with pytest.raises(DataError, match=rf"transform 'a' \(number 1\) must return rows .*; {words}"):
        load(lambda rows: result)


def test_a_stream_that_yields_no_rows_is_named() -> None:
    class Texts:
        def stream(self, rows: Iterable[Row]) -> Iterator[Any]:
            return (row["query"] for row in rows)

    with pytest.raises(DataError, match=r"transform 'a' \(number 1\) must return .* row 0 .* is 'a'"):
        load(Texts())


def test_a_store_that_breaks_is_named_as_the_source() -> None:
    class Broken(InMemoryDataStore):
        def read_jsonl(self, path: str) -> Iterator[Row]:
            yield {"a": 1}
            raise RuntimeError("the wire is cut")

    config = DataConfig(path="x.jsonl")
    with pytest.raises(DataError, match=r"reading x\.jsonl failed: RuntimeError: the wire is cut"):
        load_rows(config, store=Broken(files={"x.jsonl": []}), transforms=[("a", Filter(key="a", min=0))])


def test_the_hash_and_the_name_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n')
    loaded = load_rows(DataConfig(path="rows.jsonl"), store=LocalDataStore(root=str(tmp_path)))
    assert loaded.sha256 == hashlib.sha256(b'{"a": 1}\n').hexdigest()
    assert loaded.source == str(tmp_path / "rows.jsonl")


def test_rows_without_a_file_are_hashed_by_content() -> None:
    again = [dict(reversed(row.items())) for row in ROWS]
    assert load().sha256 == load(rows=again).sha256 == load(Dedupe(key="query")).sha256
    assert load().sha256 != load(rows=ROWS[:2]).sha256 != load(rows=ROWS[::-1]).sha256


def test_a_store_without_a_hash_is_hashed_by_content() -> None:
    class Plain:
        def read_jsonl(self, path: str) -> list[Row]:
            return [dict(row) for row in ROWS]

        def exists(self, path: str) -> bool:
            return True

    loaded = load_rows(DataConfig(path="x.jsonl"), store=Plain())  # type: ignore[arg-type]
    assert (loaded.rows, loaded.sha256) == (ROWS, load().sha256)


def test_the_collector_rests_while_rows_are_built_and_comes_back() -> None:
    seen: list[bool] = []

    def look(rows: list[Row]) -> list[Row]:
        seen.append(gc.isenabled())
        return rows

    load(look)
    assert seen == [False] and gc.isenabled()


def test_the_collector_comes_back_after_a_failure() -> None:
    with pytest.raises(DataError):
        load(lambda rows: None)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_new_rows_are_not_walked_by_the_next_collection() -> None:
    with collector_paused():
        rows = [{"a": []} for _ in range(1000)]
    oldest = {id(item) for item in gc.get_objects(generation=2)}
    assert all(id(row) in oldest for row in rows)


def test_transforms_are_built_from_the_config() -> None:
    specs = [TransformSpec(kind="jsonl_to_chat"), TransformSpec(kind="dedupe", params={"key": "query"})]
    assert [(name, type(transform).__name__) for name, transform in build_transforms(specs)] == [
        ("jsonl_to_chat", "JsonlToChat"),
        ("dedupe", "Dedupe"),
    ]
    config = DataConfig(source_kind="in_memory", rows=ROWS, transforms=specs)
    assert len(load_rows(config, store=InMemoryDataStore()).rows) == 2


def test_an_unknown_transform_and_bad_params_are_refused() -> None:
    with pytest.raises(UnknownKind, match="closest: dedupe"):
        build_transforms([TransformSpec(kind="dedup")])
    with pytest.raises(ConfigError, match="unknown key; closest: key"):
        build_transforms([TransformSpec(kind="dedupe", params={"keys": "query"})])


def test_every_setting_of_a_transform_is_read_when_rows_pass() -> None:
    given: dict[str, dict[str, Any]] = {
        "jsonl_to_chat": {"user_template": "{q}", "assistant_template": "{a}", "system_prompt": "s"},
        "dedupe": {"key": "q"},
        "filter": {"key": "n", "equals": 1, "not_equals": 2, "in": [1], "not_in": [2], "min": 0, "max": 9},
        "sample": {"n": 1, "seed": 1},
        "shuffle": {"seed": 1},
        "split": {"part": "all", "fractions": {"all": 1}, "seed": 1, "key": "q"},
        "map_fields": {"rename": {"n": "m"}, "set": {"x": 1}, "drop": ["z"], "keep": ["q", "a", "x"]},
        "to_harbor_task": {"instruction_template": "{q}", "expected_key": "a", "fn_name": "exact_match"},
        "to_prompt_example": {"input_keys": ["q"], "expected_key": "a"},
    }
    for kind, params in given.items():
        ((_, transform),) = build_transforms([TransformSpec(kind=kind, params=params)])
        settings = settings_of(transform)
        assert settings is not None
        forget(settings)  # what the validators looked at is not use
        load(transform, rows=[{"q": "x", "a": "y", "n": 1}])
        assert list(unread(settings)) == [], kind
