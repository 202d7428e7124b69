"""What goes over the dashboard's wire: routes, payloads, and the mirror's lines. Client and server both read it here.

In: values. Out: plain dicts. Pure, and of the standard library only, because the server imports this module
and nothing else of the SDK.

Rules that make a replay harmless:
- Ids are made by the client, so a record sent twice is the same record.
- `POST` creates or overwrites by id. A step is keyed (generation, step, metric name), a prediction by its id;
  of two values for one key the one with the newer `ts` counts.
- `PATCH` sets the named fields and leaves the others.
- A field without a value is left out; `null` is never sent for it.
- NaN and infinities travel as the strings "NaN", "Infinity", "-Infinity" (JSON has no numbers for them).

A run is called a *generation* here, because the published client API says so.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

API_PREFIX = "/api/dashboard/api"
PROJECT_HEADER = "X-Evsys-Project"

# Both are looked at before a line is added to a stretch, so that a line of any length still goes out.
MAX_BATCH_LINES = 5000
MAX_BATCH_BYTES = 4 * 1024 * 1024

Status = Literal["running", "completed", "failed", "cancelled", "pruned"]
Method = Literal["POST", "PATCH"]
JsonDict = dict[str, Any]

# Fixed for ever: ids that were derived under another would name other records.
_NAMESPACE = uuid.UUID("7b0f5f0e-6c1f-5d0a-9f57-4b1d7c0f2a10")


def new_id() -> str:
    """A fresh record id."""
    return str(uuid.uuid4())


def derived_id(*parts: str) -> str:
    """The same id for the same parts, e.g. for a run that is resumed by another process."""
    return str(uuid.uuid5(_NAMESPACE, json.dumps(parts)))


def number(value: Any) -> float:
    """The float behind a wire number, the three strings included."""
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{value!r} is no wire number")
    return float(value)


def headers(api_key: str, project_id: str) -> dict[str, str]:
    """Who is speaking, and for which project."""
    return {"Authorization": f"Bearer {api_key}", PROJECT_HEADER: project_id, "Content-Type": "application/json"}


def experiments_path() -> str:
    return f"{API_PREFIX}/sdk/experiments/"


def experiment_path(experiment_id: str) -> str:
    return f"{API_PREFIX}/sdk/experiments/{experiment_id}/"


def generations_path() -> str:
    return f"{API_PREFIX}/sdk/generations/"


def generation_path(generation_id: str) -> str:
    return f"{API_PREFIX}/sdk/generations/{generation_id}/"


def steps_path(generation_id: str) -> str:
    return f"{API_PREFIX}/sdk/generations/{generation_id}/step/"


def evals_path(generation_id: str) -> str:
    return f"{API_PREFIX}/sdk/generations/{generation_id}/eval/"


def predictions_path(generation_id: str) -> str:
    return f"{API_PREFIX}/sdk/generations/{generation_id}/predictions/"


def benchmarks_path() -> str:
    return f"{API_PREFIX}/sdk/benchmarks/"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """One HTTP call."""

    method: Method
    path: str
    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEvent:
    """What becomes one line of the mirror: a request, or one item of a request that carries many."""

    path: str
    body: JsonDict
    method: Method = "POST"
    batch: str = ""
    """The key of the list this item goes into (`steps`, `predictions`); empty for a separate request."""

    def to_dict(self) -> JsonDict:
        record: JsonDict = {"method": self.method, "path": self.path, "body": self.body}
        return record | {"batch": self.batch} if self.batch else record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> WireEvent:
        """The event behind a parsed mirror line; KeyError or ValueError when it is none."""
        if record["method"] not in ("POST", "PATCH"):
            raise ValueError(f"method {record['method']!r}")
        return cls(method=record["method"], path=record["path"], body=record["body"], batch=record.get("batch", ""))


@dataclass(slots=True)
class LineFrame:
    """What stands around the body of the line that was read last; the next line mostly has the same."""

    head: bytes = b""
    tail: bytes = b""
    method: Method = "POST"
    path: str = ""
    batch: str = ""


_BODY = b', "body": '
_BATCH = re.compile(rb'\}, "batch": "(steps|predictions)"\}\Z')


@dataclass(frozen=True, slots=True)
class WireLine:
    """A line of the mirror on its way to the server. Its body stays the JSON that is in the file."""

    method: Method
    path: str
    batch: str
    body: bytes

    @classmethod
    def read(cls, line: bytes, frame: LineFrame) -> WireLine:
        """The request or item in a line without its line end; ValueError, KeyError or TypeError when it is none.

        `frame` is that of the line before. The body of an item is not parsed, which would take most of the time of
        sending: a body that is no JSON is found by the server (`is_readable`)."""
        if frame.batch and line.startswith(frame.head) and line.endswith(frame.tail):
            return cls(frame.method, frame.path, frame.batch, line[len(frame.head) : 1 - len(frame.tail)])
        # JSON escapes a quote within a text, so that the first `, "body": ` is the key, wherever the line is from.
        place, end = line.find(_BODY), _BATCH.search(line)
        if place < 0 or end is None:
            event = WireEvent.from_dict(json.loads(line))
            body = json.dumps(event.body, ensure_ascii=False).encode("utf-8", "backslashreplace")
            return cls(event.method, event.path, event.batch, body)
        start = place + len(_BODY)
        found = WireEvent.from_dict({**json.loads(line[:place] + b"}"), "body": {}})
        frame.head, frame.tail = line[:start], line[end.start() :]
        frame.method, frame.path, frame.batch = found.method, found.path, end[1].decode()
        return cls(frame.method, frame.path, frame.batch, line[start : end.start() + 1])

    def is_readable(self) -> bool:
        """Whether the body is JSON: a power cut can leave a line that only looks like one."""
        try:
            json.loads(self.body)
        except ValueError:
            return False
        return True

    def event(self) -> WireEvent:
        return WireEvent(method=self.method, path=self.path, body=json.loads(self.body), batch=self.batch)


def given(fields: Mapping[str, object]) -> JsonDict:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def experiment_event(
    experiment_id: str, *, name: str, ts: float, hypothesis: str = "", details: Mapping[str, object] | None = None
) -> WireEvent:
    """A new experiment; `details`: description, config, tags, metadata, parent_experiment_id."""
    body = {"id": experiment_id, "name": name, "hypothesis": hypothesis, "status": "running", "ts": ts}
    return WireEvent(path=experiments_path(), body={**given(details or {}), **body})


def experiment_update(experiment_id: str, fields: Mapping[str, object], *, ts: float) -> WireEvent:
    """Changed fields: status, best_score, conclusion, ..."""
    return WireEvent(method="PATCH", path=experiment_path(experiment_id), body={**given(fields), "ts": ts})


def generation_event(
    generation_id: str,
    experiment_id: str,
    *,
    name: str,
    recipe_kind: str,
    run_config: Mapping[str, object],
    ts: float,
) -> WireEvent:
    """A new run of an experiment."""
    body = {"id": generation_id, "experiment_id": experiment_id, "name": name, "recipe_kind": recipe_kind}
    return WireEvent(
        path=generations_path(), body={**body, "run_config": given(run_config), "status": "running", "ts": ts}
    )


def generation_update(generation_id: str, fields: Mapping[str, object], *, ts: float) -> WireEvent:
    """Changed fields: status, metrics, artifacts, error, conclusion, ..."""
    return WireEvent(method="PATCH", path=generation_path(generation_id), body={**given(fields), "ts": ts})


def step_event(generation_id: str, step: int, metrics: Mapping[str, float], *, ts: float) -> WireEvent:
    """The numbers of one training step."""
    body = {"step": step, "ts": ts, "metrics": dict(metrics)}
    return WireEvent(path=steps_path(generation_id), body=body, batch="steps")


def eval_event(eval_id: str, generation_id: str, fields: Mapping[str, object], *, ts: float) -> WireEvent:
    """One evaluation: name, split, step, metrics, benchmark_id, error, and details such as scores with intervals."""
    return WireEvent(path=evals_path(generation_id), body={**given(fields), "id": eval_id, "ts": ts})


def prediction_event(generation_id: str, prediction: Mapping[str, object], *, ts: float) -> WireEvent:
    """One rollout of an evaluation. It keeps its own `id` when it brings one."""
    # An id that comes with the prediction replaces the new one.
    body = {"id": new_id(), **given(prediction), "ts": ts}
    return WireEvent(path=predictions_path(generation_id), body=body, batch="predictions")


def benchmark_event(benchmark_id: str, *, name: str, fields: Mapping[str, object], ts: float) -> WireEvent:
    """A suite of tasks that evaluations may refer to."""
    return WireEvent(path=benchmarks_path(), body={**given(fields), "id": benchmark_id, "name": name, "ts": ts})


def batched[T: (WireEvent, WireLine)](items: Iterable[T]) -> Iterator[list[T]]:
    """Lines as they may be sent: items of one list together, a separate request alone, in an order that
    keeps every item behind the requests that came before it and before those that came after."""
    groups: dict[tuple[str, str], list[T]] = {}
    for item in items:
        if item.batch:
            # Items of several runs take turns in the file; each run's go together.
            groups.setdefault((item.path, item.batch), []).append(item)
            continue
        yield from groups.values()
        groups = {}
        yield [item]
    yield from groups.values()


def request_of(lines: list[WireLine]) -> WireRequest:
    """The one request that carries these lines (a group of `batched`)."""
    first = lines[0]
    body = first.body
    if first.batch:
        # Bytes put together, not JSON made anew: a batch has thousands of items.
        body = b'{"%s": [%s]}' % (first.batch.encode(), b", ".join([line.body for line in lines]))
    return WireRequest(method=first.method, path=first.path, body=body)
