from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from pydantic import BaseModel

from evsys_sdk import _entry_points, registry
from evsys_sdk.errors import ConfigError, DuplicateKind, UnknownKind
from evsys_sdk.registry import Registry


def _registry() -> Registry:
    return Registry("gadget", "gadgets")


class Plain:
    """Keeps n."""

    class Config(BaseModel):
        n: int = 1
        rate: float = 0.5

    def __init__(self, **params):
        self.cfg = self.Config(**params)


class Other: ...


def test_registering_sets_the_name_and_get_returns_the_class():
    gadgets = _registry()
    assert gadgets.register("plain")(Plain) is Plain
    assert gadgets.get("plain") is Plain and Plain.name == "plain"


def test_an_unknown_name_is_a_key_error_that_lists_what_there_is():
    gadgets = _registry()
    gadgets.register("plain")(Plain)
    with pytest.raises(KeyError, match="'plian' is not a gadget; closest: plain; known: plain"):
        gadgets.get("plian")
    assert issubclass(UnknownKind, KeyError)


def test_a_second_class_under_a_name_is_refused_but_the_same_class_is_not():
    gadgets = _registry()
    gadgets.register("plain")(Plain)
    gadgets.register("plain")(Plain)
    with pytest.raises(
        DuplicateKind, match=r"gadget 'plain' is already registered by .*Plain; register .*Other under another"
    ):
        gadgets.register("plain")(Other)
    assert gadgets.get("plain") is Plain


def test_two_local_classes_of_the_same_name_are_two_classes():
    gadgets = _registry()

    def make() -> type:
        class Local: ...

        return Local

    gadgets.register("local")(make())
    with pytest.raises(DuplicateKind):
        gadgets.register("local")(make())


def test_a_reloaded_module_replaces_its_own_class():
    gadgets = _registry()
    first = type("Made", (), {"__module__": "project.parts"})
    again = type("Made", (), {"__module__": "project.parts"})
    gadgets.register("made")(first)
    gadgets.register("made")(again)
    assert gadgets.get("made") is again


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_built_ins_cannot_be_taken(name):
    with pytest.raises(DuplicateKind):
        registry.register_algorithm(name)(Other)
    assert registry.get_algorithm(name).__module__ == f"evsys_sdk.algorithms.{name}"


def test_the_decorator_without_a_name_says_how_it_is_used():
    with pytest.raises(TypeError, match=r"@register_gadget\('my_gadget'\)"):
        _registry().register(Plain)  # type: ignore[arg-type]


def test_params_are_checked_strictly_even_where_the_config_is_lax():
    gadgets = _registry()
    gadgets.register("plain")(Plain)
    assert gadgets.build("plain", {"n": 3}).cfg.n == 3
    with pytest.raises(ConfigError) as caught:
        gadgets.build("plain", {"n": "x", "m": 3})
    assert {(p.path, p.message) for p in caught.value.problems} == {
        ("m", "unknown key; known: n, rate"),
        ("n", "must be a whole number"),
    }


def test_a_class_without_config_is_checked_by_its_signature():
    class Signed:
        def __init__(self, size: int, depth: int = 2): ...

    assert [p.path for p in registry.check_params(Signed, {"depht": 1})] == ["depht", "size"]
    assert registry.check_params(Signed, {"size": 1}) == []
    assert [p.message for p in registry.check_params(Other, {"a": 1})] == ["unknown key; known: none"]


def test_schema_is_the_configs_own_or_an_empty_object():
    gadgets = _registry()
    gadgets.register("plain")(Plain)
    gadgets.register("other")(Other)
    assert set(gadgets.schema("plain")["properties"]) == {"n", "rate"}
    assert gadgets.schema("other") == {
        "title": "other",
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_a_class_without_config_has_the_schema_of_its_signature():
    class Signed:
        def __init__(self, size: int, depth: float = 0.5): ...

    gadgets = _registry()
    gadgets.register("signed")(Signed)
    schema = gadgets.schema("signed")
    assert set(schema["properties"]) == {"size", "depth"} and schema["required"] == ["size"]


def test_true_is_not_taken_for_a_number():
    assert [p.path for p in registry.check_params(Plain, {"n": True})] == ["n"]


def test_a_config_that_raises_is_a_problem_not_a_crash():
    from pydantic import field_validator

    class Raises:
        class Config(BaseModel):
            n: int = 1

            @field_validator("n")
            @classmethod
            def _look(cls, value):
                return {}["missing"]

    (problem,) = registry.check_params(Raises, {"n": 2})
    assert "KeyError" in problem.message


def test_a_broken_entry_point_is_reported_and_skipped(monkeypatch, tmp_path):
    (tmp_path / "their_package.py").write_text("class Good: ...\n")
    (tmp_path / "their_broken.py").write_text("raise RuntimeError('no GPU here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    gadgets = _registry()
    points = [
        EntryPoint("bad", "their_broken:Bad", gadgets.group),
        EntryPoint("missing", "their_package:Nothing", gadgets.group),
        EntryPoint("good", "their_package:Good", gadgets.group),
    ]
    monkeypatch.setattr(_entry_points, "entry_points", lambda: EntryPoints(points))
    _entry_points.load_third_party({"gadget": gadgets})
    assert gadgets.names() == ["good"]
    assert gadgets.broken["bad"] == "RuntimeError: no GPU here"
    with pytest.raises(UnknownKind, match=r"its entry point is broken: RuntimeError: no GPU here"):
        gadgets.get("bad")


def test_an_installed_package_extends_every_registry(tmp_path):
    """A real distribution with entry points on the path, seen by a fresh interpreter."""
    import subprocess

    info = tmp_path / "my_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-pkg\nVersion: 1.0\n")
    groups = [found.group for found in registry.REGISTRIES.values()]
    text = "".join(f"[{group}]\nmy_{i} = my_pkg:Thing\n" for i, group in enumerate(groups))
    (info / "entry_points.txt").write_text(text)
    (tmp_path / "my_pkg.py").write_text(
        "class Thing:\n    def compute(self, task_rewards): return 0.0\n"
        "    def verify(self, *, prompt, completion, target): return 1.0\n"
    )
    code = (
        "from evsys_sdk.registry import REGISTRIES\n"
        "print([name for r in REGISTRIES.values() for name in r.names() if name.startswith('my_')])"
    )
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == str([f"my_{i}" for i in range(len(groups))]), done.stderr


def test_built_in_kinds_are_those_of_the_reference_so_far():
    assert {"sft", "mock_sft"} <= set(registry.list_algorithms())
    assert {"mock"} <= set(registry.list_backends())
    assert {"exact_match", "pass_at_k", "mean_reward", "toolkit_match"} <= set(registry.list_metrics())
    assert {"identity", "jsonl_to_chat"} <= set(registry.list_transforms())
    assert {"format_only"} <= set(registry.list_verifiers())
    assert {"local", "in_memory"} <= set(registry.list_data_stores())
    assert {"jsonl", "tensorboard", "multiplex"} <= set(registry.list_log_stores())
    assert Path(registry.__file__).name == "registry.py"


@pytest.mark.parametrize(
    ("metric", "lower"),
    [("final_loss", True), ("tokens", True), ("tokens_per_second", False), ("pass@1", False), ("regret", True),
     ("time_saved", False)],
)  # fmt: skip
def test_whether_less_is_better_is_told_by_a_metrics_class_or_by_its_name(metric, lower, monkeypatch):
    class Regret(Other):
        lower_is_better = True

    monkeypatch.setitem(
        registry.metrics.entries, "regret", registry.Registration(name="regret", target=Regret, origin="x")
    )
    assert registry.lower_is_better(metric) is lower
