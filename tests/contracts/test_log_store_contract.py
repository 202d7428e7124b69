"""The log store contract, over every built-in and over a plain class that inherits nothing."""

from __future__ import annotations

import threading

import pytest

from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import LogStore
from evsys_sdk.record.log_stores import with_log_dir
from evsys_sdk.registry import list_log_stores, log_stores, register_log_store

BUILT_INS = [name for name in list_log_stores() if log_stores.entries[name].origin.startswith("evsys_sdk.")]
NEEDED = {"multiplex": {"stores": [{"kind": "jsonl"}, {"kind": "tensorboard"}]}}


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setattr(log_stores, "entries", dict(log_stores.entries))


@pytest.fixture(params=BUILT_INS)
def store(request, tmp_path):
    params = with_log_dir(request.param, NEEDED.get(request.param, {}), tmp_path)
    built = log_stores.build(request.param, params)
    yield built
    built.close()


def test_a_store_answers_the_published_calls_and_leaves_files_in_the_run(store, tmp_path):
    assert isinstance(store, LogStore)
    store.log_hyperparams({"lr": 1e-5, "tags": ["a"], "nested": {"b": None}})
    store.log_scalar("loss", 1.0, 1)
    store.log_metrics({"loss": float("nan"), "val/x/pass@1": float("inf")}, 2)
    store.log_artifact("final_checkpoint", "/somewhere")
    store.close()
    written = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert written and all(path.stat().st_size > 0 for path in written)


def test_a_store_takes_calls_from_several_threads(store):
    failures = []

    def log():
        try:
            for step in range(20):
                store.log_metrics({"loss": 1.0}, step)
        except Exception as exc:
            failures.append(exc)

    threads = [threading.Thread(target=log) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_closed_store_says_so_and_may_be_closed_again(store):
    store.close()
    store.close()
    with pytest.raises(EvsysError, match="closed"):
        store.log_scalar("loss", 1.0, 1)


def test_a_plain_class_without_a_base_is_a_store_and_a_child_of_multiplex():
    lines = []

    @register_log_store("my_list")
    class MyList:
        def __init__(self, prefix=""):
            self.prefix = prefix

        def log_scalar(self, name, value, step):
            lines.append((self.prefix + name, value, step))

        def log_metrics(self, metrics, step):
            for name, value in metrics.items():
                self.log_scalar(name, value, step)

        def log_hyperparams(self, hparams): ...
        def log_artifact(self, name, path): ...
        def close(self): ...

    spec = {"stores": [{"kind": "my_list"}, {"kind": "my_list", "params": {"prefix": "p/"}}]}
    store = log_stores.build("multiplex", with_log_dir("multiplex", spec, "/nowhere"))
    store.log_metrics({"loss": 1.0}, 3)
    assert lines == [("loss", 1.0, 3), ("p/loss", 1.0, 3)]
    assert isinstance(log_stores.build("my_list", {}), LogStore) and MyList.name == "my_list"
