"""`evsys research`: rounds are experiments, the verdict keeps, test scores stay out, and no kill changes a decision."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

WORDS = [f"{size}{colour}" for size in ("big", "small", "old") for colour in
         ("red", "green", "blue", "black", "white", "grey", "pink", "gold")]  # fmt: skip
IDEAS = [
    {"changes": {"algorithm.params.learning_rate": 0.01}, "claim": "A larger rate learns in time.", "confidence": 0.8},
    {"changes": {"algorithm.params.learning_rate": 1e-7}, "claim": "A smaller rate is better."},
    {"changes": {"algorithm.params.learning_rat": 1e-3}, "claim": "A misspelt one."},
    {"changes": {"seed": 7}, "claim": "A luckier seed."},
    {"changes": {"algorithm.params.learning_rate": 0.01}, "claim": "The incumbent once more."},
    {"changes": {"algorithm.params.learning_rate": 0.02}, "claim": "Twice as large."},
]


@pytest.fixture
def lab(project):
    """A project in which two thirds of the words can be learned."""
    known = WORDS[:16]
    project.write_rows("data/train.jsonl", [{"prompt": f"say {word}", "completion": word} for word in known] * 2)
    for split, asks, words in (
        ("val", "say", WORDS),
        ("test", "translate into Latin:", ["aqua", "luna", "sol", "via"]),
    ):
        tasks = [
            {
                "task_id": f"{split}-{word}",
                "instruction": f"{asks} {word}",
                "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": word},
            }
            for word in words
        ]
        project.write_rows(f"{split}/tasks.jsonl", tasks)
    return project


def entry(split: str, **more):
    return {"name": split, "path": split, "split": split, "temperature": 0, "max_tokens": 12, **more}


def config(lab, *, ideas=None, name="config.yaml", run=None, entries=None, **research):
    params = {"learning_rate": 1e-5, "max_steps": 6, "batch_size": 16}
    block = {
        "budget": {"trials": 10},
        "max_repeats": 2,
        "final_repeats": 2,
        "proposers": [{"kind": "scripted", "params": {"proposals": IDEAS if ideas is None else ideas}}],
        **research,
    }
    return lab.config(
        name=name,
        run={
            "name": "r0",
            "data": {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]},
            "model": {"name": "m"},
            "algorithm": {"kind": "sft", "params": params},
            "backend": {"kind": "mock"},
            **(run or {}),
        },
        metadata={"success_metric": "val.pass@1", "benchmark": entries or [entry("val"), entry("test")]},
        research=block,
        leakage="off",
    )


def research(lab, path, *words, code=0):
    done = lab.evsys("research", path, "--json", "--quiet", *words)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def words_of(report):
    return [trial["decision"] or trial["status"] for trial in report["trials"]]


def record(lab, name, experiment):
    folder = lab.root / "outputs" / f"{name}.research" / experiment
    return json.loads((folder / f"{experiment}.experiment_result.json").read_text())


def test_rounds_are_experiments_that_the_history_can_read(lab):
    report = research(lab, config(lab))
    assert words_of(report)[:5] == ["first", "kept", "discarded", "invalid", "invalid"]
    assert words_of(report)[5] == "duplicate"
    assert report["stopped_by"] == "no proposals"
    kept = record(lab, "hello_sft", report["trials"][1]["experiment"])
    assert kept["parent_experiment_id"] == "hello_sft-r000"
    assert kept["hypothesis"]["claim"] == IDEAS[0]["claim"]
    assert kept["hypothesis_result"]["outcome"] == "supported"
    assert [run["run_id"].split("/")[1].split("__")[0] for run in kept["runs"]] == ["incumbent"] * 2 + ["candidate"] * 2
    assert kept["runs"][0]["reused_from"] is not None
    later = record(lab, "hello_sft", report["trials"][2]["experiment"])
    assert later["parent_experiment_id"] == report["trials"][1]["experiment"]
    shown = lab.evsys("history", "--json", check=True).stdout
    names = {one["name"]: one for one in json.loads(shown)["experiments"]}
    assert IDEAS[1]["claim"] in names["hello_sft-r002"]["hypothesis"]
    assert "research:hello_sft" in names["hello_sft-r002"]["tags"]


def test_test_tasks_are_scored_in_the_final_experiment_alone(lab):
    report = research(lab, config(lab))
    folders = sorted(path for path in (lab.root / "outputs/hello_sft.research").iterdir() if path.is_dir())
    finals = [path for path in folders if "-final-" in path.name]
    assert len(finals) == 1 and len(folders) > 4
    for folder in folders:
        mentions = any("test/pass@1" in path.read_text() for path in folder.rglob("*.json*"))
        assert mentions == (folder in finals), folder
    journal = [json.loads(line) for line in (lab.root / "outputs/hello_sft.research/journal.jsonl").open()]
    rounds = [one for one in journal if one["key"].startswith(("trial", "measurement", "ask"))]
    assert "test/" not in json.dumps(rounds)
    assert report["final"]["candidate"]["n_seeds"] == 2


def test_the_same_command_again_does_nothing(lab):
    path = config(lab)
    first = research(lab, path)
    journal = lab.root / "outputs/hello_sft.research/journal.jsonl"
    before = journal.read_bytes()
    assert research(lab, path) == first
    assert journal.read_bytes() == before


def test_other_settings_are_refused_with_the_difference(lab):
    research(lab, config(lab, ideas=IDEAS[:1]))
    done = lab.evsys("research", config(lab, ideas=IDEAS[:1], max_repeats=3))
    assert done.returncode == 1
    assert "research.max_repeats: 2 -> 3" in done.stderr
    assert research(lab, config(lab, ideas=IDEAS[:1], max_repeats=3), "--fresh")["trials"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--goal", "val.pass@1 => 0.8"], "a goal is a metric"),
        (["--goal", "val.pass@1 <= 0.8"], "more of val.pass@1 is better"),
        (["--goal", "val.pass@1 >= 80"], "lies between 0 and 1"),
        (["--goal", "test.pass@1 >= 0.8"], "the success metric is val.pass@1"),
        (["--budget", "trails=3"], "trails"),
        (["--set", "metadata.success_metric=test.pass@1"], "test scores keep nothing"),
        (["--set", "research.proposers.0.params.speed=3"], "speed"),
        (["--set", "research.budget=null"], "research.budget"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_spent(lab, words, told):
    done = lab.evsys("research", config(lab), *words)
    assert done.returncode == 1 and told in done.stderr
    assert not (lab.root / "outputs").exists()


def test_a_person_approves_each_launch(lab):
    path = config(lab, ideas=[IDEAS[0], IDEAS[1], IDEAS[5]])
    done = subprocess.run(
        [sys.executable, "-m", "evsys_sdk.cli.main", "research", str(path), "--json", "--approve"],
        input="y\nwhat\nn too small to matter\nq\n", capture_output=True, text=True, cwd=lab.root, timeout=300,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 2 and report["stopped_by"] == "person"
    assert words_of(report) == ["first", "kept", "declined"]
    assert report["trials"][2]["why"] == "declined: too small to matter"
    assert report["spent"]["trials"] == 2


def test_a_rung_leaves_a_candidate_behind_and_what_is_promoted_ends_as_if_it_had_never_paused(lab):
    entries = [entry("val", run_every=2), entry("test")]
    run = {"algorithm": {"kind": "sft", "params": {"learning_rate": 1e-3, "max_steps": 6, "batch_size": 16}}}
    ideas = [
        {"changes": {"algorithm.params.learning_rate": rate}, "claim": f"A rate of {rate}"} for rate in (1e-7, 0.02)
    ]
    with_rungs = research(lab, config(lab, ideas=ideas, run=run, entries=entries, rungs={"min_steps": 2, "eta": 2}))
    pruned, promoted = with_rungs["trials"][1:]
    assert (pruned["status"], pruned["step"], promoted["status"]) == ("pruned", 2, "completed")
    assert pruned["cost"]["steps"] == 2
    (lab.root / "outputs").rename(lab.root / "with_rungs")
    without = research(lab, config(lab, ideas=ideas, run=run, entries=entries))
    assert without["trials"][2]["score"] == promoted["score"]
    assert without["trials"][2]["cost"]["steps"] == promoted["cost"]["steps"]


def test_a_stopped_research_resumes(lab):
    path = config(lab, run={"backend": {"kind": "mock", "params": {"latency_ms": 30}}})
    undisturbed = research(lab, path)
    (lab.root / "outputs").rename(lab.root / "undisturbed")
    process = lab.start("research", path, "--json", "--quiet")
    journal = lab.root / "outputs/hello_sft.research/journal.jsonl"
    _wait_for(process, lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert json.loads(out)["stopped_by"] == "stopped"
    assert decisions(research(lab, path)) == decisions(undisturbed)


def _wait_for(process, is_there):
    while not is_there():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def decisions(report):
    """Everything that does not depend on the clock."""
    for trial in report["trials"]:
        del trial["cost"]["seconds"]
    final = report["final"]
    return [report["stopped_by"], report["trials"], final and final["candidate"], final and final["comparison"]]


@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments_change_no_decision(lab, seed):
    """A research that is killed again and again asks nothing twice, launches nothing twice, and decides the same."""
    path, chance = config(lab, ideas=IDEAS[:2], final_repeats=1), random.Random(seed)
    started = time.monotonic()
    undisturbed = research(lab, path)
    longest = time.monotonic() - started
    events = _keys(lab)
    (lab.root / "outputs").rename(lab.root / "undisturbed")
    for _ in range(6):
        process = lab.start("research", path, "--json", "--quiet")
        end = time.monotonic() + chance.uniform(0.02, longest / 3)
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL), err
    assert decisions(research(lab, path)) == decisions(undisturbed)
    assert _keys(lab) == events
    folders = {path.name for path in (lab.root / "outputs/hello_sft.research").iterdir() if path.is_dir()}
    expected = {path.name for path in (lab.root / "undisturbed/hello_sft.research").iterdir() if path.is_dir()}
    assert folders == expected


def _keys(lab) -> list[str]:
    journal: Path = lab.root / "outputs/hello_sft.research/journal.jsonl"
    return [json.loads(line)["key"] for line in journal.read_text().splitlines()]


def test_an_ablation_says_which_of_two_changes_did_it(lab):
    def arm(name, **params):
        return {
            "name": name,
            "data": {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]},
            "model": {"name": "m"},
            "algorithm": {"kind": "sft", "params": {"max_steps": 6, "batch_size": 16, **params}},
            "backend": {"kind": "mock"},
        }

    both = {"learning_rate": 0.01, "max_grad_norm": 0.9}
    path = lab.config(
        run=None, runs=[arm("base", learning_rate=1e-7, max_grad_norm=1.0), arm("both", **both)], n_repeats=2,
        metadata={"success_metric": "val.pass@1", "benchmark": [entry("val")]}, leakage="off",
    )  # fmt: skip
    lab.evsys("run", path, check=True)
    done = lab.evsys("ablate", "hello_sft", "--json", check=True)
    told = {one["path"]: one for one in json.loads(done.stdout)["changes"]}
    rate, norm = told["algorithm.params.learning_rate"], told["algorithm.params.max_grad_norm"]
    assert rate["comparison"]["difference"] < -0.3 < norm["comparison"]["difference"]
    words = {"worse": "did it", "undecided": "cannot be distinguished"}
    assert words[rate["comparison"]["verdict"]] in rate["line"] and "did it" not in norm["line"]
    shown = json.loads(lab.evsys("show", "hello_sft", "--json", check=True).stdout)
    assert rate["line"] in shown["conclusions"][-1]["text"]
    ablation = json.loads(lab.evsys("show", "hello_sft-ablation", "--json", check=True).stdout)
    reused = [run["run_id"].split("/")[1] for run in ablation["record_data"]["runs"] if run["reused_from"]]
    assert reused == ["all__s42", "all__s43", "none__s42", "none__s43"]


ENDS_ITSELF = '''
"""A model that answers from a list, notes of what is asked and trained, and a research that ends itself. END_AT is
"before 5" (done, but not yet line 5 of the journal), "after 5", "trained 5" (in the first step that is trained with 5
lines in the journal) or "asked 2" (while it is asked with 2 trials behind it)."""
import json
import os
import signal
from pathlib import Path

from evsys_sdk.config.base import Params
from evsys_sdk.record.log_stores import JsonlLogStore
from evsys_sdk.registry import register_inference
from evsys_sdk.research.journal import ResearchJournal

HERE = Path(__file__).parent
MOMENT, _, LINE = os.environ.get("END_AT", "").partition(" ")
add, log_metrics = ResearchJournal.add, JsonlLogStore.log_metrics


def note(file, *what):
    with open(HERE / file, "a") as stream:
        print(json.dumps(what), file=stream)


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def add_and_end(journal, key, outcome):
    line = "" if key in journal.outcomes else str(len(journal.outcomes) + 1)
    if (MOMENT, LINE) == ("before", line):
        end()
    found = add(journal, key, outcome)
    if (MOMENT, LINE) == ("after", line):
        end()
    return found


def log_and_note(store, metrics, step):
    log_metrics(store, metrics, step)
    note("trained.jsonl", str(store.cfg.log_dir), step, sorted(metrics))
    journal = HERE / "outputs/hello_sft.research/journal.jsonl"
    if MOMENT == "trained" and journal.read_bytes().count(b"\\n") == int(LINE):
        end()


ResearchJournal.add, JsonlLogStore.log_metrics = add_and_end, log_and_note


@register_inference("listed")
class Listed:
    class Config(Params):
        pass

    def __init__(self, **params):
        self.cfg = self.Config(**params)

    def generate(self, *, prompt, max_tokens, temperature=1.0, stop=None):
        past = prompt[0]["content"].count("- trial ")
        note("asked.jsonl", past, len(prompt))
        if (MOMENT, LINE) == ("asked", str(past)):
            end()
        return json.dumps(json.loads((HERE / "ideas.json").read_text())[past])
'''
AGENT = """
import json
import os
import signal
import sys
from pathlib import Path

