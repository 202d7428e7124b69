"""Every example is run as its README says: the quick ones here, those on real weights in tests/slow, and here on mock.

A new example that is in neither list fails the first test.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.registry import agents, verifiers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QUICK = [("mock", "config.yaml"), ("two_tool_agent", "config.yaml")]
REAL_WEIGHTS = [
    ("quickstart", "config.yaml"),
    ("proof_rl", "config.yaml"),
    ("proof_sdft", "prepare.yaml"),
    ("proof_sdft", "two_stages.yaml"),
]
"""Minutes each; tests/slow runs them whole. The order is that of their READMEs."""


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The examples in a folder of their own, as in a clone; what they register is forgotten afterwards."""
    for registry in (verifiers, agents):
        registry.names()
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("two_tool_agent", None)


def test_every_example_is_run_by_a_test():
    configs = {(path.parent.name, path.name) for path in EXAMPLES.rglob("*.yaml")}
    assert configs == {*QUICK, *REAL_WEIGHTS}
    slow = (ROOT / "tests/slow/test_proofs.py").read_text()
    for example, name in REAL_WEIGHTS:
        call = f'run("{example}")' if name == "config.yaml" else f'run("{example}", "{name}")'
        assert call in slow, f"tests/slow does not run {example}/{name}"
    for example, name in configs:
        readme = (EXAMPLES / example / "README.md").read_text()
        assert f"examples/{example}/{name}" in readme or "make quickstart" in readme, (
            f"{example}/README.md: how to run it"
        )


@pytest.mark.parametrize(("example", "name"), QUICK, ids=[example for example, _ in QUICK])
def test_a_quick_example_runs_whole(copied, example, name):
    if example == "two_tool_agent":
        pytest.importorskip("harbor", reason="needs the extra harbor")
    result = Experiment.from_yaml(f"examples/{example}/{name}").run()
    assert result.completed and not result.unread_settings, [run.error for run in result.runs]
    assert all(found.error is None for run in result.runs for found in run.evals)


def test_the_examples_on_real_weights_run_on_mock_in_the_order_of_their_readmes(copied):
    for example, name in REAL_WEIGHTS:
        path = copied / "examples" / example / name
        path.write_text(
            path.read_text().replace("kind: local }", "kind: mock }").replace("max_steps: 1", "max_steps: ")
        )
        assert "kind: mock }" in path.read_text()
        result = Experiment.from_yaml(f"examples/{example}/{name}").run()
        assert result.completed, [(run.run_id, run.error) for run in result.runs]
        assert all(found.error is None for run in result.runs for found in run.evals)
    start = json.loads((copied / ".evsys/outputs/proof_sdft/prepare/follow/run_result.json").read_text())
    weights = Path(start["artifacts"]["final_checkpoint"]).name
    journal = (copied / ".evsys/outputs/proof_sdft/two_stages/proof_sdft.journal.sqlite").read_bytes()
    assert weights.encode() in journal, "the arms start from what the first stage wrote"
