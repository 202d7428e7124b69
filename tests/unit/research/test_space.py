"""What research may change: from the schemas, within the block, and always a legal file."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evsys_sdk import registry
from evsys_sdk.checks.preflight import validate_yaml
from evsys_sdk.config.load import load_yaml, plain
from evsys_sdk.config.research import ResearchSpec
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import ConfigError
from evsys_sdk.files import to_json
from evsys_sdk.research.legal import FileCheck
from evsys_sdk.research.recipes import changes_between, with_values
from evsys_sdk.research.settings import settings_of_schema
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import apply_changes

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ("10_sweep", "06_proof_rl", "07_two_tool_agent")


def space_of(name: str, **block: object) -> Space:
    config = load_yaml(EXAMPLES / name / "config.yaml")
    recipe = plain(config.all_runs()[0])
    del recipe["name"]
    return Space.of(recipe, ResearchSpec.model_validate(block), FileCheck.of(config))


@cache
def auto(name: str) -> Space:
    return space_of(name)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The examples with their data, to write configs beside them."""
    root = tmp_path_factory.mktemp("examples")
    for name in NAMES:
        shutil.copytree(EXAMPLES / name, root / name, ignore=shutil.ignore_patterns(".evsys"))
    return root


def as_file(space_name: str, recipe: JsonObject, root: Path) -> Path:
    """A config file whose run is the recipe."""
    config = plain(load_yaml(EXAMPLES / space_name / "config.yaml"))
    whole = {key: value for key, value in config.items() if key not in ("matrix", "base_run", "run", "runs")}
    path = root / space_name / "child.yaml"
    path.write_text(to_json(whole | {"run": {**recipe, "name": "child"}}))
    return path


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32 - 1))
def test_every_sampled_child_is_a_legal_file(copies, name, seed):
    child = auto(name).sample(random.Random(seed))
    validate_yaml(as_file(name, child, copies), deep=True)


def test_samples_are_not_just_the_base():
    space, rng = auto("10_sweep"), random.Random(3)
    children = [space.sample(rng) for _ in range(20)]
    assert len({to_json(child) for child in children}) == 20
    assert {child["algorithm"]["kind"] for child in children} == {"sft", "sdft"}
    assert len({to_json(child["data"]["transforms"]) for child in children}) > 1


@pytest.mark.parametrize("kind", registry.algorithms.names())
def test_the_bounds_of_tunable_settings_are_legal(kind):
    properties = registry.algorithms.schema(kind).get("properties", {})
    for setting in settings_of_schema(registry.algorithms.schema(kind)):
        for value in setting.values or (setting.at(0.0), setting.at(1.0)):
            wrong = registry.check_params(registry.algorithms.get(kind), {setting.path: value})
            assert not [problem for problem in wrong if problem.path == setting.path]
        assert "tunable" in properties[setting.path]


def test_a_learning_rate_is_searched_by_decades():
    [rate] = [one for one in settings_of_schema(registry.algorithms.schema("sft")) if one.path == "learning_rate"]
    assert rate.log and rate.at(0.0) == 1e-6 and rate.at(0.5) == 1e-4 and rate.at(1.0) == 1e-2
    assert rate.scaled(1e-4) == pytest.approx(0.5)


def test_a_setting_that_another_keeps_from_being_read_is_not_in_the_space():
    space = auto("10_sweep")  # max_steps is set and wins over num_epochs
    assert "algorithm.params.num_epochs" not in space.tunables(space.base)
    free = with_values(space.base, {"algorithm.params": {"batch_size": 16}})
    assert "algorithm.params.num_epochs" in space.tunables(free)


def test_what_research_must_not_touch_is_refused():
    space = auto("10_sweep")
    for path, value in {"seed": 7, "eval.n_samples": 3, "data.path": "data/other.jsonl", "model.name": "other"}.items():
        [problem] = space.check(with_values(space.base, {path: value}))
        assert problem.message == "must stay as it is"


def test_a_misspelt_setting_of_a_child_is_found_before_anything_is_spent():
    [problem] = auto("10_sweep").check(with_values(auto("10_sweep").base, {"algorithm.params.learning_rat": 1.0}))
    assert "closest: learning_rate" in problem.message


def test_fixed_settings_stay_when_kinds_are_swapped():
    space = space_of("10_sweep", fix=["algorithm.params.batch_size"])
    rng = random.Random(0)
    for _ in range(20):
        assert space.sample(rng)["algorithm"]["params"]["batch_size"] == 16


def test_an_explicit_space_is_all_that_changes():
    space = space_of("10_sweep", space={"algorithm.params.learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}})
    assert list(space.tunables(space.base)) == ["algorithm.params.learning_rate"]
    assert [*space.kinds["algorithm"]] == ["sft"] and not space.lists
    [problem] = space.check(with_values(space.base, {"algorithm.params.batch_size": 4}))
    assert problem.message == "is not in research.space"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("algorithm.params.learning_rat", "closest: learning_rate"),
        ("algorith.kind", "closest: algorithm"),
        ("seed", "never changed by research"),
        ("eval.n_samples", "never changed by research"),
        ("data.transforms[0].params.seed", "never changed by research"),
    ],
)
def test_a_setting_that_cannot_be_searched_is_named_with_its_place(path, words):
    with pytest.raises(ConfigError) as raised:
        space_of("10_sweep", space={path: [1, 2]})
    [problem] = raised.value.problems
    assert problem.path == f"research.space.{path}" and words in problem.message


