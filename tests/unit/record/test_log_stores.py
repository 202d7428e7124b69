from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk import registry
from evsys_sdk.errors import ConfigError, EvsysError
from evsys_sdk.record.log_stores import JsonlLogStore, MultiplexLogStore, TensorBoardLogStore, with_log_dir


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_call_is_a_line_with_step_time_and_metrics(tmp_path: Path) -> None:
    store = JsonlLogStore(log_dir=str(tmp_path / "logs"))
    before = time.time()
    store.log_metrics({"loss": 0.5, "lr": 1e-4}, 1)
    store.log_scalar("loss", 0.25, 2)
    first, second = read(tmp_path / "logs" / "metrics.jsonl")
    assert before <= first.pop("ts") <= second.pop("ts") <= time.time()
    assert (first, second) == ({"step": 1, "loss": 0.5, "lr": 1e-4}, {"step": 2, "loss": 0.25})


def test_a_metric_called_step_does_not_move_the_line_to_another_step(tmp_path: Path) -> None:
    store = JsonlLogStore(log_dir=str(tmp_path))
    store.log_metrics({"step": 99.0, "loss": 1.0}, 3)
    assert read(tmp_path / "metrics.jsonl")[0]["step"] == 3


def test_nan_and_infinities_are_standard_json_strings(tmp_path: Path) -> None:
    store = JsonlLogStore(log_dir=str(tmp_path))
    store.log_metrics({"a": float("nan"), "b": float("inf"), "c": float("-inf")}, 1)
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (line["a"], line["b"], line["c"]) == ("NaN", "Infinity", "-Infinity")


def test_hyperparams_of_several_calls_add_up(tmp_path: Path) -> None:
    store = JsonlLogStore(log_dir=str(tmp_path))
    store.log_hyperparams({"lr": 1, "rank": 8})
    store.log_hyperparams({"lr": 2})
    assert json.loads((tmp_path / "hparams.json").read_text()) == {"lr": 2, "rank": 8}


def test_artifacts_are_listed_with_their_paths(tmp_path: Path) -> None:
    store = JsonlLogStore(log_dir=str(tmp_path))
    store.log_artifact("final_checkpoint", "s3://bucket/x")
    line = read(tmp_path / "artifacts.jsonl")[0]
    assert (line["name"], line["path"]) == ("final_checkpoint", "s3://bucket/x")


