from __future__ import annotations

import pytest

from evsys_sdk.config.load import dump_yaml, load_yaml
from evsys_sdk.errors import ConfigError, EvsysError

BASE = """
    name: hello
    run:
      name: r0
      data: { path: data/train.jsonl }
      model: { name: m }
      algorithm: { kind: sft, params: { learning_rate: 1e-5 } }
"""


def test_defaults_are_those_of_the_reference(load):
    config = load(BASE)
    run = config.run
    assert config.version == 1 and config.description == "" and config.output_dir == "./outputs"
    assert config.data_store.kind == "local" and config.log_store.kind == "jsonl"
    assert run.backend.kind == "tinker" and run.seed == 42 and run.tags == []
    assert run.eval.enabled and run.eval.metrics == [] and run.eval.inference is None
    assert run.data.source_kind == "jsonl" and run.data.hf_split == "train" and run.data.transforms == []
    assert run.algorithm.params["learning_rate"] == 1e-5


def test_all_mistakes_come_at_once_with_line_value_and_nearest_word(load):
    with pytest.raises(ConfigError) as caught:
        load(
            BASE
            + "      bakend: { kind: mock }\n      seed: abc\n    metadata: { benchmark: [{ nam: x }] }\n    out: 3\n"
        )
    text = str(caught.value)
    assert "config.yaml:7: 4 problems" in text
    assert "line 7  run.bakend   unknown key; closest: backend" in text
    assert "line 8  run.seed = 'abc'   must be a whole number" in text
    assert "line 9  metadata.benchmark[0].nam = 'x'   unknown key; closest: name" in text
    assert "line 10  out = 3   unknown key" in text
    assert text.endswith("next: evsys schema config")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("    runs: []\n", "exactly one of run, runs, matrix|at least 1"),
        ("    n_repeats: 0\n", "n_repeats = 0"),
        ("    base_run: {}\n", "base_run belongs to matrix"),
        ("    version: 0\n", "version = 0"),
        ("    metadata: { success_metric: { name: a, mode: up } }\n", "must be one of max, min"),
        ("    metadata: { benchmark: { run_every: 5 } }\n", "needs `id`, `name` or `path`"),
        ("    metadata: { benchmark: [{name: a, split: val, tags: [test]}] }\n", "split and tags disagree"),
        ("    metadata: { benchmark: [{name: a}, {name: a}] }\n", "distinct names"),
        ("    callbacks: [ local_logger ]\n", r"callbacks\[0\] = 'local_logger'\s+must be a mapping"),
    ],
)
def test_a_bad_top_level_setting_is_refused(load, extra, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE + extra)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{ source_kind: in_memory }", "needs `rows`"),
        ("{ source_kind: jsonl }", "needs `path`"),
        ("{ source_kind: hf_dataset }", "needs `hf_dataset`"),
        ("{ dataset_id: a, dataset_name: b }", "keep one"),
    ],
)
def test_a_data_block_without_a_source_is_refused(load, data, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE.replace("{ path: data/train.jsonl }", data))


def test_a_run_needs_data_unless_its_stages_bring_some(load):
    without = BASE.replace("      data: { path: data/train.jsonl }\n", "")
    with pytest.raises(ConfigError, match="needs `data`"):
        load(without)
    stages = "      continual: { stages: [ {name: a, data: {path: x}}, {name: b, data: {path: y}} ] }\n"
    assert [stage.name for stage in load(without + stages).run.continual.stages] == ["a", "b"]


def test_dump_and_load_give_an_equal_config(load, tmp_path):
    config = load(
        BASE
        + "    n_repeats: 3\n    metadata: {hypothesis: h, note: 1, success_metric: val.pass@1, benchmark: {path: b}}\n"
    )
    dump_yaml(config, tmp_path / "again.yaml")
    again = load_yaml(tmp_path / "again.yaml")
    assert again == config
    assert again.metadata.success_metric.name == "val.pass@1" and again.metadata.note == 1


@pytest.mark.parametrize("value", ["'1e-5'", "'off'", "'010'", ".inf", "'null'", "2024-01-01", "é", "'a: b'"])
def test_odd_values_survive_dump_and_load(load, tmp_path, value):
    config = load(BASE.replace("learning_rate: 1e-5", f"x: {value}"))
    dump_yaml(config, tmp_path / "again.yaml")
    assert load_yaml(tmp_path / "again.yaml") == config


def test_dump_and_load_give_an_equal_sweep(load, tmp_path):
    base = "base_run: {data: {path: a}, model: {name: m}, algorithm: {kind: sft}}"
    config = load(f"name: x\n{base}\nmatrix: {{axes: {{seed: [1, 2]}}}}\n")
    dump_yaml(config, tmp_path / "again.yaml")
    assert load_yaml(tmp_path / "again.yaml") == config


def test_overrides_reach_nested_keys_lists_and_axes(load):
    config = load(BASE, overrides=["run.seed=7", "run.algorithm.params.learning_rate=1e-3", "run.tags=[a, b]"])
    assert config.run.seed == 7 and config.run.tags == ["a", "b"]
    assert config.run.algorithm.params["learning_rate"] == 1e-3
    sweep = """
        name: x
        matrix: {axes: {algorithm.params.lora_rank: [1, 2]}}
        base_run: {data: {path: a}, model: {name: m}, algorithm: {kind: sft}}
    """
    assert len(load(sweep, overrides=["matrix.axes.algorithm.params.lora_rank=[1, 2, 3]"]).all_runs()) == 3
    assert len(load(sweep, overrides=["matrix.axes.algorithm.params.learning_rate=[1, 2, 3]"]).all_runs()) == 6
    wide = load(sweep, overrides=["matrix.axes.algorithm.params.lora_rank.1=8", "matrix.axes.seed=[1, 2]"])
    assert sorted(run.algorithm.params["lora_rank"] for run in wide.all_runs()) == [1, 1, 8, 8]


def test_a_mistake_in_an_override_says_where_it_came_from(load):
    with pytest.raises(ConfigError, match=r"run\.sed = 7\s+unknown key; closest: seed \(from --set\)"):
        load(BASE, overrides=["run.sed=7"])
    with pytest.raises(EvsysError, match="--set takes key=value"):
        load(BASE, overrides=["run.seed"])


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n", "name: [\n", "a: b: c\n", "\tname: x\n"])
def test_a_file_that_is_no_mapping_is_one_readable_problem(load, text):
    with pytest.raises(ConfigError, match=r"config\.yaml(:\d+)?: 1 problem"):
        load(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: 1 problem\n  \(file\)   no such file"):
        load_yaml(tmp_path / "nowhere.yaml")


def test_metadata_reads_like_the_dict_that_the_reference_calls_it(load):
    metadata = load(BASE + "    metadata: { hypothesis: h, budget: 3 }\n").metadata
    assert metadata["hypothesis"] == "h" and metadata["budget"] == 3 and metadata.get("client", "none") == "none"
    assert "budget" in metadata and "client" not in metadata
    with pytest.raises(KeyError):
        metadata["client"]


def test_a_newer_schema_version_is_reported(load):
    from evsys_sdk.checks.preflight import ignored_settings

    (problem,) = ignored_settings(load(BASE + "    version: 2\n"))
    assert problem.path == "version" and problem.line == 7 and "schema version 1" in problem.message