def test_a_fixed_setting_that_does_not_exist_is_named_with_its_place():
    with pytest.raises(ConfigError) as raised:
        space_of("10_sweep", fix=["algorithm.kindd"])
    assert raised.value.problems[0].path == "research.fix[0]"


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_changes_lead_from_one_recipe_to_the_other(seed):
    space, rng = auto("10_sweep"), random.Random(seed)
    one, other = space.draw(rng, space.base), space.draw(rng, space.base)
    assert apply_changes(one, changes_between(one, other)) == other


def test_distance_is_zero_for_the_same_and_one_for_another_kind():
    space = auto("10_sweep")
    base = space.base
    assert space.distance(base, base) == 0.0
    assert space.distance(base, space.swap_kind(base, "algorithm", "sdft")) == 1.0
    near = with_values(base, {"algorithm.params.learning_rate": 1.1e-5})
    far = with_values(base, {"algorithm.params.learning_rate": 1e-3})
    assert 0.0 < space.distance(base, near) < 0.02 < 0.4 < space.distance(base, far) < 0.6


def _mock_space(root: Path, *, leakage: str = "warn", algorithm: JsonObject | None = None, **block: object) -> Space:
    """A project whose own rows hold one of two validation tasks, and none of the test tasks."""
    rows = {"train": ["red", "green", "blue"], "few": ["red"], "cheat": ["red", "aqua"]}
    for name, words in rows.items():
        chats = [
            [{"role": "user", "content": f"say the word {word} for me"}, {"role": "assistant", "content": word}]
            for word in words
        ]
        (root / f"{name}.jsonl").write_text("".join(to_json({"messages": one}) + "\n" for one in chats * 4))
    for split, words in {"val": ["red", "black"], "test": ["aqua", "luna"]}.items():
        (root / split).mkdir()
        verifier = {"kind": "in_process", "fn_name": "exact_match"}
        tasks = [
            {"task_id": word, "instruction": f"say the word {word} for me", "verifier": {**verifier, "expected": word}}
            for word in words
        ]
        (root / split / "tasks.jsonl").write_text("".join(to_json(task) + "\n" for task in tasks))
    run = {
        "name": "base",
        "data": {"path": "train.jsonl"},
        "model": {"name": "m"},
        "algorithm": algorithm or {"kind": "sft", "params": {"max_steps": 3}},
        "backend": {"kind": "mock"},
    }
    benchmark = [{"name": split, "path": split, "split": split} for split in ("val", "test")]
    metadata = {"success_metric": "val.pass@1", "benchmark": benchmark}
    (root / "config.yaml").write_text(to_json({"name": "x", "metadata": metadata, "leakage": leakage, "run": run}))
    config = load_yaml(root / "config.yaml")
    recipe = plain(config.all_runs()[0])
    del recipe["name"]
    return Space.of(recipe, ResearchSpec.model_validate(block), FileCheck.of(config))


def test_rows_may_hold_the_tasks_that_the_own_rows_hold_and_no_others(tmp_path):
    paths = ["train.jsonl", "few.jsonl", "cheat.jsonl"]
    space = _mock_space(tmp_path, space={"data.path": paths})
    found = {path: space.check(with_values(space.base, {"data.path": path})) for path in paths}
    assert not found["train.jsonl"] and not found["few.jsonl"]
    [problem] = found["cheat.jsonl"]
    assert "1 of 2 test/test tasks" in problem.message


def test_fewer_rows_with_the_same_tasks_are_a_legal_child(tmp_path):
    space = _mock_space(tmp_path)
    child = with_values(space.base, {"data.transforms": [{"kind": "dedupe", "params": {}}]})
    assert not space.check(child)


def test_a_listed_space_holds_for_its_values(tmp_path):
    rate = "algorithm.params.learning_rate"
    space = _mock_space(
        tmp_path, leakage="off", space={"data.path": ["train.jsonl"], rate: {"low": 1e-5, "high": 1e-2, "log": True}}
    )
    for path, value in {"data.path": "cheat.jsonl", rate: 0.5}.items():
        [problem] = space.check(with_values(space.base, {path: value}))
        assert problem.path == path and "research.space" in problem.message
    assert not space.check(with_values(space.base, {rate: 1e-3}))


def test_the_phases_of_a_combo_keep_one_adapter(tmp_path):
    phase = {"algorithm": {"kind": "sft", "params": {"max_steps": 2}}}
    space = _mock_space(tmp_path, algorithm={"kind": "combo", "params": {"phases": [phase, phase]}}, leakage="off")
    rng = random.Random(0)
    assert not any(space.check(space.draw(rng, space.base)) for _ in range(20))
