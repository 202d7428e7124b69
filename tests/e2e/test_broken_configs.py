"""Broken YAML files: each one readable, located message, exit code 1, nothing lost."""
# ruff: noqa: E501

from __future__ import annotations

import json

import pytest

from evsys_sdk.cli.main import main

GOOD = """\
version: 1
name: hello
output_dir: ./outputs
data_store: { kind: local }
log_store:
  kind: jsonl
callbacks:
  - { kind: local_logger }
metadata:
  hypothesis: it works
  success_metric: val.pass@1
  benchmark:
    - name: colours
      path: bench
      split: val
      metrics: [pass@1]
run:
  name: r0
  seed: 1
  data:
    source_kind: jsonl
    path: data/train.jsonl
    transforms:
      - kind: jsonl_to_chat
        params: { user_template: "{prompt}", assistant_template: "{completion}" }
  model: { name: table-model }
  algorithm:
    kind: sft
    params:
      learning_rate: 1e-3
      max_steps: 2
  backend:
    kind: mock
    params: { latency_ms: 0 }
  eval:
    metrics: [ { kind: exact_match } ]
    inference: { kind: mock, params: { max_tokens: 20 } }
"""

BROKEN = {
    # name: (old text, new text, line, words of the message)
    "unknown top-level key": ("name: hello", "naem: hello", 2, ["naem", "closest: name"]),
    "unknown run key": ("  seed: 1", "  sede: 1", 19, ["run.sede", "closest: seed"]),
    "wrong type": ("seed: 1", "seed: soon", 19, ["run.seed", "'soon'", "whole number"]),
    "negative seed": ("seed: 1", "seed: -1", 19, ["run.seed", "-1"]),
    "version that is none": ("version: 1", "version: one", 1, ["version", "'one'", "whole number"]),
    "unknown algorithm": ("kind: sft", "kind: stf", 28, ["run.algorithm.kind", "'stf' is not an algorithm", "closest: sft"]),
    "unknown backend": ("kind: mock\n    params: { lat", "kind: mokc\n    params: { lat", 33, ["run.backend.kind", "closest: mock"]),
    "unknown param": ("learning_rate", "learning_rat", 30, ["run.algorithm.params.learning_rat", "closest: learning_rate", "evsys schema algorithm sft"]),
    "bad param value": ("1e-3", "fast", 30, ["run.algorithm.params.learning_rate", "'fast'", "must be a number"]),
    "unknown backend param": ("latency_ms", "latncy_ms", 34, ["run.backend.params.latncy_ms", "closest: latency_ms"]),
    "unknown transform": ("kind: jsonl_to_chat", "kind: json_to_chat", 24, ["run.data.transforms[0].kind", "closest: jsonl_to_chat"]),
    "unknown transform param": ("user_template", "usr_template", 25, ["run.data.transforms[0].params.usr_template", "closest: user_template"]),
    "unknown metric": ("kind: exact_match", "kind: exactmatch", 36, ["run.eval.metrics[0].kind", "closest: exact_match"]),
    "unknown inference": ("kind: mock, params", "kind: mok, params", 37, ["run.eval.inference.kind", "closest: mock"]),
    "unknown inference param": ("max_tokens: 20", "max_token: 20", 37, ["run.eval.inference.params.max_token", "closest: max_tokens"]),
    "unknown callback": ("local_logger", "local_loger", 8, ["callbacks[0].kind", "closest: local_logger"]),
    "unknown log store": ("kind: jsonl\ncall", "kind: jsonlines\ncall", 6, ["log_store.kind", "closest: jsonl"]),
    "unknown data store": ("kind: local }\nlog", "kind: locale }\nlog", 4, ["data_store.kind", "closest: local"]),
    "misspelt benchmark key": ("split: val", "splt: val", 15, ["metadata.benchmark[0].splt", "closest: split"]),
    "unknown split": ("split: val", "split: dev", 15, ["metadata.benchmark[0].split", "must be one of val, test"]),
    "unknown benchmark metric": ("[pass@1]", "[pas@1]", 16, ["metadata.benchmark[0].metrics[0]", "pas@1"]),
    "benchmark that is not there": ("path: bench", "path: bnch", 14, ["metadata.benchmark[0].path", "no benchmark at 'bnch'"]),
    "training file that is not there": ("data/train.jsonl", "data/trian.jsonl", 22, ["run.data.path", "trian.jsonl", "closest"]),
    "unknown source": ("source_kind: jsonl", "source_kind: xml", 21, ["run.data.source_kind", "'xml' is not", "known: csv, hf_dataset, in_memory, json, jsonl, parquet"]),
    "no source": ("    path: data/train.jsonl\n", "", 20, ["run.data", "needs `path`"]),
    "missing model": ("  model: { name: table-model }\n", "", 17, ["run.model", "is missing"]),
    "no run at all": (GOOD[GOOD.index("run:") :], "", 1, ["exactly one of run, runs, matrix", "found none"]),
    "run and runs": ("run:\n", "runs: [ { name: b } ]\nrun:\n", 17, ["runs[0].data|runs[0].model"]),
    "key given twice": ("  seed: 1\n", "  seed: 1\n  seed: 2\n", 20, ["run.seed", "given twice", "line 19"]),
    "broken syntax": ("  seed: 1\n", "  seed: [1\n", None, ["is not YAML"]),
    "tab": ("  seed: 1\n", "\tseed: 1\n", 19, ["is not YAML"]),
    "empty name": ("name: hello", "name: ''", 2, ["name", "must not be empty"]),
    "text for a block": ("  model: { name: table-model }", "  model: table-model", 26, ["run.model", "'table-model'", "must be a mapping"]),
    "missing import": ("version: 1", "imports: [my_missing_module]", 1, ["imports[0]", "no such module"]),
    "metadata mode": ("success_metric: val.pass@1", "success_metric: {name: a, mode: best}", 11, ["success_metric.mode", "must be one of max, min"]),
    "unknown dataset": ("    path: data/train.jsonl\n", "    dataset_name: nowhere\n", 22, ["run.data.dataset_name", "nowhere", "evsys data add"]),
    "more passes than samples": ("[pass@1]", "[pass@4]\n      num_samples: 2", 17, ["metadata.benchmark[0].num_samples", "4"]),
    "mock algorithm with a bad schedule": ("max_steps: 2", "lr_schedule: cosin", 31, ["run.algorithm.params.lr_schedule", "closest: cosine"]),
    "continual stage without its file": ("  seed: 1\n", "  continual: { stages: [ {name: a, data: {path: data/no.jsonl}} ] }\n", 19, ["run.continual.stages[0].data.path", "no.jsonl"]),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "bench").mkdir()
    rows = [{"prompt": "say red", "completion": "red"}] * 3
    (tmp_path / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task_id": "a", "instruction": "which colour?", "verifier": {"fn_name": "exact_match", "expected": "red"}}
    (tmp_path / "bench/tasks.jsonl").write_text(json.dumps(task) + "\n")
    return tmp_path


def _run(folder, text: str, capsys, *arguments: str) -> tuple[int, str]:
    (folder / "config.yaml").write_text(text)
    code = main([*arguments, "config.yaml"])
    captured = capsys.readouterr()
    return code, captured.err


def test_the_config_that_the_others_are_made_from_is_right(folder, capsys):
    code, err = _run(folder, GOOD, capsys, "validate", "--deep", "--strict")
    assert (code, err) == (0, "")
    assert _run(folder, GOOD, capsys, "run")[0] == 0


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("verb", [("validate", "--deep"), ("run",)], ids=["validate", "run"])
def test_a_broken_config_gives_one_located_message(folder, capsys, name, verb):
    old, new, line, words = BROKEN[name]
    assert old in GOOD
    code, err = _run(folder, GOOD.replace(old, new, 1), capsys, *verb)
    assert code == 1
    header = err.splitlines()[0]
    assert header.startswith("config.yaml") and "problem" in header
    if line is not None:
        assert f"line {line}  " in err, err
    for word in words:
        assert any(part in err for part in word.split("|")), err
    assert "Traceback" not in err and len(err.splitlines()) <= 8, err
    assert not (folder / "outputs").exists(), "nothing may be spent on a broken config"


def test_a_task_that_names_an_unknown_verifier_is_found_before_the_run(folder, capsys):
    tasks = [
        {"task_id": "a", "instruction": "x", "verifier": {"fn_name": "exact_match", "expected": "x"}},
        {"task_id": "b", "instruction": "x", "verifier": {"fn_name": "exactly", "expected": "x"}},
        {
            "task_id": "c",
            "instruction": "x",
            "verifier": {"fn_name": "contains", "expected": "x", "params": {"cse": 1}},
        },
    ]
    (folder / "bench/tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    code, err = _run(folder, GOOD, capsys, "validate", "--deep")
    assert code == 1
    assert "tasks.jsonl:2" in err and "'exactly' is not a verifier" in err
    assert "tasks.jsonl:3" in err and "cse" in err


def test_a_malformed_row_names_file_and_line_when_it_is_read(folder, capsys):
    (folder / "data/train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 149 + '{"prompt": \n')
    code, _ = _run(folder, GOOD, capsys, "run")
    assert code == 2
    record = json.loads((folder / "outputs/r0/run_result.json").read_text())
    assert record["status"] == "failed" and "train.jsonl:150" in record["error"]


def test_a_malformed_row_among_the_first_is_refused_before_anything_is_made(folder, capsys):
    (folder / "data/train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    code, said = _run(folder, GOOD, capsys, "run")
    assert code == 1 and "train.jsonl:2" in said and "run.data" in said
    assert not (folder / "outputs").exists()


def test_a_template_key_that_a_row_lacks_names_row_and_key(folder, capsys):
    (folder / "data/train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    code, error = _run(folder, GOOD, capsys, "run")
    assert code == 1
    assert "'completion'" in error and "row" in error and "prompt" in error
