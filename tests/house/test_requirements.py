"""The locks in `requirements/` say what pyproject.toml asks for, and can be trusted.

In: pyproject.toml and requirements/*.txt as text. Out: nothing is resolved or installed here.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
GROUPS: dict[str, list[str]] = PYPROJECT["dependency-groups"]


def read_entries(lock: Path) -> list[str]:
    """The lock's entries, each with its hashes on one line; comments left out."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [entry.strip() for entry in joined.splitlines() if entry.strip()]


def read_pins(lock: Path) -> dict[str, set[str]]:
    """Package name -> pinned versions (several only where platforms differ)."""
    pins = defaultdict(set)
    for entry in read_entries(lock):
        requirement = Requirement(entry.split(" --hash=")[0])
        (pin,) = requirement.specifier
        assert pin.operator == "==", entry
        pins[canonicalize_name(requirement.name)].add(pin.version)
    return dict(pins)


def expand(requirements: list[str]) -> Iterator[Requirement]:
    """The requirements, with `evsys-sdk[extra]` replaced by what that extra asks for."""
    for requirement in map(Requirement, requirements):
        if requirement.name != PROJECT["name"]:
            yield requirement
            continue
        for extra in requirement.extras:
            yield from expand(EXTRAS[extra])


def is_met(requirement: Requirement, pins: dict[str, set[str]]) -> bool:
    versions = pins.get(canonicalize_name(requirement.name), set())
    return bool(versions) and all(requirement.specifier.contains(version) for version in versions)


CORE: list[str] = PROJECT["dependencies"]
ASKED = {
    "base": CORE,
    **{extra: CORE + wanted for extra, wanted in EXTRAS.items()},
    **GROUPS,
    "all": CORE + EXTRAS["all"] + EXTRAS["dev"],
}
"""Lock name -> what pyproject.toml asks of it."""


def test_every_extra_has_a_lock_and_every_lock_has_a_reason():
    assert {lock.stem for lock in LOCKS} == set(ASKED)


def test_the_extra_all_is_every_extra_but_dev():
    def names(requirements):
        return {canonicalize_name(requirement.name) for requirement in expand(requirements)}

    others = [wanted for extra, wanted in EXTRAS.items() if extra not in ("all", "dev")]
    assert names(EXTRAS["all"]) == names([requirement for wanted in others for requirement in wanted])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_pin_carries_a_hash(lock):
    entries = read_entries(lock)
    assert entries
    assert [entry for entry in entries if not re.search(r" --hash=sha256:[0-9a-f]{64}(\s|$)", entry)] == []


@pytest.mark.parametrize("lock", [lock for lock in LOCKS if lock.stem != "uv"], ids=lambda lock: lock.stem)
def test_versions_agree_with_the_lock_of_everything(lock):
    everything = read_pins(ROOT / "requirements/all.txt")
    strays = {name: pins for name, pins in read_pins(lock).items() if not pins <= everything.get(name, set())}
    assert strays == {}


@pytest.mark.parametrize("name", ASKED)
def test_what_pyproject_asks_for_is_pinned_within_its_bounds(name):
    pins = read_pins(ROOT / f"requirements/{name}.txt")
    unmet = [str(requirement) for requirement in expand(ASKED[name]) if not is_met(requirement, pins)]
    assert unmet == []


def test_no_lock_names_a_registry():
    """An address in a lock would bind everybody to one machine's mirror."""
    address = re.compile(r"://|https?:|^\s*(-i|-f|--(extra-)?index-url|--find-links)\b", re.MULTILINE)
    files = [path for path in (ROOT / "requirements").iterdir() if path.is_file()]
    assert [path.name for path in files if address.search(path.read_text(encoding="utf-8"))] == []
    assert not (ROOT / "uv.lock").exists()


LEFT_OUT = {"mlflow", "wandb"}
"""Packages that tests ask for and `make dev` does not bring; their tests run where they are installed."""


def test_make_dev_brings_what_tests_would_be_skipped_without() -> None:
    """Tests of forced tools were skipped on every machine, because no set of `make dev` had llguidance."""
    (sets,) = re.findall(r"^DEV_SETS\s*\?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    pins = {name for one in sets.split() for name in read_pins(ROOT / "requirements" / f"{one}.txt")}
    asked = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"importorskip\(\s*\"(\w+)", path.read_text(encoding="utf-8"))
    }
    missing = {name for name in asked if canonicalize_name(name) not in pins}
    assert asked > LEFT_OUT and missing == LEFT_OUT
