"""Looking at one question again and again is counted, and widens what the verdict says."""

from __future__ import annotations

import json

import pytest
import yaml

from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.experiment.outcome import record_path
from evsys_sdk.history.history import read_history
from evsys_sdk.history.leaderboard import looks_of

WORDS = [f"{first}{second}" for first in ("ba", "de", "fi", "go") for second in "bdfgl"]


@pytest.fixture
def ask(project):
    project.write_rows("data/all.jsonl", [{"prompt": f"say {word}", "completion": word} for word in WORDS])
    verifier = {"kind": "in_process", "fn_name": "exact_match"}
    project.write_rows(
        "bench/tasks.jsonl",
        [{"task_id": word, "instruction": f"say {word}", "verifier": {**verifier, "expected": word}} for word in WORDS],
    )

    def arm(name, rate):
        params = {"learning_rate": rate, "max_steps": 4, "batch_size": 4}
        data = {"path": "data/all.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]}
        backend = {"kind": "mock", "params": {}}
        return {"name": name, "data": data, "model": {"name": "table"}, "backend": backend,
                "algorithm": {"kind": "sft", "params": params}}  # fmt: skip

    def run(
        name="asked",
        *,
        repeats=2,
        base_seed=1,
        out="out",
        bench="words",
        path="bench",
        rates=(0.002, 0.004),
        metric="val.pass@1",
        change=lambda arm: arm,
        **options,
    ):
        entry = {"name": bench, "path": path, "split": "val", "temperature": 0}
        settings = {
            "version": 1, "name": name, "output_dir": out, "n_repeats": repeats, "base_seed": base_seed,
            "leakage": "off", "runs": [change(arm("slow", rates[0])), change(arm("quick", rates[1]))],
            "metadata": {"success_metric": metric, "benchmark": [entry]},
        }  # fmt: skip
        path = project.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        result = Experiment.from_yaml(path).run(RunOptions(**options))
        return json.loads(record_path(result.output_dir, result.name).read_text())

    return run


def test_more_seeds_of_the_same_arms_are_a_further_look(ask):
    first = ask(repeats=2)
    assert first["looks"]["count"] == 1 and first["verdict"]["looks"] == 1 and "Look 2" not in first["conclusion"]
    again = ask(repeats=2)
    assert again["looks"]["count"] == 1, "the same result told again is no further look"
    second = ask(repeats=3, fork=True)
    assert second["looks"]["count"] == second["verdict"]["looks"] == 2
    assert [one.split(" ")[0] for one in second["looks"]["before"]] == ["asked"]
    assert "Look 2 at this question (earlier looks: asked (" in second["conclusion"]
    assert any("look 2 at this question" in note for note in second["verdict"]["notes"])
    third = ask(repeats=4, fork=True)
    assert third["looks"]["count"] == 3


def test_runs_taken_over_into_an_experiment_of_another_name_are_a_further_look(ask):
    ask("one", repeats=2)
    assert ask("two", repeats=3)["looks"]["count"] == 2
    assert ask("three", repeats=2)["looks"]["before"] == [], "the same seeds under another name"


def test_attempts_with_other_seeds_that_fresh_set_aside_are_counted(ask):
    ask(base_seed=1)
    same = ask(base_seed=1, fresh=True)
    told = {key: same["looks"][key] for key in ("count", "before", "set_aside", "rerolls")}
    assert told == {"count": 1, "before": [], "set_aside": 1, "rerolls": 0}, "the mock backend repeats exactly"
    other = ask(base_seed=11, fresh=True)
    assert other["looks"]["rerolls"] == 1 and other["looks"]["count"] == 2, "also where other seeds score alike"
    assert "1 attempt with other seeds or scores set aside by --fresh" in other["conclusion"]


def test_other_seeds_that_score_alike_are_a_further_look(ask):
    """At this learning rate nothing is learned, and every seed has the same scores."""
    first = ask("one", rates=(1e-9, 2e-9), base_seed=1)
    second, third = (ask(name, rates=(1e-9, 2e-9), base_seed=seed) for name, seed in (("two", 20), ("three", 30)))
    assert first["arms"][0]["scores"] == second["arms"][0]["scores"] == third["arms"][0]["scores"]
    assert [found["looks"]["count"] for found in (first, second, third)] == [1, 2, 3]


def test_another_metric_is_another_question(ask):
    ask("loss", metric="final_loss")
    assert ask("passes", base_seed=50)["looks"]["count"] == 1
    assert ask("loss_again", metric="final_loss", base_seed=70)["looks"]["before"][0].startswith("loss (")


def test_a_space_at_the_end_of_every_instruction_makes_no_new_tasks(ask, project):
    ask("first")
    rows = [json.loads(line) for line in (project.root / "bench/tasks.jsonl").read_text().splitlines()]
    project.write_rows("spaced/tasks.jsonl", [{**row, "instruction": f"{row['instruction']} "} for row in rows])
    assert ask("second", path="spaced", base_seed=50)["looks"]["count"] == 2


def test_tasks_and_seeds_that_are_left_out_after_their_scores_were_seen_are_named(ask, project):
    ask("first")
    rows = [json.loads(line) for line in (project.root / "bench/tasks.jsonl").read_text().splitlines()]
    project.write_rows("fewer/tasks.jsonl", rows[2:14])
    fewer = ask("fewer", path="fewer")
    assert fewer["looks"]["count"] == 2 and fewer["looks"]["left_out"][0].startswith("8 of 20 tasks of first (")
    assert fewer["conclusion"].splitlines()[0].startswith("Warning: the level of this verdict does not hold.")
    seeds = ask("seeds", repeats=1, base_seed=2)
    assert [told.split(" (")[0] for told in seeds["looks"]["left_out"]] == ["seed 1 of first", "seed 1 of fewer"]
    again = ask("seeds", repeats=1, base_seed=2)
    assert again["looks"] == seeds["looks"], "the same result told again"
    judged = project.evsys("judge", "seeds", "--baseline-arm", "quick", check=True).stdout
    assert "the level of this verdict does not hold" in judged
    assert json.loads(record_path(project.root / "out", "seeds").read_text())["looks"] == seeds["looks"]
    assert ask("others", repeats=1, base_seed=40)["looks"]["left_out"] == [], "other seeds are no choice among those"


def test_a_look_that_was_marked_invalid_is_still_a_look(ask, project):
    ask("first")
    project.evsys("invalidate", "first", "--why", "a low score", check=True)
    second = ask("second", base_seed=50)
    assert second["looks"]["count"] == 2 and second["looks"]["before"][0].endswith(", marked invalid)")


def test_the_conclusion_asks_for_fresh_tasks_where_too_many_arms_were_compared(ask, monkeypatch):
    monkeypatch.setattr("evsys_sdk.history.leaderboard.BUDGET", 4)
    assert "fresh validation set" not in ask("first", repeats=1)["conclusion"]
    second = ask("second", repeats=1, rates=(0.001, 0.008))
    assert "mock backend): 4 arms of 2 experiments compared on it (budget 4)" in second["conclusion"]
    assert second["conclusion"].endswith("The budget is spent: choose on a fresh validation set.")


def with_params(**params):
    return lambda arm: arm | {"algorithm": {"kind": "sft", "params": arm["algorithm"]["params"] | params}}


def with_transforms(*transforms):
    chat = {"kind": "jsonl_to_chat"}
    return lambda arm: arm | {"data": arm["data"] | {"transforms": [*transforms, chat]}}


WITHOUT_EFFECT = {
    "checkpoints": with_params(save_every=2),
    "parts": with_params(save_at_fractions=[0.5]),
    "a default written out": with_params(grad_accumulation=1),
    "a number in another form": with_params(max_steps=4.0),
    "dedupe without effect": with_transforms({"kind": "dedupe"}),
    "another order": with_transforms({"kind": "shuffle", "params": {"seed": 9}}),
    "a slower backend": lambda arm: arm | {"backend": {"kind": "mock", "params": {"latency_ms": 0.01}}},
    "rows scored besides": lambda arm: arm | {"eval": {"metrics": [{"kind": "exact_match"}], "n_samples": 2}},
}


def test_settings_that_cannot_change_scores_make_no_new_question(ask):
    ask("first", repeats=1)
    counted = {}
    for number, (changed, change) in enumerate(WITHOUT_EFFECT.items()):
        found = ask(f"n{number}", repeats=1, base_seed=50 + number, change=change)
        counted[changed] = found["looks"]["before"][0].split(" ")[0] if found["looks"]["before"] else None
    assert counted == dict.fromkeys(WITHOUT_EFFECT, "first")


def test_settings_that_change_scores_make_another_question(ask):
    ask("first", repeats=1)
    sampled = with_transforms({"kind": "sample", "params": {"n": 9}})
    for number, change in enumerate([with_params(batch_size=5), with_params(save_every=2, max_steps=5), sampled]):
        found = ask(f"n{number}", repeats=1, base_seed=50 + number, change=change)
        assert found["looks"]["before"] == [], change


def test_arms_that_differ_in_a_setting_without_effect_are_two_arms(ask):
    """Both have the same rate, and one of them keeps checkpoints: what they score is chance, and was looked at."""

    def save(arm):
        return with_params(save_every=2)(arm) if arm["name"] == "quick" else arm

    first = ask("first", rates=(0.004, 0.004), change=save)
    assert len(set(first["looks"]["arms"].values())) == 2
    assert ask("second", rates=(0.004, 0.004), change=save, base_seed=50)["looks"]["count"] == 2


def until_other_scores(ask, known, **asked):
    """A run whose scores are not among the known ones: by chance two seeds may score alike on twenty tasks."""
    for seed in range(100, 900, 10):
        found = ask(base_seed=seed, **asked, fresh=True)
        if found["arms"] not in known:
            known.append(found["arms"])
            return found
    raise AssertionError("every seed scores alike")


def test_the_same_question_is_counted_under_other_names_in_other_folders_and_on_copied_tasks(ask, project):
    known = [ask("first")["arms"]]
    other = until_other_scores(ask, known, name="other_name")
    assert [one.split(" ")[0] for one in other["looks"]["before"]] == ["first"] and other["verdict"]["looks"] >= 2
    rows = [json.loads(line) for line in (project.root / "bench/tasks.jsonl").read_text().splitlines()]
    renamed = [{**row, "task_id": f"t{n}", "metadata": {"n": n}} for n, row in enumerate(reversed(rows))]
    project.write_rows("elsewhere/copy.jsonl", renamed)
    third = until_other_scores(ask, known, name="first", out="out2", bench="copied", path="elsewhere/copy.jsonl")
    names = [one.split(" ")[0] for one in third["looks"]["before"]]
    assert names[:2] == ["first", "other_name"], "whatever the tasks and the folder are called"
    again = ask("first")
    assert again["looks"]["before"] == [], "what came after it took no part in it"
    assert ask("first")["looks"]["before"] == []


def test_other_arms_or_other_tasks_are_another_question(ask, project):
    ask("first")
    assert ask("arms", rates=(0.001, 0.008), base_seed=50)["looks"]["before"] == []
    verifier = {"kind": "in_process", "fn_name": "exact_match"}
    project.write_rows(
        "new/tasks.jsonl",
        [{"task_id": w, "instruction": f"write {w}", "verifier": {**verifier, "expected": w}} for w in WORDS],
    )
    assert ask("tasks", path="new", base_seed=70)["looks"]["before"] == []


def test_the_history_counts_attempts_and_experiments_of_one_name_in_several_folders(ask, project):
    known = [ask()["arms"]]
    until_other_scores(ask, known)
    until_other_scores(ask, known, out="out2")
    [looks] = looks_of(read_history(None, [project.root]).entries)
    assert len(looks.experiments) == 2 and looks.n_attempts >= 1
    assert looks.n_arms == 2 * (2 + looks.n_attempts)
    assert f"{looks.n_arms} arms of 2 experiments and " in str(looks) and "set aside by --fresh" in str(looks)
