"""Every example is run by its own `run.py`, and what its README claims must hold: the quick ones here, those on real
weights in tests/slow, and here on mock.

A new example that is in neither list fails the first test.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.registry import REGISTRIES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QUICK = {
    "03_data_ablation", "04_custom_transform", "05_custom_loss", "07_two_tool_agent", "09_continual", "10_sweep",
    "11_search", "12_gepa",
}  # fmt: skip
REAL_WEIGHTS = [
    ("02_quickstart", "config.yaml"),
    ("06_proof_rl", "config.yaml"),
    ("08_proof_sdft", "prepare.yaml"),
    ("08_proof_sdft", "two_stages.yaml"),
    ("13_tinker_server", "config.yaml"),
    ("14_deploy", "config.yaml"),
]
"""Minutes each; tests/slow runs them whole. The order is that of their READMEs."""
OWN_MODULES = ("two_tool_agent", "cover", "focal_sft", "scripted")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The examples in a folder of their own, as in a clone; what they register is forgotten afterwards."""
    for registry in REGISTRIES.values():
        registry.names()
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copytree(EXAMPLES, tmp_path / "examples", symlinks=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for module in OWN_MODULES:
        sys.modules.pop(module, None)


@pytest.fixture
def run(copied, capsys):
    """Run an example's own script; returns its record and the scores of its arms, and checks that nothing failed."""

    def run_script(example):
        runpy.run_path(str(copied / "examples" / example / "run.py"), run_name="__main__")
        said = capsys.readouterr().out
        (path,) = (copied / ".evsys/outputs").glob("*/*.experiment_result.json")
        record = json.loads(path.read_text())
        assert record["status"] == "completed" and record["conclusion"] in said
        for file in path.parent.glob("**/run_result.json"):
            result = json.loads(file.read_text())
            assert all(found["error"] is None for found in result["evals"]) and not result["unread_settings"]
        return record

    return run_script


def means(record):
    """Arm -> its mean of the success metric."""
    return {arm["arm"]: sum(arm["scores"]) / len(arm["scores"]) for arm in record["arms"] if arm["scores"]}


def test_every_example_is_numbered_explained_and_run_by_a_test():
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.is_symlink())
    assert {name for name in folders if not re.match(r"\d\d_", name)} == set()
    real = {example for example, _ in REAL_WEIGHTS}
    assert {*QUICK, *real, "01_minimal_loop"} == {name for name in folders if name[:2] < "15"}
    slow = (ROOT / "tests/slow/test_proofs.py").read_text()
    for example in {*real, "16_research_local"}:
        assert f'"{example}"' in slow, f"tests/slow does not run {example}"
    index = (EXAMPLES / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]", index, re.M) == folders, "examples/README.md lists them in order"
    for name in folders:
        assert (EXAMPLES / name / "run.py").is_file(), f"{name}: run.py"
        readme = (EXAMPLES / name / "README.md").read_text()
        assert "What it teaches:" in readme and "Seen" in readme, f"{name}/README.md: the result seen, the lesson"
        for config in (EXAMPLES / name).glob("*.yaml"):
            assert f"examples/{name}/{config.name}" in readme, f"{name}/README.md: how to run {config.name}"


def test_the_earlier_place_of_the_quickstart_still_leads_to_it():
    assert (EXAMPLES / "quickstart/config.yaml").samefile(EXAMPLES / "02_quickstart/config.yaml")
    assert "evsys run examples/02_quickstart/config.yaml" in (ROOT / "Makefile").read_text()


def test_the_minimal_loop_learns_and_stays_minimal(copied, capsys, monkeypatch):
    script = copied / "examples/01_minimal_loop/run.py"
    assert len(script.read_text().splitlines()) <= 150
    monkeypatch.setattr(sys, "argv", ["run.py", "mock"])
    runpy.run_path(str(script), run_name="__main__")
    shares = [float(share) for share in re.findall(r"trained: (\d\.\d+) of 48", capsys.readouterr().out)]
    assert len(shares) == 2 and shares[0] == 0 and shares[1] > 0.5


def test_rows_of_three_wordings_do_not_teach_more(run):
    record = run("03_data_ablation")
    assert record["hypothesis_result"]["outcome"] == "refuted"
    assert means(record)["one_wording"] > means(record)["three_wordings"]


def test_rows_that_cover_everything_beat_rows_by_chance(run):
    record = run("04_custom_transform")
    assert record["best_arm"] == "cover"
    assert means(record)["cover"] > 0.9 > means(record)["sample"]


