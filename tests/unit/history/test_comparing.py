"""Experiments side by side: what differs, what they scored, and what the shared tasks allow to be said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk import registry
from evsys_sdk.cli.main import main
from evsys_sdk.errors import EvsysError
from evsys_sdk.history.compare import Compared, compare, task_values
from evsys_sdk.history.history import read_history
from evsys_sdk.history.index import add_note
from evsys_sdk.protocols import EvalResult, Rollout, Score, Turn
from evsys_sdk.record.journal import Journal, JournalledRollouts, to_data_without
from evsys_sdk.report.verdict_text import verdict_lines
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms

Rewards = Mapping[str, float | None]


def rollouts(rewards: Rewards) -> list[Rollout]:
    turn = Turn(prompt_tokens=[1], completion_tokens=[2], logprobs=[0.0], text="x")
    return [
        Rollout(task_id=task, turns=[turn], reward=reward, status="ok" if reward is not None else "infra_error")
        for task, reward in rewards.items()
    ]


def leave(
    folder: Path,
    name: str,
    arms: Mapping[str, Sequence[Rewards]],
    *,
    best: str | None = None,
    metrics: Sequence[str] = ("pass@1",),
    split: str = "val",
    tasks: str = "same",
    allow_test: bool = False,
    **settings: Any,
) -> Path:
    """An experiment whose journal has these rewards, per arm and seed."""
    runs = []
    with closing(Journal(folder / f"{name}.journal.sqlite")) as journal:
        for arm, seeds in arms.items():
            for number, rewards in enumerate(seeds):
                run_id = f"{name}/{arm}__s{number}"
                line = journal.begin(run_id, "f")
                untrained = EvalResult(name="tools", split=split, scores=_scores(metrics, 0.0), step=0,
                                       rollouts=rollouts(dict.fromkeys(rewards, 0.0)))  # fmt: skip
                final = EvalResult(name="tools", split=split, scores=_scores(metrics, 0.5), rollouts=rollouts(rewards))
                line.add("eval", to_data_without(untrained, JournalledRollouts(line, "start")), at=0)
                line.add("final_eval", to_data_without(final, JournalledRollouts(line, "final")), at=9)
                value = sum(reward or 0.0 for reward in rewards.values()) / len(rewards)
                found = {f"{split}/tools/{metric}": value for metric in metrics}
                runs.append({"run_id": run_id, "status": "completed", "metrics": found, "evals": []})
    means = {arm: [sum(r or 0 for r in seed.values()) / len(seed) for seed in seeds] for arm, seeds in arms.items()}
    configs = [{"name": arm, "algorithm": {"kind": "sft", "params": settings.get(arm, settings)}} for arm in arms]
    record = {
        "experiment": name,
        "best_arm": best or (next(iter(arms)) if len(arms) == 1 else None),
        "contents": {f"tasks of {split}/tools": tasks},
        "arms": [{"arm": a, "statuses": ["completed"] * len(s), "scores": means[a]} for a, s in arms.items()],
        "runs": runs,
        "config": {
            "name": name,
            "n_repeats": len(next(iter(arms.values()))),
            "metadata": {"success_metric": {"name": metrics[0]}, "allow_test_selection": allow_test},
            **({"runs": configs} if len(configs) > 1 else {"run": configs[0]}),
        },
    }
    path = folder / f"{name}.experiment_result.json"
    path.write_text(json.dumps(record))
    return path


def _scores(metrics: Sequence[str], value: float) -> list[Score]:
    return [Score(metric=metric, value=value) for metric in metrics]


def passes(share: float, n: int = 60) -> dict[str, float]:
    return {f"t{index:02d}": float(index < share * n) for index in range(n)}


def compared(folder: Path, *refs: str, **options: Any) -> Compared:
    return compare(refs, read_history(None, [folder]), **options)


def test_only_what_differs_is_told_of_the_settings(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5)]}, lr=1e-3, rank=8)
    leave(tmp_path, "b", {"other_name": [passes(0.5)]}, lr=1e-2, rank=8, warmup=5)
    found = compared(tmp_path, "a", "b")
    assert found.settings == {"algorithm.params.lr": [1e-3, 1e-2], "algorithm.params.warmup": [None, 5]}


def test_a_callback_that_steers_is_a_setting_and_one_that_watches_is_not(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5)]})
    path = leave(tmp_path, "b", {"r": [passes(0.5)]})
    record = json.loads(path.read_text())
    record["config"]["callbacks"] = [{"kind": "csv_metrics"}, {"kind": "early_stopping", "params": {"patience": 1}}]
    path.write_text(json.dumps(record))
    assert compared(tmp_path, "a", "b").settings == {"callbacks.early_stopping.patience": [None, 1]}


def test_a_real_difference_on_shared_tasks_is_found(tmp_path):
    leave(tmp_path, "base", {"r": [passes(0.3)]})
    leave(tmp_path, "up", {"r": [passes(0.7)]})
    [judged] = compared(tmp_path, "base", "up").verdicts
    [base, up] = judged.verdict.arms
    assert judged.label == "val/tools/pass@1" and (base.arm, up.arm) == ("base", "up")
    assert up.verdict == "better" and up.vs_baseline.difference == pytest.approx(0.4)
    assert judged.verdict.best_arm == "up"
    turned = compared(tmp_path, "up", "base").verdicts[0].verdict
    assert turned.arms[1].verdict == "worse", "the first one named is the baseline"


def test_the_scores_are_those_of_the_trained_model(tmp_path):
    """The journal also has the untrained model's rollouts, where every reward is 0."""
    leave(tmp_path, "a", {"r": [passes(0.5)]})
    leave(tmp_path, "b", {"r": [passes(0.5)]})
    assert [arm.mean for arm in compared(tmp_path, "a", "b").verdicts[0].verdict.arms] == [0.5, 0.5]


