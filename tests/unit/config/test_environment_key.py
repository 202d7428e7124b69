"""`environment: docker`: one key on a benchmark entry and on an algorithm that learns from rollouts."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.checks.preflight import validate_yaml
from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.errors import ConfigError
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.protocols import EnvironmentSpec
from evsys_sdk.rollout import requirements
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.run.evals import RunEvals

TASK = {"task_id": "t", "instruction": "?", "verifier": {"fn_name": "exact_match", "expected": "red"}}
CONFIG = """
name: x
metadata: {{benchmark: [{{name: b, path: b, environment: {benchmark}}}]}}
run:
  name: r0
  seed: 1
  model: {{name: toy}}
  data: {{source_kind: jsonl, path: b/tasks.jsonl}}
  algorithm: {{kind: rl, params: {{max_steps: 1, environment: {training}}}}}
  backend: {{kind: mock}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")

    def written(benchmark="sandbox", training="sandbox"):
        file = tmp_path / "config.yaml"
        file.write_text(CONFIG.format(benchmark=benchmark, training=training))
        return file

    requirements.kind_problem.cache_clear()
    yield written
    requirements.kind_problem.cache_clear()


def test_the_kind_alone_is_short_for_a_block():
    short, long = (BenchmarkEntry(name="b", environment=value) for value in ("docker", {"kind": "docker"}))
    assert short.environment.spec == long.environment.spec == EnvironmentSpec(kind="docker")
    with_params = BenchmarkEntry(name="b", environment={"kind": "docker", "params": {"keep_containers": True}})
    assert with_params.environment.spec.params == {"keep_containers": True}


def test_an_entry_is_scored_in_its_own_environment(config):
    checked = validate_yaml(config())
    scoring = RunEvals(config=checked, benchmarks=BenchmarkLoader(checked), engine=HarborRolloutEngine(), seed=0)
    docker = BenchmarkEntry(name="b", environment="docker", n_concurrent=2)
    engine = scoring._engine(docker, "b")
    assert (engine.settings.environment.kind, engine.concurrency) == ("docker", 2)
    assert scoring._engine(BenchmarkEntry(name="c"), "c").settings.environment.kind == "sandbox"


def test_an_environment_is_validated_where_it_stands(config):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    assert validate_yaml(config(), deep=True)
    with pytest.raises(ConfigError) as told:
        validate_yaml(config(benchmark="dokcer", training="modla"), deep=True)
    problems = {problem.path: problem.message for problem in told.value.problems}
    assert "closest: docker" in problems["metadata.benchmark[0].environment"]
    assert "closest: modal" in problems["run.algorithm.params.environment"]


def test_a_missing_engine_is_told_before_anything_is_spent(config, monkeypatch, tmp_path):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as told:
        validate_yaml(config(benchmark="docker"), deep=True)
    [problem] = told.value.problems
    assert problem.path == "metadata.benchmark[0].environment" and "Docker is not installed" in problem.message
