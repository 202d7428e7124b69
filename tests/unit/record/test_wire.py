from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path

import pytest

from evsys_sdk import constants
from evsys_sdk.files import to_json
from evsys_sdk.record.dashboard import wire
from evsys_sdk.record.dashboard.wire import WireEvent, WireLine


def test_the_wire_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(wire.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_the_routes_of_the_reference() -> None:
    assert wire.API_PREFIX == constants.API_PREFIX == "/api/dashboard/api"
    assert wire.experiments_path() == "/api/dashboard/api/sdk/experiments/"
    assert wire.steps_path("g1") == "/api/dashboard/api/sdk/generations/g1/step/"


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), float("-inf")])
def test_every_float_survives_the_wire(value: float) -> None:
    event = wire.step_event("g", 1, {"loss": value}, ts=0.0)
    back = wire.number(json.loads(to_json(event.body))["metrics"]["loss"])
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_other_strings_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="'12' is no wire number"):
        wire.number("12")


def test_an_event_survives_its_line() -> None:
    event = wire.step_event("g", 1, {"loss": 1.0}, ts=2.0)
    assert WireEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event


def test_derived_ids_repeat_and_new_ones_do_not() -> None:
    assert wire.derived_id("a", "b") == wire.derived_id("a", "b") != wire.derived_id("ab", "")
    assert wire.new_id() != wire.new_id()


def test_items_travel_together_but_never_past_a_request_of_their_own() -> None:
    steps = {name: [wire.step_event(name, n, {}, ts=0.0) for n in range(4)] for name in ("g1", "g2")}
    update = wire.generation_update("g1", {"status": "completed"}, ts=0.0)
    g1, g2 = steps["g1"], steps["g2"]
    groups = list(wire.batched([g1[0], g2[0], g1[1], update, g1[2], g2[1]]))
    assert groups == [[g1[0], g1[1]], [g2[0]], [update], [g1[2]], [g2[1]]]


def test_a_batch_is_one_request_with_a_list() -> None:
    events = [wire.step_event("g", n, {"loss": 1.0}, ts=0.0) for n in (1, 2)]
    lines = [json.dumps(event.to_dict()).encode() for event in events]
    request = wire.request_of([WireLine.read(line, wire.LineFrame()) for line in lines])
    assert (request.method, request.path) == ("POST", wire.steps_path("g"))
    assert [item["step"] for item in json.loads(request.body)["steps"]] == [1, 2]


def test_a_line_is_read_the_same_after_any_other_line() -> None:
    """The frame of the line before is a short cut, and must never fit a line that has another one."""
    events = [
        wire.step_event("g1", 1, {"loss": 1.0}, ts=0.0),
        wire.step_event("g1", 2, {', "body": ': 1.0, '}, "batch": "steps"}': 2.0}, ts=0.0),
        wire.step_event("g2", 1, {"loss": 1.0}, ts=0.0),
        wire.prediction_event("g1", {"id": "p", "completion": '}, "batch": "predictions"}'}, ts=0.0),
        wire.generation_update("g1", {"status": "completed"}, ts=0.0),
        wire.step_event("g1", 3, {}, ts=0.0),
    ]
    lines = {event.path + str(event.body): json.dumps(event.to_dict()).encode() for event in events}
    for before in lines.values():
        for event, line in zip(events, lines.values(), strict=True):
            frame = wire.LineFrame()
            WireLine.read(before, frame)
            assert WireLine.read(line, frame).event() == event
