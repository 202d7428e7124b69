from __future__ import annotations

import pytest

from evsys_sdk.config.load import plain
from evsys_sdk.config.schema import ExperimentConfig, MatrixSpec
from evsys_sdk.config.sweep import expand_sweep, slug
from evsys_sdk.errors import ConfigError

INSIDE = """
    name: x
    matrix:
      base_run:
        name: sweep
        data: { path: train.jsonl }
        model: { name: Qwen/Qwen3-4B }
        algorithm: { kind: sft, params: { lora_rank: 8, learning_rate: 1e-4 } }
      axes:
        algorithm.params.lora_rank:     [1, 8, 32]
        algorithm.params.learning_rate: [1e-4, 5e-5]
      name_template: "{base}__rank{algorithm.params.lora_rank}__lr{algorithm.params.learning_rate}"
"""
BESIDE = """
    name: x
    matrix:
      axes:
        algorithm.kind: [sft, focal_sft]
        algorithm.params.learning_rate: [1.0e-5, 1.0e-4]
    base_run: { data: {path: t}, model: {name: m}, backend: { kind: tinker } }
"""


def test_the_reference_example_makes_six_named_runs_in_order(load):
    runs = load(INSIDE).all_runs()
    assert [run.name for run in runs] == [
        "sweep__rank1__lr0p0001",
        "sweep__rank1__lr5e-05",
        "sweep__rank8__lr0p0001",
        "sweep__rank8__lr5e-05",
        "sweep__rank32__lr0p0001",
        "sweep__rank32__lr5e-05",
    ]
    assert [run.algorithm.params["lora_rank"] for run in runs] == [1, 1, 8, 8, 32, 32]
    assert runs[1].algorithm.params["learning_rate"] == 5e-5


def test_base_run_may_stand_beside_the_matrix(load):
    config = load(BESIDE)
    assert [run.name for run in config.all_runs()] == [
        "x__kindsft__learning_rate1e-05",
        "x__kindsft__learning_rate0p0001",
        "x__kindfocal_sft__learning_rate1e-05",
        "x__kindfocal_sft__learning_rate0p0001",
    ]
    assert config.matrix is None and config.base_run is None and len(config.runs or []) == 4


def test_cells_do_not_share_their_settings(load):
    first, second, *_ = load(BESIDE).all_runs()
    first.algorithm.params["learning_rate"] = 9
    assert second.algorithm.params["learning_rate"] == 1e-4


@pytest.mark.parametrize("text", [INSIDE, BESIDE])
def test_an_expanded_matrix_is_written_as_its_runs_alone(load, text):
    assert set(plain(expand_sweep(load(text)))) == {"name", "runs"}


def test_a_matrix_made_in_python_expands_too():
    base = {"data": {"path": "t"}, "model": {"name": "m"}, "algorithm": {"kind": "sft"}}
    config = ExperimentConfig(name="x", matrix=MatrixSpec(base_run=base, axes={"seed": [1, 2]}))
    assert [(run.name, run.seed) for run in config.all_runs()] == [("x__seed1", 1), ("x__seed2", 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("algorithm.kind: [sft, focal_sft]", "algorithm.kind: []"), r"axes\.algorithm\.kind\s+has no values"),
        (("algorithm.kind:", "algoritm.kind:"), "algoritm is an unknown key; closest: algorithm"),
        (("algorithm.kind:", "algorithm.kin:"), "unknown key; closest: kind"),
        (("algorithm.kind:", "seed.deeper:"), "holds a single value"),
        (("algorithm.kind: [sft, focal_sft]", "name: [a, b]"), "use name_template"),
        (("[1.0e-5, 1.0e-4]", "[1.0e-5, 1.0e-5]"), "two runs have this name"),
        (("algorithm.kind: [sft, focal_sft]", "seed: [1, x]"), r"line 4  matrix\.axes\.seed\[1\] = 'x'"),
        (
            ("base_run: { data: {path: t},", "base_run: { dat: {path: t},"),
            r"base_run\.dat\s+unknown key; closest: data",
        ),
        (("base_run:", "name_base:"), "name_base"),
        (("algorithm.kind: [sft, focal_sft]", "algorithm: [{kind: sft}]"), "lies inside it; one would undo the other"),
        (("algorithm.kind:", '"":'), "is no path to a setting"),
        (("algorithm.kind:", "data.transforms.5.kind:"), "must be a list"),
    ],
)
def test_a_mistake_in_a_sweep_is_named_at_its_place(load, change, message):
    with pytest.raises(ConfigError, match=message):
        load(BESIDE.replace(*change))


def test_an_index_beyond_the_list_is_refused(load):
    with pytest.raises(ConfigError, match=r"data.transforms.5.kind\s+does not fit the base run"):
        load(
            INSIDE.replace("{ path: train.jsonl }", "{ path: a, transforms: [] }").replace(
                "algorithm.params.lora_rank: ", "data.transforms.5.kind: "
            )
        )


def test_both_places_for_base_run_at_once_are_refused(load):
    with pytest.raises(ConfigError, match="keep one"):
        load(INSIDE + "    base_run: {data: {path: a}}\n")


def test_a_matrix_without_any_base_run_is_refused(load):
    with pytest.raises(ConfigError, match=r"matrix\.base_run\s+is missing"):
        load("name: x\nmatrix: {axes: {seed: [1]}}\n")


def test_a_template_that_names_nothing_is_refused(load):
    with pytest.raises(ConfigError, match=r"\{algorithm.params.rank\} is not in the run"):
        load(INSIDE.replace("{algorithm.params.lora_rank}", "{algorithm.params.rank}"))


def test_names_that_make_one_folder_are_refused(load):
    with pytest.raises(ConfigError, match="makes the same folder as run 'a/b'"):
        load(
            """
            name: x
            runs:
              - { name: a/b, data: {path: t}, model: {name: m}, algorithm: {kind: sft} }
              - { name: A-b, data: {path: t}, model: {name: m}, algorithm: {kind: sft} }
            """
        )


def test_the_folder_of_rehearsals_is_nobodys_run(load):
    with pytest.raises(ConfigError, match=r"run\.name = 'Dry' .*the folder 'dry' is that of --dry"):
        load("name: x\nrun: { name: Dry, data: {path: t}, model: {name: m}, algorithm: {kind: sft} }\n")


def test_a_list_item_can_be_an_axis(load):
    config = load(
        """
        name: x
        matrix:
          axes: { "data.transforms.0.params.n": [1, 2] }
          base_run:
            data: { path: t, transforms: [ {kind: first_n, params: {n: 5}} ] }
            model: { name: m }
            algorithm: { kind: sft }
        """
    )
    assert [run.data.transforms[0].params["n"] for run in config.all_runs()] == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-4, "0p0001"),
        (5e-5, "5e-05"),
        (1e6, "1e06"),
        (8, "8"),
        (True, "true"),
        (None, "none"),
        ("Qwen/Qwen3-4B", "Qwen-Qwen3-4B"),
        ({"kind": "sft", "params": {}}, "sft"),
        ([1, 0.5], "1-0p5"),
    ],
)
def test_slugs(value, text):
    assert slug(value) == text
