"""The verdict of a finished experiment: its runs' scores, task by task, put before the judge.

In: the results of every arm, and what the config says is to be compared. Out: a `Findings` for the conclusion: which
arm is best if any is, in words, and the same as plain data. Scores of a test benchmark select nothing unless the config
says `allow_test_selection`, and then the conclusion admits it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evsys_sdk.config.metadata import Hypothesis, Metadata
from evsys_sdk.errors import Cancelled, EvsysError
from evsys_sdk.eval.arm_scores import ArmScores, Values
from evsys_sdk.eval.hypothesis import HypothesisResult, judge_hypothesis, not_judged, predicted_pair
from evsys_sdk.eval.judging import catch_statistics_errors, judge_arms
from evsys_sdk.eval.verdict import Comparison, Mode, Verdict
from evsys_sdk.eval.verdict_text import effect, verdict_lines
from evsys_sdk.protocols import EvalResult, Rollout, RunResult, Score
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.conclusion import Findings, metric_keys, score_keys
from evsys_sdk.running.task_values import error_counts, is_share_of_tasks, task_values
from evsys_sdk.score_names import is_test_score, metric_of, resolve, score_key

Arms = Mapping[str, Sequence[RunResult]]


def not_pruned(arms: Arms) -> Arms:
    """The arms that a search did not leave behind: only they have come to something that can be compared."""
    return {arm: runs for arm, runs in arms.items() if any(run.status != "pruned" for run in runs)}


def judge_experiment(
    arms: Arms, metadata: Metadata, *, searched: bool = False, name: str = "NAME", looks: int = 1
) -> Findings:
    """What the scores allow us to say; without a success metric, or scores by task, why they allow nothing.

    `searched`: the arms are trials of a search, which has no baseline unless one is named. `name`: of the experiment,
    for the command that judges it again.
    """
    success = metadata.success_metric
    if success is None:
        return _no_verdict("no success_metric is named, so arms are not ranked", arms, metadata, searched)
    try:
        verdict, keys = _judge(arms, success.name, success.mode, metadata, searched, looks)
        hypothesis = metadata.hypothesis
        judged = None
        if isinstance(hypothesis, Hypothesis):
            named = hypothesis.prediction.metric
            is_by_it = named is None or score_keys(arms, named) == keys
            judged = _hypothesis(hypothesis, arms, metadata, searched, verdict if is_by_it else None)
        with catch_statistics_errors():
            found = _findings(verdict, judged, metadata, only_test=all(map(is_test_score, keys)))
            return replace(found, lines=[*found.lines, *_another_baseline(verdict, name)])
    except Cancelled:
        raise
    except EvsysError as exc:
        return _no_verdict(str(exc), arms, metadata, searched)


def _another_baseline(verdict: Verdict, name: str) -> list[str]:
    """How to judge against another arm, where the baseline has no score and others have one."""
    if not verdict.pairs or verdict.winner is None:
        return []
    arm = next(arm.arm for arm in verdict.arms if arm.mean is not None)
    command = shlex.join(["evsys", "judge", name, "--baseline-arm", arm])
    return [f"To judge against another arm without training again: {command}"]


def _judge(
    arms: Arms, metric: str, mode: Mode, metadata: Metadata, searched: bool, looks: int = 1
) -> tuple[Verdict, list[str]]:
    """The verdict by one metric, and the scores that it means; EvsysError where there is none."""
    with catch_statistics_errors():
        keys = resolve(metric, metric_keys(arms))
        if not keys:
            raise EvsysError(f"no arm has a score for {metric}")
        baseline = metadata.baseline_arm or (None if searched else next(iter(arms)))
        untrained, start = _untrained(arms, keys)
        clusters, clustered_by = _clusters(arms, keys)
        try:
            verdict = judge_arms(
                [_arm_scores(arm, results, keys) for arm, results in arms.items()],
                metric=metric,
                mode=mode,
                baseline_arm=metadata.baseline_arm,
                untrained=untrained,
                also=_predicted(metadata, baseline),
                share=all(is_share_of_tasks(metric_of(key)) for key in keys),
                searched=searched,
                looks=looks,
                clusters=clusters,
                clustered_by=clustered_by,
            )
        except EvsysError as exc:
            raise EvsysError(f"{metric}: {exc}") from exc
        counts = error_counts(_rollouts(start, keys))
        if counts["n_errors"]:
            note = (
                f"untrained: {counts['n_errors']:,} of {counts['n_rollouts']:,} rollouts errored and count as failures"
            )
            verdict = replace(verdict, notes=[*verdict.notes, note])
        return verdict, keys


def _no_verdict(why: str, arms: Arms, metadata: Metadata, searched: bool) -> Findings:
    hypothesis = metadata.hypothesis
    if not isinstance(hypothesis, Hypothesis):
        return Findings(why_not=why)
    judged = _hypothesis(hypothesis, arms, metadata, searched) or not_judged(hypothesis, _named(metadata), why)
    return Findings(why_not=why, lines=[judged.line], data={"hypothesis_result": judged.as_dict()})


def _hypothesis(
    hypothesis: Hypothesis, arms: Arms, metadata: Metadata, searched: bool, verdict: Verdict | None = None
) -> HypothesisResult | None:
    """What became of it: by `verdict`, which is by the metric that it names, or else by its own metric; None where it
    names none and there is no verdict."""
    prediction = hypothesis.prediction
    try:
        with catch_statistics_errors():
            if verdict is not None:
                return judge_hypothesis(hypothesis, verdict)
            if not prediction.metric:
                return None
            # A comparison that was named beforehand selects nothing, so test scores may decide it.
            mode: Mode = "max" if prediction.direction == "higher" else "min"
            return judge_hypothesis(hypothesis, _judge(arms, prediction.metric, mode, metadata, searched)[0])
    except Cancelled:
        raise
    except EvsysError as exc:
        return not_judged(hypothesis, prediction.metric or _named(metadata), str(exc))


def _named(metadata: Metadata) -> str:
    return metadata.success_metric.name if metadata.success_metric else ""


def _findings(verdict: Verdict, judged: HypothesisResult | None, metadata: Metadata, *, only_test: bool) -> Findings:
    lines: list[str] = []
    if only_test and not metadata.allow_test_selection:
        verdict = replace(
            verdict, best_arm=None, winner=None,
            why_no_best="it was measured on a test benchmark only, and test scores do not select",
        )  # fmt: skip
    elif only_test and len(verdict.arms) > 1:
        lines.append(
            "Arms were picked on test scores (allow_test_selection): only tasks that nobody has looked at can say how "
            "good the one on top is."
        )
    data: dict[str, Any] = {"verdict": verdict.as_dict()}
    if judged is not None:
        data["hypothesis_result"] = judged.as_dict()
        lines.insert(0, judged.line)
    elif isinstance(metadata.hypothesis, str) and metadata.hypothesis.strip():
        data["hypothesis_in_words"] = _in_words(verdict)
        lines.insert(0, data["hypothesis_in_words"])
    return Findings(best_arm=_best(verdict), lines=[*lines, *verdict_lines(verdict)], data=data)


def _in_words(verdict: Verdict) -> str:
    """What was measured, for a hypothesis that is text: the comparison that most likely answers it, and how to write
    the next hypothesis so that it is judged."""
    found = _telling(verdict)
    if found is None or found.difference is None or verdict.constant is not None:
        return "The hypothesis is in words, and the scores do not answer it: see below."
    prediction = f"{{arm: {found.arm}, vs: {found.vs}, direction: {'higher' if verdict.mode == 'max' else 'lower'}}}"
    return (
        f"The hypothesis is in words, so it is not judged. Measured: {found.arm} is {effect(found, verdict)}, "
        f"{found.verdict}. To have the next one judged: metadata.hypothesis: {{claim: ..., prediction: {prediction}}}."
    )


def _telling(verdict: Verdict) -> Comparison | None:
    """The arm on top against the baseline, or the next one where it is the baseline; without one, the untrained."""
    top = verdict.winner.arm if verdict.winner else None
    arms = sorted((arm for arm in verdict.arms if arm.mean is not None), key=lambda arm: arm.arm != top)
    found = [arm.vs_baseline for arm in arms if arm.vs_baseline] + verdict.pairs
    return next(iter([*found, *(arm.vs_untrained for arm in arms if arm.vs_untrained)]), None)


def _best(verdict: Verdict) -> str | None:
    """The best arm; an experiment of one arm has no other."""
    only = verdict.winner.arm if len(verdict.arms) == 1 and verdict.winner else None
    return verdict.best_arm or only


def _predicted(metadata: Metadata, baseline: str | None) -> list[tuple[str, str]]:
    hypothesis = metadata.hypothesis
    return [predicted_pair(hypothesis.prediction, baseline)] if isinstance(hypothesis, Hypothesis) else []


def _arm_scores(arm: str, results: Sequence[RunResult], keys: Sequence[str]) -> ArmScores:
    seeds: dict[int, Values] = {}
    failed: dict[int, str] = {}
    rollouts: list[Rollout] = []
    for number, result in enumerate(results):
        seed = int(result.extras.get("seed", number))
        try:
            if result.status != "completed":
                raise EvsysError(result.error or result.status)
            seeds[seed] = _values(_trained(result), keys, result.metrics)
            rollouts += _rollouts(_trained(result), keys)
        except EvsysError as exc:
            failed[seed] = str(exc)
    return ArmScores(arm=arm, seeds=seeds, failed=failed, **error_counts(rollouts))


def _rollouts(evals: Sequence[EvalResult], keys: Sequence[str]) -> list[Rollout]:
    """Those behind the scores that `keys` mean; of a benchmark that was scored several times, of the last time."""
    last = {(one.split, one.name): one for one in evals if any(_key(one, score) in keys for score in one.scores)}
    return [rollout for one in last.values() for rollout in one.rollouts]


def _trained(result: RunResult) -> list[EvalResult]:
    """The evaluations of the weights that the run ended with: those whose numbers are the run's own."""
    return [
        found
        for found in result.extras.get("evals", [])
        if found.step != 0
        and (found.error or all(result.metrics.get(key) == value for key, value in eval_metrics(found).items()))
    ]


