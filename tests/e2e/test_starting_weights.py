"""The score before training is that of the weights that a run starts from."""

from __future__ import annotations

import json


def test_a_run_that_starts_from_a_checkpoint_is_compared_with_it(project, minimal_run):
    project.write_tasks()
    bench = {"name": "v", "path": "bench", "split": "val", "temperature": 0, "baseline": True}
    metadata = {"success_metric": "pass@1", "benchmark": [bench]}
    first = minimal_run(algorithm={"kind": "sft", "params": {"learning_rate": 0.01, "num_epochs": 30}})
    del first["eval"]
    project.evsys("run", project.config(output_dir="./first", run=first, metadata=metadata), check=True)
    record = json.loads((project.root / "first/hello_sft.experiment_result.json").read_text())
    [run] = record["runs"]
    base, trained = run["evals"]
    assert (base["step"], base["start"]) == (0, "") and base["scores"][0]["value"] < trained["scores"][0]["value"]
    path = run["artifacts"]["final_checkpoint"]
    again = {**first, "name": "again", "algorithm": {"kind": "sft", "params": {"learning_rate": 1e-9, "max_steps": 1}}}
    again["model"] = {**first["model"], "load_checkpoint_path": path}
    done = project.evsys("run", project.config(output_dir="./second", run=again, metadata=metadata), check=True)
    record = json.loads((project.root / "second/hello_sft.experiment_result.json").read_text())
    before, after = record["runs"][0]["evals"]
    assert (before["step"], before["start"]) == (0, path)
    assert before["scores"][0]["value"] == after["scores"][0]["value"] == trained["scores"][0]["value"]
    assert "(its starting weights " in done.stdout and "untrained" not in done.stdout
    assert record["verdict"]["arms"][0]["vs_untrained"]["difference"] == 0.0
    shown = project.evsys("show", project.root / "second/hello_sft.experiment_result.json", check=True).stdout
    assert f"before training ({path}): val/v/pass@1 " in shown and "untrained" not in shown
    assert "| its starting weights |" in (project.root / "second/hello_sft.experiment.md").read_text()
