"""Where numbers go while a run is live: JSON lines, TensorBoard event files, or several places at once.

In: the calls of the `LogStore` protocol, from any thread. Out: files below `log_dir`. Which folder that is
when the YAML does not say, is decided only here (`with_log_dir`).

After a resume a step may appear twice in metrics.jsonl; the last line of a step is the one that counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from evsys_sdk import registry
from evsys_sdk.config.base import Params
from evsys_sdk.errors import Cancelled, EvsysError, error_boundary, need
from evsys_sdk.files import to_json, write_json
from evsys_sdk.format import refuse_non_numbers
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import LogStore
from evsys_sdk.record.lines import LineFile, StepOrder
from evsys_sdk.registry import register_log_store

SCORES = ("val/", "test/", "eval/")
"""How the names of scores begin."""
WITH_FOLDER = ("jsonl", "tensorboard")
"""Kinds that write into a `log_dir`."""


def with_log_dir(kind: str, params: dict[str, object], run_dir: Path | str) -> dict[str, object]:
    """`params` with every missing `log_dir` filled in: `<run_dir>/logs`, or `<run_dir>/logs/<kind>` in a multiplex."""
    logs = Path(run_dir) / "logs"
    if kind in WITH_FOLDER and params.get("log_dir") is None:
        return {**params, "log_dir": str(logs)}
    if kind == "multiplex":
        return _with_child_dirs(params, logs, taken=set())
    return params


def _with_child_dirs(params: dict[str, object], logs: Path, taken: set[str]) -> dict[str, object]:
    children = params.get("stores")
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        return params  # the Config says what is wrong with it
    stores = []
    for child in children:
        kind, own = str(child.get("kind")), child.get("params") or {}
        if kind == "multiplex":
            child = {**child, "params": _with_child_dirs(own, logs, taken)}
        elif kind in WITH_FOLDER:
            folder, number = own.get("log_dir") or str(logs / kind), 1
            while not own.get("log_dir") and folder in taken:  # two of a kind: jsonl, jsonl_2
                number += 1
                folder = f"{logs / kind}_{number}"
            taken.add(folder)
            child = {**child, "params": {**own, "log_dir": folder}}
        stores.append(child)
    return {**params, "stores": stores}


def _require_folder(kind: str, log_dir: str | None) -> None:
    if not log_dir:
        raise EvsysError(
            f"log store {kind!r} needs log_dir: a run fills it in with <run_dir>/logs; "
            "outside a run give it yourself, e.g. log_dir: ./logs"
        )


@register_log_store("jsonl")
class JsonlLogStore:
    """metrics.jsonl (a line per call), hparams.json and artifacts.jsonl in `log_dir`."""

    class Config(Params):
        log_dir: str | None = None
        """Filled in by the run when absent."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        _require_folder("jsonl", self.cfg.log_dir)
        self._lock = threading.Lock()
        self._files: dict[str, LineFile] = {}
        self._hparams: dict[str, object] = {}
        self._order, self._writing = StepOrder(), threading.Lock()
        self._closed = False

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.log_metrics({name: value}, step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        refuse_non_numbers(metrics, step)
        record = {"step": step, "ts": time.time(), **metrics}
        record["step"] = step  # the call's step is the step, whatever a metric of that name says
        scores = [name for name in metrics if name.startswith(SCORES)]
        # One lock around both: the n-th note of the order must be about the n-th line of the file.
        with self._writing:
            self._order.note(step, min(scores, default=""))
            self._append("metrics.jsonl", record)

    def log_hyperparams(self, hparams: dict[str, object]) -> None:
        with self._lock:
            path = self._path("hparams.json")
            self._hparams |= hparams
            try:
                write_json(path, self._hparams)
            except OSError as exc:
                raise EvsysError(f"cannot write to {path}: {exc.strerror or exc}") from exc

    def log_artifact(self, name: str, path: str) -> None:
        self._append("artifacts.jsonl", {"name": name, "path": str(path), "ts": time.time()})

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for file in self._files.values():
                file.close()
            if metrics := self._files.pop("metrics.jsonl", None):
                self._order.settle(metrics.path)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        file = self._files.get(name) or self._open(name)
        file.append(to_json(record))

    def _open(self, name: str) -> LineFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = LineFile(self._path(name))
            return self._files[name]

    def _path(self, name: str) -> Path:
        if self._closed:
            raise EvsysError(f"log store 'jsonl' in {self.cfg.log_dir} is closed; {name} takes no more")
        return Path(str(self.cfg.log_dir)) / name


@register_log_store("tensorboard")
class TensorBoardLogStore:
    """Event files that `tensorboard --logdir` shows. A kill may cost the last `FLUSH_SECONDS` of points."""

    FLUSH_SECONDS = 5
    requires: ClassVar = {"tensorboard": "tensorboard"}

    class Config(Params):
        log_dir: str | None = None
        """Filled in by the run when absent."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        _require_folder("tensorboard", self.cfg.log_dir)
        need("tensorboard", extra="tensorboard")
        self._lock = threading.Lock()
        self._writer: Any = None
        self._closed = False

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.log_metrics({name: value}, step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        refuse_non_numbers(metrics, step)
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._add(values, step)

    def log_hyperparams(self, hparams: dict[str, object]) -> None:
        # Four spaces make a code block of it in TensorBoard's Markdown.
        text = "\n".join(f"    {line}" for line in to_json(hparams, indent=2).splitlines())
        self._add([_text_summary("hparams", text)], step=0)

    def log_artifact(self, name: str, path: str) -> None:
        self._add([_text_summary(f"artifacts/{name}", str(path))], step=0)

    def log_text(self, name: str, text: str) -> None:
        """A text under a separate name, beside the numbers."""
        self._add([_text_summary(name, text)], step=0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            writer, self._writer = self._writer, None
        if writer is not None:
            with error_boundary(EvsysError, f"writing TensorBoard events to {self.cfg.log_dir}"):
                writer.close()

    def _add(self, values: list[object], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        with self._lock:
            if self._closed:
                raise EvsysError(f"log store 'tensorboard' in {self.cfg.log_dir} is closed")
            with error_boundary(EvsysError, f"writing TensorBoard events to {self.cfg.log_dir}"):
                self._writer = self._writer or self._open()
                self._writer.add_event(event)

    def _open(self) -> object:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(str(self.cfg.log_dir), max_queue_size=1000, flush_secs=self.FLUSH_SECONDS)


def _text_summary(tag: str, text: str) -> object:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "backslashreplace")])
    tensor.tensor_shape.dim.add().size = 1
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


class Child(Params):
    """One store of a multiplex."""

    kind: str
    params: dict[str, object] = Field(default_factory=dict)


@register_log_store("multiplex")
class MultiplexLogStore:
    """Every call goes to every child. A child that fails is reported once and left out; the last one raises."""

    class Config(Params):
        stores: list[Child] = Field(min_length=1)
        """Log stores that all get everything."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self._stores = [registry.log_stores.build(child.kind, child.params) for child in self.cfg.stores]
        self._lost: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closed = False

    def log_scalar(self, name: str, value: float, step: int) -> None:
        refuse_non_numbers({name: value}, step)  # the caller's mistake is not a child's failure
        self._each(lambda store: store.log_scalar(name, value, step))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        refuse_non_numbers(metrics, step)
        self._each(lambda store: store.log_metrics(metrics, step))

    def log_hyperparams(self, hparams: dict[str, object]) -> None:
        self._each(lambda store: store.log_hyperparams(hparams))

    def log_artifact(self, name: str, path: str) -> None:
        self._each(lambda store: store.log_artifact(name, path))

    def close(self) -> None:
        self._closed = True
        for index in range(len(self._stores)):
            self._ask(index, lambda store: store.close())

    def _each(self, act: Callable[[LogStore], None]) -> None:
        if self._closed:
            raise EvsysError("log store 'multiplex' is closed")
        for index in range(len(self._stores)):
            if index not in self._lost:
                self._ask(index, act)
        if len(self._lost) == len(self._stores):
            raise EvsysError("no store of the multiplex is left: " + "; ".join(self._lost.values()))

    def _ask(self, index: int, act: Callable[[LogStore], None]) -> None:
        try:
            act(self._stores[index])
        except Cancelled:
            raise
        except Exception as exc:
            child = self.cfg.stores[index]
            place = f" in {child.params['log_dir']}" if child.params.get("log_dir") else ""
            text = f"{child.kind}{place}: {type(exc).__name__}: {exc}"
            with self._lock:
                # `setdefault` returns our own object to the one thread whose text went in: that thread reports it.
                known = self._lost.setdefault(index, text) is not text
            if not known:
                get_logger(__name__).error("left out from here on: log store %s", text)
