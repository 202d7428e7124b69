"""`gepa_prompt` from a YAML: scores before and after, the verdict, SIGKILL, validation, serving the prompt."""

from __future__ import annotations

import json
import signal

import pytest

from evsys_sdk.run.open_model import ModelRef, find_target, open_model

CITIES = {
    "France": "PARIS", "Italy": "ROME", "Peru": "LIMA", "Norway": "OSLO",
    "Japan": "TOKYO", "Egypt": "CAIRO", "Cuba": "HAVANA", "Iran": "TEHRAN",
}  # fmt: skip
GOOD = "Answer with the city alone, in capital letters."
CLIENTS = f"""
import json, os, time
from pathlib import Path
from evsys_sdk import register_inference
from evsys_sdk.inference.base import AskingClient, Completion

CITIES = {CITIES!r}

@register_inference("capitals")
class Capitals(AskingClient):
    async def _ask(self, question):
        with open("calls.txt", "a") as file:
            file.write(json.dumps(question.messages) + "\\n")
        system = next((m["content"] for m in question.messages if m["role"] == "system"), "")
        city = CITIES[question.messages[-1]["content"].removeprefix("Capital of ").removesuffix("?")]
        return Completion(text=city if "capital letters" in system else city.lower(), cost_usd=0.001)

@register_inference("reflector")
class Reflector(AskingClient):
    async def _ask(self, question):
        said = "{GOOD}" if "useless" in question.messages[-1]["content"] else "A useless prompt."
        return Completion(text="```\\n" + said + "\\n```", cost_usd=0.01)
"""


@pytest.fixture
def write(project):
    """Write the project and a config of it; returns the config's path."""
    (project.root / "clients.py").write_text(CLIENTS)
    rows = [{"inputs": {"q": f"Capital of {land}?"}, "expected": city} for land, city in list(CITIES.items())[:4]]
    project.write_rows("data/lands.jsonl", rows)
    tasks = [
        {
            "task_id": land,
            "instruction": f"Capital of {land}?",
            "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": city},
        }
        for land, city in list(CITIES.items())[4:]
    ]
    project.write_rows("lands/tasks.jsonl", tasks)

    def config(name="prompts.yaml", entry=None, params=None, **top):
        lands = {"name": "lands", "path": "lands", "split": "val", "baseline": True, "metrics": ["pass@1"]}
        return project.config(
            name=name,
            imports=["clients"],
            metadata={"benchmark": [lands | (entry or {})], "success_metric": "val.pass@1"},
            run={
                "name": "r0",
                "data": {"source_kind": "jsonl", "path": "data/lands.jsonl"},
                "model": {"name": "tiny-random"},
                "backend": {"kind": "mock"},
                "algorithm": {
                    "kind": "gepa_prompt",
                    "params": {
                        "max_metric_calls": 60,
                        "task_model": {"kind": "capitals"},
                        "reflection_model": {"kind": "reflector"},
                        "seed_prompt": "Be useless.",
                        **(params or {}),
                    },
                },
            },
            **top,
        )

    return config


def test_a_prompt_search_is_scored_before_and_after_and_judged(project, write):
    done = project.evsys("run", write())
    assert done.returncode == 0, done.stderr
    record = project.record()
    assert record["notes"]["prompt"] == GOOD
    scores = {(one["step"], one["scores"][0]["value"]) for one in record["evals"]}
    assert scores == {(0, 0.0), (None, 1.0)}, "the seed prompt before the search, the prompt found after it"
    assert "100.0 points above untrained" in done.stdout


def test_a_killed_search_resumes_with_the_same_decisions(project, write, record_tree):
    whole = project.evsys("run", write("whole.yaml", output_dir="./whole"), check=True)
    calls = project.root / "calls.txt"
    total = len(calls.read_text().splitlines())
    path = write("killed.yaml", output_dir="./killed")
    for lines in (1, total // 3, 2 * total // 3, total - 1):
        calls.write_text("")
        process = project.start("run", path, signal_at=(calls, lines, signal.SIGKILL))
        process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL)
    project.evsys("run", path, check=True)
    assert whole.returncode == 0
    one, other = project.record(output_dir="whole"), project.record(output_dir="killed")
    for key in ("metrics", "notes", "status"):
        assert one[key] == other[key], key


def test_a_prompt_that_quotes_a_test_task_is_named_as_leakage(project, write):
    task = "Capital of Atlantis, the sunken land beyond the pillars of Hercules where the sea is muddy and shallow now?"
    path = write()
    tasks = project.root / "lands/tasks.jsonl"
    row = json.loads(tasks.read_text().splitlines()[0]) | {"task_id": "quoted", "instruction": task}
    tasks.write_text(tasks.read_text() + json.dumps(row) + "\n")
    clients = project.root / "clients.py"
    text = clients.read_text().replace(GOOD, f"In capital letters. {task}")
    text = text.replace("CITIES[question", "CITIES.get(question")
    clients.write_text(text.replace('removesuffix("?")]', 'removesuffix("?"), "?")'))
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stderr
    warnings = [text for text in project.record()["warnings"] if text.startswith("leakage:")]
    assert warnings and "prompt" in warnings[0]


def test_validation_refuses_scores_during_the_search_and_asks_for_a_baseline(project, write):
    refused = project.evsys("validate", write(entry={"run_every": 2}))
    assert refused.returncode == 1
    assert "gepa_prompt has no weights to score during the search; remove run_every" in refused.stdout + refused.stderr
    warned = project.evsys("validate", write(entry={"baseline": False}))
    assert warned.returncode == 0
    assert "no benchmark scores the seed prompt" in warned.stdout + warned.stderr


def test_the_prompt_found_is_served_with_the_weights(project, write):
    params = {"task_model": None, "max_tokens": 8, "seed_prompt": GOOD}
    assert project.evsys("run", write(params=params)).returncode == 0
    target = find_target(ModelRef(text=str(project.root / "outputs/r0")))
    assert target.system_prompt == project.record()["notes"]["prompt"]
    with open_model(target) as opened:
        asked = opened.renderer().prompt([{"role": "user", "content": "hi"}])
        assert target.system_prompt in opened.service.get_tokenizer().decode(asked)
    hosted = project.evsys("run", write("hosted.yaml", output_dir="./hosted"))
    assert hosted.returncode == 0, hosted.stderr
    with pytest.raises(Exception, match="left no weights to sample from"):
        find_target(ModelRef(text=str(project.root / "hosted/r0")))