def _values(evals: Sequence[EvalResult], keys: Sequence[str], numbers: Mapping[str, float]) -> Values:
    """The metric on each task, tasks of several benchmarks side by side; a number that no benchmark measured, such as
    the final loss, counts as one task."""
    found = {key: (one, score) for one in evals for score in one.scores for key in [_key(one, score)] if key in keys}
    values: dict[str, float] = {}
    for key in keys:
        if key not in found and key in numbers:
            values[key] = numbers[key]
            continue
        if key not in found:
            error = next((one.error for one in evals if one.error), None)
            raise EvsysError(error or f"it was not scored by {key}")
        result, score = found[key]
        if score.value is None:
            raise EvsysError(result.error or score.error or "the score is not valid")
        values |= {f"{key}/{task}": value for task, value in task_values(result.rollouts, score.metric).items()}
    return values


def _clusters(arms: Arms, keys: Sequence[str]) -> tuple[dict[str, str], str]:
    """Task -> the template it was made from, for tasks as `_values` names them, and how that is known."""
    clusters: dict[str, str] = {}
    found_by: dict[str, None] = {}
    for one in (one for results in arms.values() for run in results for one in run.extras.get("evals", [])):
        for key in {_key(one, score) for score in one.scores} & set(keys):
            clusters |= {f"{key}/{task}": f"{key}/{cluster}" for task, cluster in one.clusters.items()}
            found_by |= {one.clustered_by: None} if one.clusters else {}
    return clusters, ", ".join(found_by)


def _key(result: EvalResult, score: Score) -> str:
    return score_key(result.split, result.name, score.metric)


def _untrained(arms: Arms, keys: Sequence[str]) -> tuple[Values | None, list[EvalResult]]:
    """What the untrained model scored, if it was scored on the same benchmarks, and the evaluations that say so."""
    for result in (result for results in arms.values() for result in results):
        start = [found for found in result.extras.get("evals", []) if found.step == 0]
        try:
            return _values(start, keys, {}), start
        except EvsysError:
            continue
    return None, []
