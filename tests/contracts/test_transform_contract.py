"""The transform contract, over every built-in and over plain callables that inherit nothing."""

from __future__ import annotations

import copy

import pytest
from pydantic import BaseModel

from evsys_sdk.protocols import Transform
from evsys_sdk.registry import list_transforms, register_transform, transforms

BUILT_INS = [name for name in list_transforms() if transforms.entries[name].origin.startswith("evsys_sdk.")]
ROWS = [
    {
        "query": f"q{n}",
        "tool_slug": f"T{n % 3}",
        "n": n,
        "conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"T{n % 3}"}],
        "instruction": f"do {n}",
        "output": f"done {n}",
        "text": f"text {n}",
        "chosen": f"yes {n}",
        "rejected": f"no {n}",
    }
    for n in range(12)
]
NEEDED = {
    "filter": {"key": "n", "min": 3},
    "map_fields": {"rename": {"query": "prompt"}},
    "sample": {"n": 5},
    "to_preference": {"prompt_key": "query"},
    "split": {"part": "train"},
}


def apply(name, rows):
    return transforms.build(name, NEEDED.get(name, {}))(rows)


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setattr(transforms, "entries", dict(transforms.entries))


@pytest.mark.parametrize("name", BUILT_INS)
def test_rows_become_a_list_of_rows_and_the_given_ones_stay_as_they_were(name):
    given = copy.deepcopy(ROWS)
    found = apply(name, given)
    assert isinstance(found, list) and found and all(isinstance(row, dict) for row in found)
    assert given == ROWS


@pytest.mark.parametrize("name", BUILT_INS)
def test_the_same_rows_give_the_same_rows_from_one_instance_or_two(name):
    transform = transforms.build(name, NEEDED.get(name, {}))
    assert isinstance(transform, Transform)
    assert transform(copy.deepcopy(ROWS)) == transform(copy.deepcopy(ROWS)) == apply(name, copy.deepcopy(ROWS))


@pytest.mark.parametrize("name", [name for name in BUILT_INS if name != "sample"])
def test_no_rows_give_no_rows(name):
    assert apply(name, []) == []


@pytest.mark.parametrize("name", BUILT_INS)
def test_settings_are_a_closed_schema(name):
    assert transforms.schema(name)["additionalProperties"] is False


def test_the_dedupe_of_the_walkthrough_takes_the_name_from_ours():
    @register_transform("dedupe")
    class Dedupe:
        name = "dedupe"

        class Config(BaseModel, extra="forbid"):
            key: str = "query"

        def __init__(self, **kw):
            self.cfg = self.Config(**kw)

        def __call__(self, rows):
            seen, out = set(), []
            for r in rows:
                if r.get(self.cfg.key) not in seen:
                    seen.add(r.get(self.cfg.key))
                    out.append(r)
            return out

    assert transforms.get("dedupe") is Dedupe
    assert [row["n"] for row in transforms.build("dedupe", {"key": "tool_slug"})(ROWS)] == [0, 1, 2]


def test_a_plain_class_without_config_is_a_transform():
    @register_transform("every_other")
    class EveryOther:
        def __init__(self, start=0):
            self.start = start

        def __call__(self, rows):
            return rows[self.start :: 2]

    assert len(transforms.build("every_other", {"start": 1})(ROWS)) == 6 and EveryOther.name == "every_other"
