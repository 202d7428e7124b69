"""What every registry promises: names in, classes out, and clear words when a name is wrong or taken."""

from __future__ import annotations

import inspect
import logging
import sys

import pytest
from pydantic import BaseModel

import evsys_sdk
from evsys_sdk import _entry_points, registry
from evsys_sdk.errors import ConfigError, DuplicateKind, UnknownKind
from evsys_sdk.registry import EXAMPLES, REGISTRIES

KINDS = list(REGISTRIES)
SHORT = {"inference_client": "inference"}
"""Where the helper functions use another word than the registry."""


class Anything:
    """Has the methods of every kind, and inherits nothing."""

    class Config(BaseModel, extra="forbid"):
        size: int = 1

    def __init__(self, **params):
        self.cfg = self.Config(**params)

    def __call__(self, *args): ...
    def compute(self, task_rewards): ...
    def verify(self, *, prompt, completion, target): ...


def copy_of_anything():
    return type("Anything", (), dict(vars(Anything)) | {"__qualname__": "test.<locals>.Anything"})


@pytest.fixture(autouse=True)
def registries_as_before(monkeypatch):
    for one in REGISTRIES.values():
        one.names()  # everything is loaded before the copies are made
        monkeypatch.setattr(one, "entries", dict(one.entries))
        monkeypatch.setattr(one, "broken", dict(one.broken))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def helper(verb, kind):
    word = SHORT.get(kind, kind)
    plural = {"list": REGISTRIES[kind].plural}.get(verb, word)
    return getattr(evsys_sdk, f"{verb}_{plural}")


def test_the_helpers_of_the_package_are_the_registry(kind):
    cls = helper("register", kind)("newcomer")(copy_of_anything())
    found = helper("get", kind)("newcomer")
    assert (found.target if kind == "verifier" else found) is cls  # a verifier comes in the one form that is called
    assert "newcomer" in helper("list", kind)()
    assert cls.name == "newcomer"


def test_the_schema_is_that_of_the_config(kind):
    REGISTRIES[kind].register("newcomer")(copy_of_anything())
    schema = evsys_sdk.schema_for(kind, "newcomer")
    assert schema["properties"]["size"] == {"default": 1, "title": "Size", "type": "integer"}


def test_an_unknown_name_is_a_key_error_that_offers_what_there_is(kind):
    REGISTRIES[kind].register("newcomer")(copy_of_anything())
    with pytest.raises(KeyError) as caught:
        REGISTRIES[kind].get("newcomr")
    assert isinstance(caught.value, UnknownKind)
    assert "closest: newcomer" in str(caught.value)
    assert all(name in str(caught.value) for name in REGISTRIES[kind].names())


def test_a_taken_name_is_refused_and_the_same_class_is_not(kind):
    first, second = copy_of_anything(), copy_of_anything()
    REGISTRIES[kind].register("newcomer")(first)
    REGISTRIES[kind].register("newcomer")(first)
    with pytest.raises(DuplicateKind, match=r"'newcomer' is already registered by .*Anything"):
        REGISTRIES[kind].register("newcomer")(second)
    assert REGISTRIES[kind].get("newcomer") is first


def test_no_built_in_gives_its_name_to_another_class(kind):
    registry = REGISTRIES[kind]
    family = ["pass@1", "pass@7", "pass^2"] if kind == "metric" else []
    names = [name for name in registry.names() if registry.entries[name].origin.startswith("evsys_sdk.")]
    for name in [*names, *family]:
        if (kind, name) in EXAMPLES:
            continue
        before = registry.get(name)
        with pytest.raises(DuplicateKind) as caught:
            registry.register(name)(copy_of_anything())
        told = str(caught.value)
        assert f"{before.__module__}.{before.__qualname__}" in told and "Anything" in told
        assert registry.get(name) is before


def test_the_names_that_the_documents_register_are_the_projects_before_and_after_the_built_in():
    assert {("transform", "dedupe"), ("metric", "pass@2")} == EXAMPLES
    for kind, name in EXAMPLES:
        registry, ours, theirs = REGISTRIES[kind], REGISTRIES[kind].get(name), copy_of_anything()
        for order in ([ours, theirs], [theirs, ours]):
            registry.entries.pop(name, None)
            for cls in order:
                registry.register(name)(cls)
            assert registry.get(name) is theirs
        with pytest.raises(DuplicateKind):
            registry.register(name)(copy_of_anything())


def test_bad_params_are_a_config_error_with_the_nearest_word(kind):
    REGISTRIES[kind].register("newcomer")(copy_of_anything())
    with pytest.raises(ConfigError, match=r"siez.*closest: size"):
        REGISTRIES[kind].build("newcomer", {"siez": 2})
    assert REGISTRIES[kind].build("newcomer", {"size": 2}).cfg.size == 2


def test_a_decorator_without_a_name_is_told_how(kind):
    with pytest.raises(TypeError, match="takes a name"):
        REGISTRIES[kind].register(copy_of_anything())


@pytest.fixture
def package(kind, tmp_path, monkeypatch):
    """An installed package with one good and one broken entry point of this kind."""
    source = "from pydantic import BaseModel\n" + inspect.getsource(Anything)
    (tmp_path / "good_package.py").write_text(source)
    info = tmp_path / "good_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: good-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{REGISTRIES[kind].group}]\nbroken = no_such_package_here:Thing\nwhole = good_package:Anything\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("good_package", None)


@pytest.fixture
def warnings(kind):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("evsys_sdk._entry_points")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_entry_points_become_extensions_and_a_broken_one_is_reported_and_skipped(kind, package, warnings):
    _entry_points.load_third_party(REGISTRIES)
    assert REGISTRIES[kind].build("whole", {"size": 3}).cfg.size == 3
    assert len(warnings) == 1 and "no_such_package_here" in warnings[0]
    with pytest.raises(UnknownKind, match="its entry point is broken: ModuleNotFoundError"):
        REGISTRIES[kind].get("broken")


def test_every_built_in_says_what_it_is_and_has_a_schema(kind):
    for name in REGISTRIES[kind].names():
        target = REGISTRIES[kind].get(name)
        assert inspect.getdoc(target), f"{kind} {name} has no docstring"
        assert registry.schema_for(kind, name)["type"] == "object"


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_a_built_in_says_what_it_is_for(kind):
    unsaid = [
        f"{name}.{setting}"
        for name, entry in REGISTRIES[kind].entries.items()
        if entry.origin.startswith("evsys_sdk")
        for setting, about in registry.schema_for(kind, name).get("properties", {}).items()
        if not about.get("description")
    ]
    assert unsaid == []
