"""Every algorithm from a YAML to a record, on the mock backend, through the real command line."""

from __future__ import annotations

import importlib.util
import json

import pytest

from evsys_sdk.algorithms.sdft import SDFT

COLOURS = ("red", "green", "blue", "black", "white", "grey")
DEMONSTRATED = SDFT.Config().demonstration_template


@pytest.fixture
def run(project, minimal_run):
    """Run one algorithm on given rows; the record of the run comes back. Nothing given may be left unread."""

    def go(kind, params, *, rows=None, transforms=(), name="r0", model=None, **changes):
        if rows is not None:
            project.write_rows(f"data/{name}.jsonl", rows)
        block = minimal_run(
            name=name,
            data={"path": f"data/{name}.jsonl", "transforms": list(transforms)},
            algorithm={"kind": kind, "params": params},
            model={"name": "mock", **(model or {})},
        )
        del block["eval"]
        done = project.evsys("run", project.config(run=block, **changes), "--strict", "--json", "--fresh")
        assert done.returncode == 0, done.stderr
        return project.record(name)

    return go


def _chats(answers=COLOURS, question=lambda word: f"say {word}"):
    return [{"messages": [{"role": "user", "content": question(a)}], "target_assistant": a} for a in answers]


def _curve(project, name, metric):
    return [line[metric] for line in project.metrics(name) if metric in line]


TO_TASKS = {"kind": "to_harbor_task", "params": {"fn_name": "regex_match", "expected_key": "pattern"}}
DIGITS = [{"prompt": f"A digit for {c}?", "pattern": "^[0-9]"} for c in COLOURS]
RL_PARAMS = {"max_steps": 12, "num_samples": 12, "batch_size": 3, "max_tokens": 6, "learning_rate": 2e-3}


@pytest.mark.parametrize("kind", ["rl", "mock_rl"])
def test_rl_raises_the_reward(project, run, kind):
    record = run(kind, {**RL_PARAMS, "async_steps": 1, "kl_coef": 0.01}, rows=DIGITS, transforms=[TO_TASKS])
    assert record["metrics"]["first_reward"] < 0.4 and record["metrics"]["final_reward"] > 0.9
    assert record["metrics"]["steps"] == 12 and record["metrics"]["rollouts_dropped"] == 0
    rewards = _curve(project, "r0", "reward/mean")
    assert len(rewards) == 12 and rewards[-1] == record["metrics"]["final_reward"]
    lines = (project.root / "outputs/r0/logs/training/rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 12 * 8 and json.loads(lines[0])["turns"][0]["completion_tokens"]


def test_the_same_seed_gives_the_same_run_in_another_process(project, run):
    records = [run("rl", {**RL_PARAMS, "max_steps": 4}, rows=DIGITS, transforms=[TO_TASKS], name=n) for n in "ab"]
    assert records[0]["metrics"] == records[1]["metrics"]
    finals = [record["artifacts"]["final_checkpoint"].rpartition("/")[2] for record in records]
    assert finals[0] == finals[1]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="dpo's loss is written in torch")
def test_dpo_learns_the_preference(project, run):
    rows = [{"prompt": f"say {c}", "chosen": c, "rejected": c[::-1]} for c in COLOURS]
    record = run("dpo", {"max_steps": 15, "learning_rate": 2e-4, "batch_size": 3, "beta": 0.2}, rows=rows)
    assert record["metrics"]["final_loss"] < 0.2 < record["metrics"]["first_loss"]
    assert _curve(project, "r0", "accuracy")[-1] == 1.0 and _curve(project, "r0", "margin")[-1] > 1.0


def test_distill_takes_over_what_another_run_learnt(project, run):
    teacher = run("sft", {"num_epochs": 30, "learning_rate": 1e-3}, rows=_chats(), name="teacher")
    begun = run("sft", {"num_epochs": 10, "learning_rate": 1e-4}, rows=_chats(), name="begun")
    record = run(
        "distill",
        {
            "teacher": {"load_checkpoint_path": teacher["artifacts"]["final_sampler"]},
            "max_steps": 15,
            "num_samples": 8,
            "batch_size": 6,
            "max_tokens": 7,
            "learning_rate": 1e-3,
        },
        rows=_chats(),
        name="student",
        model={"load_checkpoint_path": begun["artifacts"]["final_checkpoint"]},
    )
    kl = _curve(project, "student", "teacher_kl")
    assert kl[-1] < 0.4 * kl[0] and record["metrics"]["final_reward"] > record["metrics"]["first_reward"] + 0.3


