"""A sweep that goes partly wrong, and what a person is told of it.

One arm crashes, one cannot be scored, and one owes its mean to a lucky seed.
"""

from __future__ import annotations

import json

import pytest
import yaml

from evsys_sdk.experiment.experiment import Experiment, RunOptions

WORDS = [f"{first}{second}" for first in ("ba", "de", "fi", "go", "ku", "la", "me", "ni") for second in "bdfgl"]

EXTENSIONS = """
from evsys_sdk import register_algorithm, register_verifier
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.training.batch import TrainingBatch


@register_algorithm("lucky_sft")
class LuckySFT(SFT):
    '''Learns the first half of the rows, but with one seed all of them.'''

    async def setup(self, ctx, backend):
        if ctx.seed != 43:
            ctx.extras["train_rows"] = ctx.extras["train_rows"][:20]
        await super().setup(ctx, backend)


@register_verifier("fussy")
def fussy(model_output, expected, params):
    '''Cannot grade an answer that shouts.'''
    if model_output.isupper():
        raise RuntimeError("cannot read capital letters")
    return float(model_output.strip() == expected)
"""


def _arm(name, rows, kind="sft", **backend):
    return {
        "name": name,
        "data": {"path": f"data/{rows}.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
        "model": {"name": "table"},
        "algorithm": {"kind": kind, "params": {"learning_rate": 0.01, "max_steps": 30, "batch_size": 8}},
        "backend": {"kind": "mock", "params": backend},
    }


@pytest.fixture
def sweep(project):
    (project.root / "extensions.py").write_text(EXTENSIONS)
    rows = [{"prompt": f"say {word}", "completion": word} for word in WORDS]
    project.write_rows("data/all.jsonl", rows)
    project.write_rows("data/half.jsonl", rows[:20])
    project.write_rows("data/loud.jsonl", [{**row, "completion": row["completion"].upper()} for row in rows])
    verifier = {"kind": "in_process", "fn_name": "fussy"}
    tasks = [
        {"task_id": word, "instruction": f"say {word}", "verifier": {**verifier, "expected": word}} for word in WORDS
    ]
    project.write_rows("bench/tasks.jsonl", tasks)

    def write(*arms, split="val", **metadata):
        entry = {"name": "words", "path": "bench", "split": split, "temperature": 0}
        settings = {
            "version": 1, "name": "sweep", "output_dir": "out", "imports": ["extensions"], "n_repeats": 3,
            "leakage": "off", "log_store": {"kind": "jsonl"}, "runs": list(arms),
            "metadata": {"success_metric": f"{split}.pass@1", "benchmark": [entry], **metadata},
        }  # fmt: skip
        path = project.root / "sweep.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


ARMS = {
    "half": _arm("half", "half"),
    "all": _arm("all", "all"),
    "lucky": _arm("lucky", "all", kind="lucky_sft"),
    "crashes": _arm("crashes", "all", fail_at_step=5),
    "loud": _arm("loud", "loud"),
}


@pytest.fixture
def told(project, sweep):
    """Run these arms; the conclusion's lines."""

    def run(*names, **options):
        result = Experiment.from_yaml(sweep(*(ARMS[name] for name in names), **options)).run()
        return result, result.conclusion.text.splitlines()

    return run


def test_a_crashed_arm_an_unscored_one_and_a_lucky_seed_are_told_for_what_they_are(project, sweep):
    found = project.evsys("run", sweep(*ARMS.values()))
    assert found.returncode == 2 and "Traceback" not in found.stderr
    lines = found.stdout.partition("\n\n")[2].splitlines()
    assert lines[0] == (
        "Best arm by val.pass@1: all, 50.0 points above half (95 % CI 33.8 to 65.4; p < 0.001, Holm-corrected)."
    )
    assert lines[1].startswith("all scored 1.000, the highest of 3 scored arms; ")
    assert lines[1].endswith("; no significant difference from lucky.")
    assert lines[2] == "half: 0.500 [0.346, 0.654], 40 tasks, 3 seeds; the baseline"
    lucky = next(line for line in lines if line.startswith("lucky: "))
    assert (
        lucky.startswith("lucky: 0.667 [")
        and "; undecided: 16.7 points above half (95 % CI -55.0 to 88.4; " in lucky
        and "more seeds per arm" in lucky
    )
    seeds = "(42: 0.500, 43: 1.000, 44: 0.500)"
    assert f"Note: lucky: its seeds differ by more than noise explains {seeds}; its mean rests on them." in lines
    assert [line for line in lines if line.startswith("crashes")] == [
        "crashes: not ranked (the mock backend fails at step 5 as configured (fail_at_step))"
    ]
    loud = (
        "all 40 rollouts errored; the first: verifier 'fussy' on task 'bab' failed: RuntimeError: cannot read capital"
    )
    assert [line for line in lines if line.startswith("loud")] == [f"loud: not ranked (invalid: {loud} letters)"]
    _the_page_says_the_same((project.root / "out/sweep.experiment.md").read_text(), lines)
    _the_record_says_the_same(json.loads((project.root / "out/sweep.experiment_result.json").read_text()))


def _the_page_says_the_same(page, lines):
    assert "\n5 arms, 15 runs: 12 completed, 3 failed.\n" in page
    assert all(f"\n- {line}\n" in page for line in lines[:-1])  # but for where the record lies
    assert "| lucky | completed | 3 | 0.667 [" in page and " | undecided, +16.7 points [-55.0, +88.4] |" in page
    assert "| crashes | failed | 0 of 3 | not ranked | - | - |" in page
    assert "\n- crashes, seeds 42, 43, 44: failed (the mock backend fails at step 5 as configured (" in page
    assert page.count("val/words was not scored (invalid: all 40 rollouts errored") == 1


def _the_record_says_the_same(record):
    assert record["best_arm"] == "all"
    arms = {arm["arm"]: arm for arm in record["verdict"]["arms"]}
    assert {name: arm["verdict"] for name, arm in arms.items()} == {
        "half": None, "all": "better", "lucky": "undecided", "crashes": None, "loud": None,
    }  # fmt: skip
    assert arms["crashes"]["mean"] is None and arms["loud"]["mean"] is None
    assert set(arms["crashes"]["failed_seeds"]) == {"42", "43", "44"}
    assert arms["lucky"]["seed_means"] == {"42": 0.5, "43": 1.0, "44": 0.5}
    assert arms["lucky"]["vs_baseline"]["more_seeds"] is None
    assert arms["lucky"]["vs_baseline"]["why"].startswith("the runs scatter too much to settle it with 20 more seeds")


def test_a_lucky_seed_alone_makes_no_winner(told):
    result, lines = told("half", "lucky")
    assert result.best_arm is None and lines[0] == "No best arm by val.pass@1: no arm beats the baseline."


def test_a_baseline_that_crashed_is_not_replaced(told):
    result, lines = told("crashes", "half", "all")
    assert result.best_arm == "all", "of the two that have a score"
    assert lines[0] == (
        "Best of the 2 scored arms by val.pass@1: all, better than half; the baseline crashes has no score, so no arm "
        "is compared with it."
    )
    assert lines[1].startswith("all scored 1.000, the highest of 2 scored arms; ")
    assert lines[2] == (
        "all against half: better: 50.0 points above half (95 % CI 33.8 to 65.4; p < 0.001, Holm-corrected)"
    )
    assert lines[-1] == "To judge against another arm without training again: evsys judge sweep --baseline-arm half"


def test_another_baseline_can_be_named(told):
    assert told("crashes", "half", "all", baseline_arm="half")[0].best_arm == "all"


def test_one_arm_is_told_in_one_line(told):
    result, lines = told("half")
    assert lines == ["half: 0.500 [0.346, 0.654], 40 tasks, 3 seeds"]
    page = (result.output_dir / "sweep.experiment.md").read_text()
    assert "\n- half: 0.500 [0.346, 0.654], 40 tasks, 3 seeds\n" in page
    assert "baseline" not in page and "winner" not in page and "highest" not in page
    assert "\n| arm | status | seeds | val.pass@1 | tasks |\n" in page


def test_test_scores_pick_no_arm(told):
    result, lines = told("half", "all", split="test")
    assert result.best_arm is None and result.conclusion.findings.as_dict()["verdict"]["winner"] is None
    assert lines[0] == (
        "No best arm by test.pass@1: it was measured on a test benchmark only, and test scores do not select."
    )
    assert "highest" not in result.conclusion.text
    page = (result.output_dir / "sweep.experiment.md").read_text()
    assert "That is a test benchmark, and it selects nothing." in page and "**all**" not in page


def test_test_scores_pick_an_arm_where_that_is_allowed_and_it_is_admitted(told):
    result, lines = told("half", "all", split="test", allow_test_selection=True)
    assert result.best_arm == "all"
    assert lines[0].startswith("Arms were picked on test scores (allow_test_selection): only tasks that have not")
    page = (result.output_dir / "sweep.experiment.md").read_text()
    assert "(`allow_test_selection`): a report of this choice would have to admit" in page


PREDICTION = {"claim": "more rows", "prediction": {"arm": "all", "vs": "half", "at_least": 0.1}, "confidence": 0.9}
DESCRIPTION = "; its runs had finished before this was written: a description, not a prediction."


@pytest.mark.parametrize(("fork", "name"), [(False, "second"), (True, "sweep-2")])
def test_a_hypothesis_written_after_the_results_is_a_description(told, sweep, fork, name):
    told("half", "all")
    path = sweep(ARMS["half"], ARMS["all"], hypothesis=PREDICTION)
    experiment = Experiment.from_yaml(path, overrides=[] if fork else [f"name={name}"])
    for _ in range(2):  # and when it is told again
        result = experiment.run(RunOptions(fork=fork))
        record = json.loads((result.output_dir / f"{name}.experiment_result.json").read_text())
        judged = record["hypothesis_result"]
        assert (judged["outcome"], judged["known_before"], judged["brier"]) == ("supported", True, None)
        [line] = [
            line for line in record["conclusion"].splitlines() if line.startswith("The hypothesis is supported: ")
        ]
        assert line.endswith(DESCRIPTION)
        page = (result.output_dir / f"{name}.experiment.md").read_text()
        [line] = [line for line in page.splitlines() if line.startswith("**supported**: ")]
        assert line.endswith(DESCRIPTION) and ("A child of the experiment `sweep`." in page) is fork


def test_a_hypothesis_written_before_the_results_is_a_prediction_also_when_it_is_told_again(told):
    for _ in range(2):
        result, _ = told("half", "all", hypothesis=PREDICTION)
        judged = result.conclusion.findings.as_dict()["hypothesis_result"]
        assert not judged["known_before"] and judged["brier"] == pytest.approx(0.01)
        assert "before this was written" not in result.conclusion.text


@pytest.mark.parametrize(
    "place",
    [
        "evsys_sdk.experiment.verdict.judge_arms",
        "evsys_sdk.experiment.experiment.conclude",
        "evsys_sdk.stats.judge.more_tasks",
        "evsys_sdk.report.figures.forest",
        "evsys_sdk.report.page.arms_table",
    ],
)
def test_an_error_of_the_statistics_never_costs_the_record(sweep, monkeypatch, place):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("float division by zero")

    claim = {"claim": "all is better", "prediction": {"arm": "all"}}
    path = sweep(_arm("half", "half"), _arm("again", "half"), _arm("all", "all"), hypothesis=claim)
    monkeypatch.setattr(place, fail)
    result = Experiment.from_yaml(path).run(RunOptions())
    record = json.loads((result.output_dir / "sweep.experiment_result.json").read_text())
    assert result.completed and [run["status"] for run in record["runs"]] == ["completed"] * 9
    assert all(run["metrics"]["val/words/pass@1"] >= 0.5 for run in record["runs"])
    if not place.startswith("evsys_sdk.report"):
        assert "could not be judged: ZeroDivisionError: float division by zero" in record["conclusion"]
        assert "could not be judged" in (result.output_dir / "sweep.experiment.md").read_text()
    if place.startswith("evsys_sdk.experiment.experiment"):
        assert [arm["statuses"] for arm in record["arms"]] == [["completed"] * 3] * 3


GRADER = """
from evsys_sdk import register_verifier


@register_verifier("only_right_answers")
def only_right_answers(model_output, expected, params):
    if model_output.strip() != expected:
        raise RuntimeError("the grader was gone")
    return 1.0
"""


def test_an_untrained_model_whose_rollouts_all_errored_is_missed_by_name_wherever_its_score_would_stand(
    project, minimal_run
):
    (project.root / "grader.py").write_text(GRADER)
    project.write_tasks(fn_name="only_right_answers")
    entry = {"name": "colours", "path": "bench", "split": "val", "temperature": 0, "baseline": True}
    run = minimal_run(algorithm__params={"learning_rate": 0.01, "max_steps": 30, "batch_size": 8})
    metadata = {"benchmark": [entry], "success_metric": "val.pass@1"}
    settings = {"run": run, "metadata": metadata, "imports": ["grader"], "leakage": "off"}
    done = project.evsys("run", project.config(**settings), check=True)
    warning = (
        "Warning: no score of the untrained model on val/colours: all 4 rollouts errored; the first: verifier 'only_"
        "right_answers' on task 'red' failed: RuntimeError: the grader was gone. No arm is compared with it there."
    )
    text = " ".join(done.stdout.split())
    assert "4 tasks (untrained: not scored, all 4 rollouts errored)" in text and warning in text
    [record] = (project.root / "outputs").glob("*.experiment_result.json")
    assert warning in json.loads(record.read_text())["conclusion"]
    [page] = [file.read_text() for file in (project.root / "outputs").glob("*.experiment.md")]
    assert warning in page and "| untrained | no score: 4 of 4 rollouts errored |" in page
    assert "val/colours was not scored before training (" in page
    shown = project.evsys("show", check=True).stdout
    assert "untrained: val/colours/pass@1 no score (4 of 4 rollouts errored)" in shown
    assert warning in " ".join(shown.split())