def test_the_focal_loss_is_undecided_and_at_gamma_0_the_cross_entropy(run, copied):
    pytest.importorskip("torch", reason="the loss is written in torch")
    record = run("05_custom_loss")
    assert record["hypothesis_result"]["outcome"] == "inconclusive" and record["best_arm"] is None
    spread = max(record["arms"][0]["scores"]) - min(record["arms"][0]["scores"])
    assert spread > 0.1, "seeds differ by more than the arms do"
    path = copied / "examples/05_custom_loss/plain.yaml"
    text = (path.with_name("config.yaml")).read_text().replace("focal_sft, params", "sft, params")
    plain = re.sub(r"(?s)  hypothesis:.*?(?=  success)", "", text).replace(
        "algorithm.params.gamma: [0, 2]", "seed: [42]"
    )
    path.write_text(plain.replace("gamma{algorithm.params.gamma}", "plain").replace("custom_loss", "plain"))
    (one, *_) = Experiment.from_yaml(path).run().runs
    ours = json.loads((copied / ".evsys/outputs/custom_loss/gamma0__s42/run_result.json").read_text())
    assert one.metrics["val/tools/pass@1"] == ours["metrics"]["val/tools/pass@1"]


def test_the_harness_teaches_tool_use(run):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    (score,) = means(run("07_two_tool_agent")).values()
    assert score > 0.9


def test_a_stage_that_rehearses_keeps_the_first_skill(run):
    record = run("09_continual")
    assert record["hypothesis_result"]["outcome"] == "supported" and record["best_arm"] == "rehearsed"


def test_the_sweep_names_the_larger_rate(run):
    assert run("10_sweep")["best_arm"] == "lr0p001"


def test_the_search_prunes_by_thirds(run):
    pytest.importorskip("optuna", reason="needs the extra search")
    record = run("11_search")
    trials = record["search"]["trials"]
    statuses = [trial["statuses"] for trial in trials]
    assert len(statuses) == 9 and statuses.count(["pruned"]) == 8
    assert max(trial["value"] for trial in trials) > 0.7


def test_the_prompt_found_solves_what_the_seed_prompt_does_not(run, copied):
    pytest.importorskip("gepa", reason="needs the extra gepa")
    record = run("12_gepa")
    assert record["hypothesis_result"]["outcome"] == "supported" and means(record) == {"prompt": 1.0}
    found = json.loads((copied / ".evsys/outputs/gepa/prompt/run_result.json").read_text())
    assert "name alone" in found["notes"]["prompt"] and "capital letters" in found["notes"]["prompt"]
    assert found["metrics"]["metric_calls"] <= 200


def test_the_research_keeps_what_it_proves_and_scores_it_on_fresh_seeds(copied, capsys):
    path = copied / "examples/15_research/config.yaml"
    path.write_text(path.read_text().replace("trials: 5", "trials: 3"))
    runpy.run_path(str(path.with_name("run.py")), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"kept  trial 2: val.pass@1 0\.\d+ \(selected\), algorithm.params.learning_rate", said), said
    assert re.search(r"to the config's own run: better$", said, re.M), said
    final = copied / ".evsys/outputs/research/routing.research/routing-final-002"
    scored = [found for found in final.parent.glob("*/*/run_result.json") if '"test/tools/pass@1"' in found.read_text()]
    assert {found.parents[1] for found in scored} == {final}, "the final alone scores the test tasks"


def test_the_examples_on_real_weights_run_on_mock_in_the_order_of_their_readmes(copied):
    for example, name in REAL_WEIGHTS:
        path = copied / "examples" / example / name
        text = re.sub(r"backend: \{ kind: (local|tinker).*", "backend: { kind: mock }", path.read_text())
        text = re.sub(r"(?s)\ndeploy:.*", "\n", text)
        path.write_text(re.sub(r"max_steps: 1(\d)", r"max_steps: \1", text))
        assert "kind: mock }" in path.read_text()
        result = Experiment.from_yaml(f"examples/{example}/{name}").run()
        assert result.completed, [(run.run_id, run.error) for run in result.runs]
        assert all(found.error is None for run in result.runs for found in run.evals)
    start = json.loads((copied / ".evsys/outputs/proof_sdft/prepare/follow/run_result.json").read_text())
    weights = Path(start["artifacts"]["final_checkpoint"]).name
    journal = (copied / ".evsys/outputs/proof_sdft/two_stages/proof_sdft.journal.sqlite").read_bytes()
    assert weights.encode() in journal, "the arms start from what the first stage wrote"


def test_the_scripts_of_the_examples_on_real_weights_load():
    """They run in tests/slow; here their imports and names are checked."""
    for example in {"01_minimal_loop", "16_research_local", *(name for name, _ in REAL_WEIGHTS)}:
        spec = importlib.util.spec_from_file_location("run", EXAMPLES / example / "run.py")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
