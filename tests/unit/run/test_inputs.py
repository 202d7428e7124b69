"""What all runs of an experiment read is parsed once."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from datetime import date

import pytest

from evsys_sdk.config.load import parse_config
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.data import rows as rows_module
from evsys_sdk.data.sources import RowSource
from evsys_sdk.errors import DataError
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.registry import data_sources, transforms


def test_a_benchmark_is_parsed_once_for_checks_identity_audit_runs_and_verdict(tmp_path, monkeypatch):
    entries = [{"name": "dev", "split": "val", "baseline": True}, {"name": "exam", "split": "test", "run_every": 1}]
    for number, entry in enumerate(entries):
        entry["path"] = f"{entry['name']}.jsonl"
        plan = {"kind": "in_process", "fn_name": "exact_match", "expected": str(number)}
        task = {"task_id": "t", "instruction": f"Say {number}", "verifier": plan}
        (tmp_path / entry["path"]).write_text(json.dumps(task) + "\n")
    rows = [{"messages": [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]}]
    base = {
        "model": {"name": "mock"},
        "data": {"source_kind": "in_memory", "rows": rows},
        "algorithm": {"kind": "sft", "params": {"max_steps": 2}},
        "backend": {"kind": "mock"},
    }
    data = {
        "name": "arms",
        "output_dir": str(tmp_path / "out"),
        "n_repeats": 2,
        "max_concurrent_arms": 4,
        "leakage": "error",
        "runs": [{**base, "name": name} for name in ("a", "b")],
        "metadata": {"benchmark": entries, "success_metric": "val.pass@1"},
    }
    parsed, load = Counter(), Benchmark.load

    def counted(path, **options):
        parsed[path.name] += 1
        return load(path, **options)

    monkeypatch.setattr(Benchmark, "load", counted)
    result = Experiment(parse_config(Document(label="config", data=data), folder=tmp_path)).run()
    assert [run.status for run in result.runs] == ["completed"] * 4
    assert len(result.runs[0].evals) >= 4, "both benchmarks were scored"
    assert parsed == {"dev.jsonl": 1, "exam.jsonl": 1}


@pytest.fixture
def counted_source(monkeypatch):
    """The data source `counted`, and how often its rows were read."""
    data_sources.names(), transforms.names()
    monkeypatch.setattr(data_sources, "entries", dict(data_sources.entries))
    monkeypatch.setattr(transforms, "entries", dict(transforms.entries))
    reads = Counter()

    @data_sources.register("counted")
    class Counted:
        def __init__(self, name, extra=None):
            self.name, self.extra = name, extra

        def open(self, context):
            def rows():
                reads[self.name] += 1
                for word in ("red", "green", "blue"):
                    chat = [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
                    yield {"messages": chat, "extra": object() if self.extra == "object" else word}

            return RowSource(name=self.name, rows=rows)

    return reads


def two_arms(tmp_path, *, repeats=2, concurrent=4, steps=(1, 2), data=None, **block):
    base = {
        "model": {"name": "mock"},
        "data": {"source_kind": "counted", "source_params": {"name": "train"}, **(data or {})},
        "backend": {"kind": "mock"},
        **block,
    }
    runs = [
        {**base, "name": f"arm{n}", "algorithm": {"kind": "sft", "params": {"max_steps": n, "batch_size": 3}}}
        for n in steps
    ]
    config = {
        "name": "rows",
        "output_dir": str(tmp_path / "out"),
        "n_repeats": repeats,
        "max_concurrent_arms": concurrent,
        "runs": runs,
    }
    return Experiment(parse_config(Document(label="config", data=config), folder=tmp_path))


@pytest.mark.parametrize("concurrent", [1, 4])
def test_rows_are_parsed_once_for_all_arms_and_seeds(tmp_path, counted_source, concurrent):
    asked = {"source_kind": "counted", "source_params": {"name": "asked"}}
    evaluation = {"metrics": [{"kind": "exact_match"}], "eval_data": asked}
    result = two_arms(tmp_path, concurrent=concurrent, eval=evaluation).run()
    assert [run.status for run in result.runs] == ["completed"] * 4
    assert [len(run.evals) for run in result.runs] == [1] * 4, "the rows of eval_data were scored in each run"
    assert counted_source == {"train": 1, "asked": 1}
    blocks = [json.loads((run.run_dir / "run_result.json").read_text())["environment"]["data"] for run in result.runs]
    assert {(block["rows_read"], block["rows"]) for run in blocks for block in run} == {(3, 3)}
    assert all(run == blocks[0] for run in blocks), "each run has the hashes of what it read"


def test_a_transform_that_changes_its_rows_does_not_change_those_of_another_run(tmp_path, counted_source):
    lengths = []

    @transforms.register("grows")
    class Grows:
        def __call__(self, rows):
            lengths.append([len(row["messages"]) for row in rows])
            for row in rows:
                row["messages"] += [{"role": "user", "content": "again"}, {"role": "assistant", "content": "no"}]
            return rows

    result = two_arms(tmp_path, concurrent=1, data={"transforms": [{"kind": "grows"}]}).run()
    assert [run.status for run in result.runs] == ["completed"] * 4
    # The checks before the runs may transform rows too, and get them as the source has them.
    assert len(lengths) >= 4 and set(map(tuple, lengths)) == {(2, 2, 2)}
    assert counted_source == {"train": 1}


def test_rows_with_objects_and_sources_too_large_to_keep_are_read_by_each_run(tmp_path, counted_source, monkeypatch):
    objects = two_arms(tmp_path / "objects", repeats=1, data={"source_params": {"name": "o", "extra": "object"}})
    assert [run.status for run in objects.run().runs] == ["completed"] * 2
    assert counted_source.pop("o") == 3, "one try to keep them, and each run"
    monkeypatch.setattr(rows_module, "CACHE_BYTES", 50)
    large = two_arms(tmp_path / "large", repeats=1, data={"source_params": {"name": "l"}})
    assert [run.status for run in large.run().runs] == ["completed"] * 2
    assert counted_source == {"l": 3}


def many_rows():
    return [{"text": f"row number {number:010d}"} for number in range(300)]


def raising():
    yield from many_rows()
    raise ValueError("the server hung up")


@pytest.mark.parametrize("rows", [lambda: [*many_rows(), {"day": date(2026, 1, 1)}], raising])
def test_a_source_that_cannot_be_kept_takes_no_room_from_the_others(monkeypatch, rows):
    monkeypatch.setattr(rows_module, "CACHE_BYTES", 20_000)
    cache, kept = rows_module.RowCache(), RowSource(name="kept", rows=many_rows)
    for number in range(5):
        with suppress(DataError):
            cache.get(DataConfig(path=f"{number}.jsonl"), RowSource(name="lost", rows=rows))
    assert cache.get(DataConfig(path="kept.jsonl"), kept) is not kept, "there is room for its packed rows"