def test_only_shared_tasks_are_paired(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5, 40)]})
    leave(tmp_path, "b", {"r": [{**passes(0.5, 20), "extra": 1.0}]})
    found = compared(tmp_path, "a", "b").verdicts[0].verdict.arms[1].vs_baseline
    assert (found.n_tasks, found.only_arm, found.only_vs) == (20, 1, 20)


def test_changed_tasks_of_the_same_ids_are_told(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5)]}, tasks="before")
    leave(tmp_path, "b", {"r": [passes(0.5)]}, tasks="after")
    assert any("val/tools is not the same" in note for note in compared(tmp_path, "a", "b").notes)


def test_of_an_experiment_its_best_arm_is_taken_and_without_one_all_arms(tmp_path):
    arms = {"low": [passes(0.2)], "high": [passes(0.8)]}
    leave(tmp_path, "one", {"r": [passes(0.5)]})
    leave(tmp_path, "named", arms, best="high")
    leave(tmp_path, "open", arms)
    labels = lambda *refs: [side.label for side in compared(tmp_path, *refs).sides]  # noqa: E731
    assert labels("one", "named") == ["one", "named"]
    assert compared(tmp_path, "one", "named").sides[1].arm.arm == "high"
    assert labels("one", "open") == ["one", "open:low", "open:high"]
    assert labels("named:low", "named:high") == ["named:low", "named:high"], "two arms of one experiment"


def test_several_seeds_are_all_used(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.4), passes(0.5), passes(0.6)]})
    leave(tmp_path, "b", {"r": [passes(0.5)]})
    assert [arm.n_seeds for arm in compared(tmp_path, "a", "b").verdicts[0].verdict.arms] == [3, 1]


def test_seeds_keep_their_numbers(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.2), passes(0.3)]})
    leave(tmp_path, "b", {"r": [passes(0.5), passes(0.6)]})
    for number, seed in enumerate((43, 44)):
        folder = tmp_path / f"r__s{number}"
        folder.mkdir()
        (folder / "run_result.json").write_text(json.dumps({"run_id": f"a/r__s{number}", "hparams": {"seed": seed}}))
    [first, _] = compared(tmp_path, "a", "b").verdicts[0].verdict.arms
    assert list(first.seed_means) == [43, 44]


def test_an_evaluation_in_which_all_errored_is_no_score_of_zero(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5)]})
    leave(tmp_path, "b", {"r": [dict.fromkeys(passes(0.5))]})
    broken = compared(tmp_path, "a", "b").verdicts[0].verdict.arms[1]
    assert broken.mean is None and "errored" in broken.why_unranked


def test_where_the_first_has_no_score_the_advice_is_to_name_another_first(tmp_path):
    leave(tmp_path, "a", {"r": [dict.fromkeys(passes(0.5))]})
    for name in ("b", "c"):
        leave(tmp_path, name, {"r": [passes(0.5)]})
    lines = "\n".join(verdict_lines(compared(tmp_path, "a", "b", "c").verdicts[0].verdict))
    assert "a has no score to compare with; name another one first." in lines and "baseline_arm" not in lines