home, past = Path(__file__).parent, sys.stdin.read().count("- trial ")
with open(home / "asked.jsonl", "a") as stream:
    print(json.dumps([past, 1]), file=stream)
if os.environ.get("END_AT") == f"asked {past}":
    os.kill(os.getppid(), signal.SIGKILL)
Path("proposal.json").write_text(json.dumps(json.loads((home / "ideas.json").read_text())[past]))
"""


@pytest.fixture
def asked_lab(lab):
    """A lab with a model and an agent that answer from a list and write down what they are asked."""
    (lab.root / "ends_itself.py").write_text(ENDS_ITSELF)
    (lab.root / "agent.py").write_text(AGENT)
    (lab.root / "ideas.json").write_text(json.dumps([IDEAS[0], IDEAS[2], IDEAS[1], IDEAS[5], IDEAS[5]]))
    return lab


def proposer_config(lab, kind, trials):
    params = {
        "evolve": {},
        "llm": {"inference": {"kind": "listed"}},
        "command": {"argv": [sys.executable, str(lab.root / "agent.py")], "environment": ["END_AT"]},
    }[kind]
    path = config(lab, budget={"trials": trials}, final_repeats=1, proposers=[{"kind": kind, "params": params}])
    path.write_text(path.read_text() + "imports: [ends_itself]\n")
    return path


def notes(lab, file):
    path = lab.root / file
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


def journal_of(lab):
    """Every line of the journal without clock readings."""

    def timeless(value):
        if isinstance(value, dict):
            return {key: timeless(inner) for key, inner in value.items() if key not in ("at", "seconds")}
        if isinstance(value, list):
            return [timeless(inner) for inner in value]
        return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+", "<time>", value) if isinstance(value, str) else value

    journal = lab.root / "outputs/hello_sft.research/journal.jsonl"
    return [timeless(json.loads(line)) for line in journal.read_text().splitlines()]


def runs_of(lab):
    """Every run on disk, with its seed and scores."""
    folder = lab.root / "outputs/hello_sft.research"
    found = {path: json.loads(path.read_text()) for path in folder.rglob("run_result.json")}
    return {str(path.relative_to(folder)): (run["seed"], run["metrics"]) for path, run in found.items()}


def research_with_kills(lab, path, choose):
    """A research without a kill, then one that is killed at each of the moments that `choose` names of its keys."""
    undisturbed = decisions(research(lab, path))
    journal, runs = journal_of(lab), runs_of(lab)
    asked, trained = notes(lab, "asked.jsonl"), notes(lab, "trained.jsonl")
    for name in ("outputs", "asked.jsonl", "trained.jsonl"):
        if (lab.root / name).exists():
            (lab.root / name).rename(lab.root / f"undisturbed_{name}")
    moments = choose([line["key"] for line in journal])
    for moment in moments:
        done = lab.evsys("research", path, "--json", "--quiet", END_AT=moment)
        assert done.returncode == -signal.SIGKILL, f"{moment}: {done.stderr}"
    assert decisions(research(lab, path)) == undisturbed
    assert journal_of(lab) == journal and runs_of(lab) == runs
    # Only what was under way at a kill was begun again: a question without an answer, a step that was not noted.
    again = notes(lab, "asked.jsonl") - asked
    assert not asked - notes(lab, "asked.jsonl") and again.total() == sum("asked" in moment for moment in moments)
    again = notes(lab, "trained.jsonl") - trained
    assert not trained - notes(lab, "trained.jsonl")
    assert again.total() <= sum("trained" in moment for moment in moments)


@pytest.mark.parametrize("kind", ["evolve", "llm", "command"])
def test_a_kill_changes_nothing_for_any_proposer(asked_lab, kind):
    def choose(keys):
        asked = f"after {keys.index('ask 1') + 1}" if kind == "evolve" else "asked 0"
        *_, last = [n for n, key in enumerate(keys) if key.startswith("measurement")]
        return [asked, f"trained {last}"]

    research_with_kills(asked_lab, proposer_config(asked_lab, kind, trials=3), choose)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["evolve", "llm", "command"])
def test_a_kill_at_every_line_of_the_journal_changes_nothing(asked_lab, kind):
    def choose(keys):
        moments, past = [], 0
        for n, key in enumerate(keys, 1):
            if key.startswith("ask"):
                moments += [] if kind == "evolve" else [f"asked {past}"]
                past += 1
            else:
                trains = key.startswith(("measurement", "final"))
                moments += [f"trained {n - 1}"] * trains + [f"before {n}"]
            moments.append(f"after {n}")
        return moments

    research_with_kills(asked_lab, proposer_config(asked_lab, kind, trials=4), choose)