def test_sdft_learns_the_demonstrated_answers(project, run):
    lands = {"Paris": "France", "Rome": "Italy", "Lima": "Peru", "Oslo": "Norway"}

    def plain(city):
        return f"Capital of {lands[city]}?"

    def shown(city):
        return DEMONSTRATED.replace("{question}", plain(city)).replace("{demonstration}", city)

    follow = {"num_epochs": 40, "learning_rate": 1e-3}
    start = run("sft", follow, rows=_chats(lands, shown), name="follower")
    params = {"max_steps": 16, "num_samples": 2, "batch_size": 4, "max_tokens": 12, "learning_rate": 1e-3}
    record = run(
        "sdft",
        params,
        rows=_chats(lands, plain),
        name="student",
        model={"load_checkpoint_path": start["artifacts"]["final_checkpoint"]},
    )
    assert record["metrics"]["first_reward"] < 0.6 and record["metrics"]["final_reward"] > 0.9
    assert _curve(project, "student", "teacher_kl")[-1] < 0.1


def test_combo_hands_the_weights_on_and_is_scored_at_its_end(project, run):
    project.write_tasks()
    project.write_rows("data/tasks.jsonl", [{"prompt": f"say {c}", "answer": c} for c in COLOURS])
    tasks = {"path": "data/tasks.jsonl", "transforms": [{"kind": "to_harbor_task", "params": {}}]}
    rl = {**RL_PARAMS, "max_steps": 10, "batch_size": 6, "max_tokens": 8, "learning_rate": 2e-4}
    bench = {"name": "colours", "path": "bench", "split": "val", "run_every": 10, "max_tokens": 8, "num_samples": 8}
    record = run(
        "combo",
        {
            "phases": [
                {"algorithm": {"kind": "sft", "params": {"max_steps": 10, "learning_rate": 1.5e-4}}},
                {"algorithm": {"kind": "rl", "params": rl}, "data": tasks},
            ]
        },
        rows=_chats(),
        metadata={"benchmark": bench},
    )
    metrics = record["metrics"]
    assert metrics["steps"] == 20 and metrics["rl/first_reward"] > 0, "from nothing, rl would find no reward here"
    assert metrics["rl/final_reward"] > metrics["rl/first_reward"] + 0.3
    scores = [(entry["step"], entry["scores"][0]["value"]) for entry in record["evals"]]
    assert [step for step, _ in scores] == [10, 20] and scores[1][1] > scores[0][1] + 0.2
    assert metrics["val/colours/pass@1"] == scores[1][1], "the last phase's weights are the run's"
    assert [line["step"] for line in project.metrics() if "rl/loss" in line][-1] == 20
    places = [data["place"] for data in record["environment"]["data"]]
    assert places == ["data", "algorithm.params.phases[1].data"], "the record names the data of every phase"


def test_a_chain_of_stages_runs_rl_from_stage_to_stage(project, minimal_run):
    project.write_rows("data/digits.jsonl", DIGITS)
    data = {"path": "data/digits.jsonl", "transforms": [TO_TASKS]}
    stages = [{"name": name, "data": data} for name in ("first", "second")]
    block = minimal_run(
        algorithm={"kind": "rl", "params": {**RL_PARAMS, "kl_coef": 0.01}}, continual={"stages": stages}
    )
    del block["eval"], block["data"]
    done = project.evsys("run", project.config(run=block), "--json")
    assert done.returncode == 0, done.stderr
    metrics = project.record()["metrics"]
    assert metrics["first/first_reward"] < 0.5 < metrics["second/first_reward"], (
        "the second begins where the first ended"
    )
    kl = _curve(project, "r0", "kl")
    assert abs(kl[0]) < 1e-4 and min(map(abs, kl[1:13])) > 1e-3


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"kind": "rl", "params": {"num_samples": 1}},
            "run.algorithm.params   num_samples: 1 makes every group constant",
        ),
        (
            {"kind": "combo", "params": {"phases": [{"algorithm": {"kind": "sft", "params": {"lora_rnk": 4}}}]}},
            "params.phases[0].algorithm   params of algorithm 'sft': lora_rnk: unknown key; closest: lora_rank",
        ),
        ({"kind": "distill", "params": {"teacher": {}}}, "set either load_checkpoint_path or model"),
        ({"kind": "sdft", "params": {"teacher": "emma"}}, "must be one of start, base, ema; closest: ema"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_it_runs(project, minimal_run, algorithm, said):
    done = project.evsys("validate", project.config(run=minimal_run(algorithm=algorithm)), "--deep")
    assert done.returncode == 1 and said in done.stderr
