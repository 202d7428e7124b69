"""What every algorithm promises, and that a plain class is enough; the same for the kinds that nothing runs yet."""

from __future__ import annotations

import pytest

from evsys_sdk import ExperimentConfig, RunResult, registry
from evsys_sdk.experiment.experiment import Experiment

ROWS = [
    {"messages": [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w}]} for w in ("a", "b")
]


@pytest.fixture
def forget_afterwards():
    """Extensions that a test registers do not outlive it."""
    registry.load_all()
    before = {kind: dict(found.entries) for kind, found in registry.REGISTRIES.items()}
    yield
    for kind, entries in before.items():
        registry.REGISTRIES[kind].entries.clear()
        registry.REGISTRIES[kind].entries.update(entries)


def _run(tmp_path, algorithm, backend="mock"):
    config = ExperimentConfig.model_validate(
        {
            "name": "contract",
            "output_dir": str(tmp_path),
            "run": {
                "name": "r",
                "data": {"source_kind": "in_memory", "rows": ROWS},
                "model": {"name": "m"},
                "algorithm": algorithm,
                "backend": {"kind": backend},
            },
        }
    )
    return Experiment(config).run().runs[0]


def test_a_plain_class_is_an_algorithm_and_gets_what_the_reference_promises(tmp_path, forget_afterwards):
    seen = {}

    @registry.register_algorithm("plain")
    class Plain:
        def train(self, ctx):
            seen.update(ctx.extras, run_id=ctx.run_id, config=ctx.config, output_dir=ctx.output_dir, seed=ctx.seed)
            ctx.log_store.log_scalar("loss", 1.0, 1)
            return RunResult(run_id=ctx.run_id, status="completed", metrics={"x": 1.0}, artifacts={"a": "b"})

    result = _run(tmp_path, {"kind": "plain"})
    assert result.status == "completed" and result.metrics == {"x": 1.0} and result.artifacts == {"a": "b"}
    assert seen["train_rows"] == ROWS and seen["n_train_rows"] == 2 and seen["model_name"] == "m" and seen["tags"] == []
    assert seen["backend_handles"]["service"] and seen["config"].name == "contract" and seen["seed"] == 42


@pytest.mark.parametrize(
    ("returned", "message"), [(None, "must return a RunResult, not NoneType"), ({"status": "completed"}, "not dict")]
)
def test_an_algorithm_that_returns_something_else_fails_its_run_by_name(tmp_path, forget_afterwards, returned, message):
    @registry.register_algorithm("odd")
    class Odd:
        def train(self, ctx):
            return returned

    result = _run(tmp_path, {"kind": "odd"})
    assert result.status == "failed" and message in result.error


def test_a_plain_class_is_a_backend_even_without_a_training_service(tmp_path, forget_afterwards):
    calls = []

    @registry.register_backend("bare")
    class Bare:
        def prepare(self, *, model, run_dir):
            calls.append(("prepare", model.name, run_dir.name))
            return {"handle": 1}

        def teardown(self, handles):
            calls.append(("teardown", handles["handle"]))

    @registry.register_algorithm("asks")
    class Asks:
        def train(self, ctx):
            assert ctx.extras["backend_handles"] == {"handle": 1}
            raise RuntimeError("boom")

    result = _run(tmp_path, {"kind": "asks"}, backend="bare")
    assert result.status == "failed" and result.error == "RuntimeError: boom"
    assert calls == [("prepare", "m", "r"), ("teardown", 1)], "teardown comes whatever happens"
    refused = _run(tmp_path, {"kind": "sft"}, backend="bare")
    assert refused.status == "failed" and "offers no training service" in refused.error


@pytest.mark.parametrize(
    ("kind", "method"), [("deployer", "deploy"), ("agent", "run"), ("launcher", "launch")], ids=lambda x: x
)
def test_a_plain_class_registers_and_is_built_with_its_params(kind, method, forget_afterwards):
    class Plain:
        def __init__(self, target: str, n: int = 1):
            self.target, self.n = target, n

    setattr(Plain, method, lambda self, *args, **kwargs: (self.target, self.n, args))
    found = registry.registry_for(kind)
    found.register("plain")(Plain)
    built = found.build("plain", {"target": "t", "n": 2})
    assert getattr(built, method)("x") == ("t", 2, ("x",))
    assert "plain" in found.names() and found.schema("plain")["type"] == "object"
