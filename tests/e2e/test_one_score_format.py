"""A score is written the same way wherever it is read: run lines, verdict, page, table, show, compare, context."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
import yaml

from evsys_sdk.cli.main import main
from evsys_sdk.cli.summary import print_summary
from evsys_sdk.experiment.experiment import Experiment

WORDS = [f"{first}{second}" for first in ("ba", "de", "fi", "go", "ku", "la") for second in "bdfgl"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


FINAL: dict[str, dict[str, object]] = {"params": {}, "entry": {}}
BEST: dict[str, dict[str, object]] = {
    # The lowest score, so that the step that is chosen is not the last one that was scored.
    "params": {"best_by": "val/words/pass@1", "best_mode": "min"},
    "entry": {"run_every": 3},
}


@pytest.fixture(params=[FINAL, BEST], ids=["final", "best_by"])
def texts(request, project, monkeypatch, capsys):
    """Place -> its text for people, of one sweep of two arms, which learn 11 and 22 of 30 words; and the record. Once
    with the weights of the last step, and once with those that `best_by` chose before."""
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"prompt": f"say {word}", "completion": word} for word in WORDS]
    project.write_rows("data/few.jsonl", rows[:11])
    project.write_rows("data/more.jsonl", rows[:22])
    verifier = {"kind": "in_process", "fn_name": "exact_match"}
    tasks = [{"task_id": w, "instruction": f"say {w}", "verifier": {**verifier, "expected": w}} for w in WORDS]
    project.write_rows("bench/tasks.jsonl", tasks)
    params = {"learning_rate": 0.01, "max_steps": 25, "batch_size": 8, **request.param["params"]}
    runs = [
        {
            "name": name,
            "data": {"path": f"data/{name}.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "table"},
            "algorithm": {"kind": "sft", "params": params},
            "backend": {"kind": "mock"},
        }
        for name in ("few", "more")
    ]
    entry = {"name": "words", "path": "bench", "split": "val", "temperature": 0, "max_tokens": 8}
    entry["metrics"] = ["pass@1", "tokens"]
    entry |= request.param["entry"]
    settings = {
        "version": 1, "name": "sweep", "output_dir": "out", "leakage": "off", "runs": runs,
        "callbacks": [{"kind": "local_logger"}],
        "metadata": {"success_metric": "val.pass@1", "benchmark": [entry]},
    }  # fmt: skip
    path = project.root / "sweep.yaml"
    path.write_text(yaml.safe_dump(settings))
    result = Experiment.from_yaml(path).run()
    found = {"conclusion": result.conclusion.text}
    capsys.readouterr()
    print_summary(result)
    found["run lines"] = capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal := Terminal())
        print_summary(result)
    found["table of arms"] = terminal.getvalue()
    commands = {
        "show": ["show", "sweep"],
        "history": ["history"],
        "context": ["context"],
        "compare": ["compare", "sweep:few", "sweep:more"],
        "rollouts": ["rollouts", "sweep", "--json", "--limit", "100"],
    }
    for name, words in commands.items():
        assert main(words) == 0
        found[name] = capsys.readouterr().out
    found["page"] = (project.root / "out" / "sweep.experiment.md").read_text()
    for run in result.runs:
        found[f"conclusion of {run.name}"] = (run.run_dir / "logs" / "conclusion.md").read_text()
    record = json.loads((project.root / "out" / "sweep.experiment_result.json").read_text())
    return {place: re.sub(r"\x1b\[[0-9;]*m", "", text) for place, text in found.items()}, record


def test_the_same_number_has_one_format_and_one_interval_everywhere(texts):
    told, record = texts
    few, more = record["verdict"]["arms"]
    chosen = [run["chosen_steps"] for run in record["runs"]]
    if chosen == [{}, {}]:
        assert (few["mean"], more["mean"]) == (pytest.approx(11 / 30), pytest.approx(22 / 30))
    else:  # some words are not learnt by then
        assert chosen == [{"": 3}, {"": 3}] and few["mean"] < 11 / 30 and more["mean"] < 22 / 30
    assert [run["metrics"]["val/words/pass@1"] for run in record["runs"]] == [few["mean"], more["mean"]]
    for run in record["runs"]:
        not_kept = {f"{one['scores'][0]['value']:.3f}" for one in run["evals"] if one["step"] not in (None, 3)}
        for place, text in told.items():
            assert not not_kept & set(re.findall(r"(?<![\d.])\d\.\d{3}(?!\d)", text)), place
    rollouts = json.loads(told.pop("rollouts"))["rollouts"]
    for arm in (few, more):
        rewards = [one["reward"] for one in rollouts if one["arm"] == arm["arm"]]
        assert len(rewards) == 30 and sum(rewards) / 30 == pytest.approx(arm["mean"])
    both = ("conclusion", "run lines", "table of arms", "show", "compare", "page")
    places = {"few": [*both, "conclusion of few"], "more": [*both, "conclusion of more"]}
    for arm in (few, more):
        mean, low, high = (f"{arm[key]:.3f}" for key in ("mean", "low", "high"))
        for place in places[arm["arm"]]:
            assert f"{mean} [{low}, {high}]" in told[place], place
        for place, text in told.items():
            assert set(re.findall(rf"(?<![\d.]){mean} \[([^\]]*)\]", text)) <= {f"{low}, {high}"}, place
            near = {
                number for number in re.findall(r"(?<![\d.])\d\.\d+", text) if abs(float(number) - arm["mean"]) < 5e-4
            }
            assert near <= {mean}, place
            assert f"{100 * arm['mean']:.1f} %" not in text, place
    assert all(f"{more['mean']:.3f}" in told[place] for place in ("history", "context"))
    for place in ("conclusion", "run lines", "compare"):
        assert "], 30 tasks, 1 seed" in told[place], place
    for place in ("run lines", "show", "compare", "page", "conclusion of few"):  # every prompt and answer is as long
        assert "30 tokens" in told[place] and "30.000" not in told[place], place