def test_threads_may_log_at_once(tmp_path: Path) -> None:
    store = JsonlLogStore(log_dir=str(tmp_path))
    threads = [
        threading.Thread(target=lambda t=t: [store.log_metrics({f"m{t}": 1.0}, s) for s in range(100)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(tmp_path / "metrics.jsonl")) == 400


@pytest.mark.parametrize("name", ["metrics.jsonl", "artifacts.jsonl"])
def test_a_full_disk_is_told_with_the_path(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    store = JsonlLogStore(log_dir=str(tmp_path))
    with pytest.raises(EvsysError, match=rf"{name}: No space left"):
        store.log_metrics({"loss": 1.0}, 1) if name == "metrics.jsonl" else store.log_artifact("a", "b")


def test_hparams_that_cannot_be_written_are_told_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "hparams.json").mkdir()
    with pytest.raises(EvsysError, match=r"cannot write to .*hparams\.json"):
        JsonlLogStore(log_dir=str(tmp_path)).log_hyperparams({"a": 1})


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard", "multiplex"])
def test_a_closed_store_refuses_every_call(tmp_path: Path, kind: str) -> None:
    params = {"stores": [{"kind": "jsonl"}]} if kind == "multiplex" else {}
    store = registry.log_stores.build(kind, with_log_dir(kind, params, tmp_path))
    store.log_metrics({"loss": 1.0}, 1)
    store.close()
    store.close()
    for call in (
        lambda: store.log_scalar("loss", 1.0, 1),
        lambda: store.log_metrics({"loss": 1.0}, 1),
        lambda: store.log_hyperparams({"a": 1}),
        lambda: store.log_artifact("a", "b"),
    ):
        with pytest.raises(EvsysError, match="closed"):
            call()


@pytest.mark.parametrize("cls", [JsonlLogStore, TensorBoardLogStore])
def test_a_store_without_a_folder_says_who_fills_it_in(cls: Any) -> None:
    cls.Config()  # validation alone is content: the run knows the folder
    with pytest.raises(EvsysError, match=r"needs log_dir: a run fills it in"):
        cls()


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_back_scalars_and_texts(tmp_path: Path) -> None:
    store = TensorBoardLogStore(log_dir=str(tmp_path))
    store.log_hyperparams({"lr": 0.001})
    store.log_metrics({"loss": 0.5, "val/x/pass@1": 0.25}, 1)
    store.log_scalar("loss", float("nan"), 2)
    store.log_artifact("final", "/weights")
    store.close()
    events = events_of(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("val/x/pass@1")] == [(1, 0.25)]
    assert str([e.value for e in events.Scalars("loss")]) == "[0.5, nan]"
    assert b'"lr": 0.001' in events.Tensors("hparams")[0].tensor_proto.string_val[0]
    assert events.Tensors("artifacts/final")[0].tensor_proto.string_val == [b"/weights"]
    assert set(events.PluginTagToContent("text")) == {"hparams", "artifacts/final"}


def test_tensorboard_refuses_a_metric_that_is_no_number(tmp_path: Path) -> None:
    store = TensorBoardLogStore(log_dir=str(tmp_path))
    with pytest.raises(EvsysError, match=r"'note' of step 1 is 'good', not a number"):
        store.log_metrics({"note": "good"}, 1)  # type: ignore[dict-item]


def test_tensorboard_names_a_folder_it_cannot_write_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TensorBoardLogStore(log_dir=str(tmp_path / "file"))
    with pytest.raises(EvsysError, match=rf"{tmp_path}/file"):
        store.log_metrics({"loss": 1.0}, 1)


def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = f"""
import sys
from evsys_sdk.record.log_stores import TensorBoardLogStore
assert "tensorboard" not in sys.modules and "numpy" not in sys.modules
store = TensorBoardLogStore(log_dir={str(tmp_path)!r})
store.log_metrics({{"loss": 1.0}}, 1)
store.close()
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def multiplex(*stores: dict[str, Any]) -> MultiplexLogStore:
    return MultiplexLogStore(stores=list(stores))


def test_multiplex_brings_every_call_to_every_child(tmp_path: Path) -> None:
    spec = {"stores": [{"kind": "jsonl"}, {"kind": "tensorboard"}]}
    store = MultiplexLogStore(**with_log_dir("multiplex", spec, tmp_path))
    store.log_metrics({"loss": 0.5}, 7)
    store.log_hyperparams({"lr": 1})
    store.log_artifact("a", "b")
    store.close()
    logs = tmp_path / "logs"
    assert read(logs / "jsonl" / "metrics.jsonl")[0]["loss"] == 0.5
    assert json.loads((logs / "jsonl" / "hparams.json").read_text()) == {"lr": 1}
    assert [e.step for e in events_of(logs / "tensorboard").Scalars("loss")] == [7]


def test_a_failing_child_is_reported_once_and_the_others_go_on(
    tmp_path: Path, log_lines: list[logging.LogRecord]
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "metrics.jsonl").symlink_to("/dev/full")
    bad, good = ({"kind": "jsonl", "params": {"log_dir": str(tmp_path / name)}} for name in ("bad", "good"))
    store = multiplex(bad, good)
    for step in range(3):
        store.log_metrics({"loss": 1.0}, step)
    store.close()
    assert len(read(tmp_path / "good" / "metrics.jsonl")) == 3
    assert [r.getMessage() for r in log_lines if "left out" in r.getMessage()] == [
        f"left out from here on: log store jsonl in {tmp_path}/bad: EvsysError: "
        f"cannot write to {tmp_path}/bad/metrics.jsonl: No space left on device"
    ]


def test_a_lost_child_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Fragile(JsonlLogStore):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            calls.append(step)
            raise OSError("gone")

    monkeypatch.setitem(
        registry.log_stores.entries, "fragile", registry.Registration(name="fragile", target=Fragile, origin="")
    )
    fragile = {"kind": "fragile", "params": {"log_dir": str(tmp_path)}}
    store = multiplex(fragile, {"kind": "jsonl", "params": {"log_dir": str(tmp_path / "good")}})
    for step in (1, 2, 3):
        store.log_metrics({"loss": 1.0}, step)
    assert calls == [1]


def test_when_the_last_child_is_lost_the_multiplex_raises(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    store = multiplex({"kind": "jsonl", "params": {"log_dir": str(tmp_path)}})
    for _ in range(2):
        with pytest.raises(EvsysError, match=r"no store of the multiplex is left.*No space left"):
            store.log_metrics({"loss": 1.0}, 1)


def test_a_wrong_child_is_refused_with_the_nearest_word(tmp_path: Path) -> None:
    with pytest.raises(EvsysError, match="closest: jsonl"):
        multiplex({"kind": "jsonnl"})
    with pytest.raises(ConfigError, match=r"log_dri.*closest: log_dir"):
        multiplex({"kind": "jsonl", "params": {"log_dri": "x"}})


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("jsonl", {}, {"log_dir": "/run/logs"}),
        ("tensorboard", {"log_dir": None}, {"log_dir": "/run/logs"}),
        ("jsonl", {"log_dir": "/mine"}, {"log_dir": "/mine"}),
        ("my_store", {"url": "x"}, {"url": "x"}),
    ],
)
def test_a_missing_log_dir_becomes_the_runs(kind: str, params: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_log_dir(kind, params, "/run") == expected


def test_children_of_a_multiplex_get_folders_of_their_own() -> None:
    nested = {"kind": "multiplex", "params": {"stores": [{"kind": "jsonl", "params": {}}]}}
    given = [
        {"kind": "jsonl", "params": {"log_dir": "/run/logs/jsonl"}},
        {"kind": "jsonl"},
        {"kind": "tensorboard", "params": {}},
        {"kind": "my_store", "params": {"url": "x"}},
        nested,
    ]
    params = {"stores": given}
    filled = with_log_dir("multiplex", params, "/run")["stores"]
    assert [child["params"].get("log_dir") for child in filled] == [
        "/run/logs/jsonl",
        "/run/logs/jsonl_2",
        "/run/logs/tensorboard",
        None,
        None,
    ]
    assert filled[4]["params"]["stores"][0]["params"] == {"log_dir": "/run/logs/jsonl_3"}
    assert given[1] == {"kind": "jsonl"}, "the config itself is not changed"
