"""A data source is a registered kind: every built-in keeps the contract, and a project's own works like them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from evsys_sdk import registry
from evsys_sdk.checks.preflight import validate_yaml
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.sources import RowSource, SourceContext, open_source
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.errors import ConfigError, DataError, UnknownKind
from evsys_sdk.registry import data_sources, list_data_sources, register_data_source, schema_for

BUILT_INS = ["csv", "hf_dataset", "in_memory", "json", "jsonl", "parquet"]
ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(data_sources, "entries", dict(data_sources.entries))

    @register_data_source("counted")
    class Counted:
        """Rows that are counted, not read."""

        class Config(BaseModel, extra="forbid"):
            n: int
            path: str | None = None

        def __init__(self, **params: Any) -> None:
            self.cfg = self.Config(**params)

        def open(self, context: SourceContext) -> RowSource:
            name = context.find(self.cfg.path) if self.cfg.path else "counted"
            return RowSource(name=name, rows=lambda: ({"prompt": str(n), "completion": "x"} for n in range(self.cfg.n)))

    return Counted


def settings_for(kind: str, folder: Path) -> dict[str, Any]:
    """A data block that reads `ROWS`."""
    if kind == "in_memory":
        return {"source_kind": kind, "rows": ROWS}
    file = folder / f"rows.{'jsonl' if kind in ('jsonl', 'hf_dataset') else kind}"
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(ROWS), file)
    elif kind == "csv":
        file.write_text("prompt,completion\na,b\nc,d\n")
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    if kind == "hf_dataset":
        pytest.importorskip("datasets")
        return {"source_kind": kind, "hf_dataset": str(file)}
    return {"source_kind": kind, "path": str(file)}


def test_the_built_in_kinds_are_listed_and_described():
    assert set(BUILT_INS) <= set(list_data_sources())
    assert schema_for("data_source", "csv")["required"] == ["path"]
    assert set(schema_for("data_sources", "hf_dataset")["properties"]) == {"hf_dataset", "hf_split"}


@pytest.mark.parametrize("kind", BUILT_INS)
def test_a_built_in_gives_its_rows_as_often_as_asked(kind, tmp_path):
    source = open_source(DataConfig(**settings_for(kind, tmp_path)), store=LocalDataStore(root=str(tmp_path)))
    assert source.name
    assert [dict(row) for row in source.rows()] == [dict(row) for row in source.rows()] == ROWS


def test_a_kind_of_the_project_takes_its_own_settings_and_the_common_ones(counted, tmp_path):
    store = LocalDataStore(root=str(tmp_path))
    config = DataConfig(source_kind="counted", source_params={"n": 3})
    loaded = load_rows(config, store=store)
    assert (len(loaded.rows), loaded.n_raw, loaded.source) == (3, 3, "counted")
    (tmp_path / "x.db").write_text("")
    named = DataConfig(source_kind="counted", path="x.db", source_params={"n": 1})
    assert open_source(named, store=store).name == "x.db"
    with pytest.raises(DataError, match=r"no file 'y.db'.*closest: .*x.db"):
        open_source(DataConfig(source_kind="counted", path="y.db", source_params={"n": 1}), store=store)


def test_an_unknown_kind_offers_the_closest(counted, tmp_path):
    with pytest.raises(UnknownKind, match=r"'countd'.*closest: counted"):
        open_source(DataConfig(source_kind="countd"), store=LocalDataStore(root=str(tmp_path)))
    with pytest.raises(UnknownKind, match=r"'jsnl' .*closest: jsonl; known: .*csv.*in_memory.*parquet"):
        open_source(DataConfig(source_kind="jsnl", path="x"), store=LocalDataStore(root=str(tmp_path)))


def test_what_is_no_source_is_refused_by_name(counted, monkeypatch, tmp_path):
    monkeypatch.setattr(counted, "open", lambda self, context: [1])
    config = DataConfig(source_kind="counted", source_params={"n": 3})
    with pytest.raises(DataError, match="data source 'counted': open must return a RowSource"):
        open_source(config, store=LocalDataStore(root=str(tmp_path)))


CONFIG = """
name: x
run:
  name: x
  data: {data}
  model: {{ name: table-model }}
  algorithm: {{ kind: sft }}
  backend: {{ kind: mock }}
"""


@pytest.mark.parametrize(
    ("data", "place", "message"),
    [
        ("{ source_kind: jsnl, path: x }", "run.data.source_kind", "'jsnl' .*closest: jsonl"),
        ("{ source_kind: xml }", "run.data.source_kind", "known: .*csv, hf_dataset, in_memory, json, jsonl, parquet"),
        ("{ source_kind: counted }", "run.data.source_params.n", "required|missing"),
        ("{ source_kind: counted, source_params: { m: 1, n: 2 } }", "run.data.source_params.m", "unknown key.*n"),
        ("{ source_kind: counted, source_params: { n: 2 }, rows: [] }", "run.data.rows", "source_kind is counted"),
        ("{ source_kind: in_memory, rows: [], source_params: { n: 2 } }", "run.data.source_params.n", "unknown key"),
    ],
)
def test_mistakes_are_told_before_a_run_with_their_place(counted, tmp_path, data, place, message):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(data=data))
    with pytest.raises(ConfigError) as caught:
        validate_yaml(file, deep=True, strict=True)
    (problem,) = [problem for problem in caught.value.problems if problem.path == place]
    assert re.search(message, problem.message), problem.message


def test_a_kind_of_the_project_is_fit_for_a_run(counted, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(data="{ source_kind: counted, source_params: { n: 2 } }"))
    validate_yaml(file, deep=True)
    assert registry.registry_for("data_sources") is data_sources and data_sources.group == "evsys_sdk.data_sources"
