"""The README's first config, typed off: it is scored on tasks that it was not trained on, and says so if it were."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README[README.index("## A first config") :]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.M | re.S)


def test_the_first_config_runs_and_scores_what_it_was_not_trained_on(project):
    (project.root / "data/train.jsonl").unlink()
    subprocess.run(["bash", "-euc", blocks("bash")[0]], cwd=project.root, check=True)
    row, task = (json.loads(block) for block in blocks("json")[:2])
    assert row in [json.loads(line) for line in (project.root / "data/train.jsonl").read_text().splitlines()]
    assert task in [json.loads(line) for line in (project.root / "data/val/tasks.jsonl").read_text().splitlines()]
    (project.root / "config.yaml").write_text(blocks("yaml")[0])
    checked = project.evsys("validate", "config.yaml")
    assert checked.returncode == 0 and "warning" not in checked.stderr, checked.stderr
    done = project.evsys("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "val pass@1 = " in done.stdout and "training rows" not in done.stdout + done.stderr
    [trained] = [e for e in project.record()["evals"] if e["step"] is None]
    assert trained["scores"][0]["value"] > 0.3 and trained["on_training_rows"] is False


def test_a_score_on_training_rows_is_marked_in_the_run_line_the_record_and_the_conclusion(project):
    done = project.evsys("run", project.config(metadata={"success_metric": "exact_match"}), check=True)
    assert re.search(r"^  eval exact_match = .*, on training rows$", done.stdout, re.M)
    assert "Scored on training rows: eval/exact_match. It shows what was memorised" in done.stdout
    [found] = project.record()["evals"]
    assert found["on_training_rows"] is True
    whole = json.loads((project.root / "outputs/hello_sft.experiment_result.json").read_text())
    assert "Scored on training rows: eval/exact_match" in whole["conclusion"]
    again = project.evsys("run", project.root / "config.yaml", check=True)
    assert "Scored on training rows: eval/exact_match" in again.stdout, "told again from the journal"


def test_so_is_one_on_the_training_file_under_another_key_and_not_one_on_other_rows(project, minimal_run):
    project.write_rows("data/other.jsonl", [{"prompt": "say pink", "completion": "pink"}])
    data = minimal_run()["data"]
    same = project.config(run=minimal_run(eval__eval_data=data))
    assert "on training rows" in project.evsys("run", same, check=True).stdout
    other = project.config(run=minimal_run(eval__eval_data={**data, "path": "data/other.jsonl"}))
    assert "training rows" not in project.evsys("run", other, "--fresh", check=True).stdout


def test_so_is_a_benchmark_of_the_tasks_that_reinforcement_trains_on(project, minimal_run):
    project.write_tasks()
    run = minimal_run(algorithm={"kind": "rl", "params": {"max_steps": 1}}, data={"path": "bench/tasks.jsonl"})
    del run["eval"]
    path = project.config(run=run, metadata={"benchmark": {"path": "bench", "split": "val"}})
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stderr
    assert "on training rows" in done.stdout and "Scored on training rows: val/bench/pass@1" in done.stdout


def test_a_benchmark_that_copies_training_rows_is_marked_wherever_its_score_stands(project, minimal_run):
    words = ["red kite over the harbour", "green ladder by the mill", "seven boats in fog", "an old piano tuner"]
    rows = [{"prompt": f"Which tool handles the request about {w}?", "completion": "A"} for w in words]
    project.write_rows("data/train.jsonl", rows)
    tasks = [
        {
            "instruction": row["prompt"],
            "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": row["completion"]},
        }
        for row in rows
    ]
    project.write_rows("bench/tasks.jsonl", tasks)
    run = minimal_run()
    del run["eval"]
    entry = {"name": "v", "path": "bench", "split": "val"}
    path = project.config(run=run, metadata={"benchmark": [entry], "success_metric": "pass@1"}, n_repeats=2)
    done = project.evsys("run", path, check=True)
    assert len(re.findall(r"^  val/v pass@1 = .*, 4 tasks, on training rows", done.stdout, re.M)) == 2
    assert re.search(r"^r0: .*, 4 tasks, 2 seeds, on training rows", done.stdout, re.M)
    assert "warning: leakage" not in done.stdout and done.stdout.count("Leakage: 4 of 4 val/v tasks appear") == 1
    page = (project.root / "outputs/hello_sft.experiment.md").read_text()
    assert re.search(r"\| r0 \| completed \| 2 \| .*, on training rows \|", page)
    assert re.search(r"\| r0 \| [0-9.]+ \[[0-9.]+, [0-9.]+\], on training rows \|", page)
    shown = project.evsys("show", "hello_sft", check=True).stdout
    assert re.search(r"^  r0: .* pass@1 .*, on training rows", shown, re.M)
    assert "(on training rows)" in project.evsys("history", check=True).stdout
    context = project.evsys("context", check=True).stdout
    assert "; on training rows; first" in context and "(on training rows)" in context