def test_a_metric_that_is_no_mean_over_tasks_is_not_paired(monkeypatch):
    class BestTask:
        def compute(self, task_rewards):
            return max(max(rewards) for rewards in task_rewards)

    assert task_values(rollouts({"a": 1.0, "b": 0.0}), "pass@1") == {"a": 1.0, "b": 0.0}
    with pytest.raises(EvsysError, match="cannot be had task by task"):
        task_values(rollouts({"a": 1.0}), "no_such_metric")
    monkeypatch.setattr(type(registry.metrics), "build", lambda self, name, params: BestTask())
    with pytest.raises(EvsysError, match="no mean over tasks"):
        task_values(rollouts({"a": 1.0, "b": 0.0}), "best_task")


def test_another_metric_can_be_asked_for(tmp_path):
    for name in ("a", "b"):
        leave(tmp_path, name, {"r": [passes(0.5)]}, metrics=("pass@1", "mean_reward"))
    assert [one.verdict.metric for one in compared(tmp_path, "a", "b").verdicts] == ["pass@1"]
    assert [one.verdict.metric for one in compared(tmp_path, "a", "b", metric="mean_reward").verdicts] == [
        "mean_reward"
    ]
    found = compared(tmp_path, "a", "b", metric="f1")
    assert not found.verdicts and "scored by: val/tools/mean_reward, val/tools/pass@1" in found.notes[-1]


def test_of_a_metric_that_costs_something_less_is_better(tmp_path):
    for name in ("a", "b"):
        leave(tmp_path, name, {"r": [passes(0.5)]}, metrics=("pass@1", "tokens"))
    modes = [compared(tmp_path, "a", "b", metric=metric).verdicts[0].verdict.mode for metric in ("pass@1", "tokens")]
    assert modes == ["max", "min"]


def test_without_rollouts_there_is_no_verdict_and_the_rest_is_told(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5)]})
    leave(tmp_path, "b", {"r": [passes(0.7)]})
    (tmp_path / "b.journal.sqlite").unlink()
    found = compared(tmp_path, "a", "b")
    assert not found.verdicts and "no rollouts are stored of b" in found.notes[-1]
    assert found.scores["val/tools/pass@1"] == [0.5, 0.7]


def test_without_a_journal_the_logs_of_the_runs_are_read(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5)]})
    path = leave(tmp_path, "b", {"r": [passes(0.7)]})
    record = json.loads(path.read_text())
    record["runs"][0] |= {
        "run_dir": "somewhere/else/r__s0",
        "evals": [{"name": "tools", "split": "val", "scores": [{"metric": "pass@1"}]}],
    }
    path.write_text(json.dumps(record))
    (tmp_path / "b.journal.sqlite").unlink()
    logs = tmp_path / "r__s0" / "logs" / "validation"
    logs.mkdir(parents=True)
    lines = [
        {"task_id": task, "completion": "x", "reward": reward, "split": "val", "eval": "tools", "step": None}
        for task, reward in passes(0.7).items()
    ]
    (logs / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compared(tmp_path, "a", "b").verdicts[0].verdict.arms[1].mean == pytest.approx(0.7)


def test_a_test_benchmark_and_an_invalid_experiment_are_pointed_out(tmp_path):
    leave(tmp_path, "a", {"r": [passes(0.5)]}, split="test")
    path = leave(tmp_path, "b", {"r": [passes(0.5)]}, split="test")
    about = next(entry for entry in read_history(None, [tmp_path]).entries if entry.name == "b").digest.result
    add_note(path, "invalid", "leaked", about=about)
    notes = compared(tmp_path, "a", "b").notes
    assert "b is marked as invalid: leaked" in notes and "test/tools is a test benchmark: do not choose by it" in notes


@pytest.mark.parametrize("allowed", [False, True])
def test_test_scores_are_paired_and_ranked_only_where_both_allow_it(tmp_path, allowed):
    leave(tmp_path, "a", {"r": [passes(0.2)]}, split="test", allow_test=True)
    leave(tmp_path, "b", {"r": [passes(0.8)]}, split="test", allow_test=allowed)
    [judged] = compared(tmp_path, "a", "b").verdicts
    assert judged.verdict.arms[1].vs_baseline.difference == pytest.approx(0.6)
    lines = "\n".join(verdict_lines(judged.verdict))
    assert ("Best arm" in lines, "the highest of 2 scored arms" in lines, "test scores do not select" in lines) == (
        allowed, allowed, not allowed
    )  # fmt: skip


@pytest.mark.parametrize(
    ("refs", "told"),
    [
        (["a"], "a comparison takes two"),
        (["a", "a"], "a comparison takes two"),
        (["a", "a:nope"], "'nope' is not an arm; known: r"),
        (["a", "begun"], "begun is interrupted and has no result to compare yet"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, refs, told):
    leave(tmp_path, "a", {"r": [passes(0.5)]})
    Journal(tmp_path / "begun.journal.sqlite").close()
    with pytest.raises(EvsysError) as caught:
        compared(tmp_path, *refs)
    assert told in str(caught.value)


def test_two_experiments_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        leave(tmp_path / folder, "same", {"r": [passes(0.5)]})
    found = compared(tmp_path, str(tmp_path / "x"), str(tmp_path / "y"))
    assert [side.label for side in found.sides] == [f"{tmp_path}/x/same", f"{tmp_path}/y/same"]


def test_an_error_of_the_statistics_leaves_the_rest_of_the_comparison(tmp_path, monkeypatch):
    leave(tmp_path, "a", {"r": [passes(0.5)]}, lr=1e-3)
    leave(tmp_path, "b", {"r": [passes(0.7)]}, lr=1e-2)

    def fail(*_args, **_kwargs):
        raise FloatingPointError("overflow")

    monkeypatch.setattr("evsys_sdk.history.compare.judge_arms", fail)
    found = compared(tmp_path, "a", "b")
    assert found.verdicts == [] and found.settings and found.scores["val/tools/pass@1"] == [0.5, 0.7]
    [note] = found.notes
    assert note.startswith("no verdict by val/tools/pass@1: could not be judged: FloatingPointError: overflow")


def test_a_lone_perfect_seed_beside_seeds_that_differ_is_compared(tmp_path):
    leave(tmp_path, "a", {"r": [passes(1.0)]})
    leave(tmp_path, "b", {"r": [passes(1.0), passes(0.9)]})
    [judged] = compared(tmp_path, "a", "b").verdicts
    assert judged.verdict.arms[0].low < 1.0 and judged.verdict.arms[1].verdict in ("undecided", "equivalent")


def test_an_arm_keeps_the_interval_that_its_own_experiment_gave_it(tmp_path):
    two, steady = [passes(0.5), passes(0.6)], [passes(0.4), passes(0.41)]
    path = leave(tmp_path, "a", {"r": two, "beside": steady, "more": steady}, best="r")
    leave(tmp_path, "b", {"r": [passes(0.8), passes(0.5)]})
    scores = [
        ArmScores(arm=name, seeds=dict(enumerate(seeds)))
        for name, seeds in (("r", two), ("beside", steady), ("more", steady))
    ]
    verdict = judge_arms(scores, metric="pass@1")
    path.write_text(json.dumps({**json.loads(path.read_text()), "verdict": verdict.as_dict()}))
    [judged] = compared(tmp_path, "a", "b").verdicts
    own, here = verdict.arms[0], judged.verdict.arms[0]
    assert here.mean == own.mean and (here.low, here.high) == (own.low, own.high)
    alone = judge_arms([scores[0], ArmScores(arm="b", seeds=dict(enumerate([passes(0.8), passes(0.5)])))], metric="m")
    assert alone.arms[0].low != own.low, "what other arms are beside it moves the interval of two seeds"


def test_scores_on_training_rows_are_marked_in_the_table_the_baseline_and_the_verdict(tmp_path, capsys, monkeypatch):
    path = leave(tmp_path, "a", {"r": [passes(0.5)]})
    leave(tmp_path, "b", {"r": [passes(0.9)]})
    record = json.loads(path.read_text())
    score = {"metric": "pass@1", "value": 0.5}
    memorised = {"name": "tools", "split": "val", "scores": [score], "on_training_rows": True}
    record["runs"][0]["evals"] = [memorised]
    path.write_text(json.dumps(record))
    arms = {arm.arm: arm.training_mark for arm in compared(tmp_path, "a", "b").verdicts[0].verdict.arms}
    assert arms == {"a": "on training rows", "b": ""}
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "a", "b", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "val/tools/pass@1  0.500 (on training rows)  0.900" in printed
    assert "on shared tasks, against a (on training rows):" in printed
    assert "  a: 0.500" in printed and ", on training rows; the baseline" in printed
    assert main(["compare", "a", "b", "--dir", str(tmp_path), "--json"]) == 0
    sides = json.loads(capsys.readouterr().out)["sides"]
    assert [side["training_marks"] for side in sides] == [{"val/tools/pass@1": "on training rows"}, {}]
