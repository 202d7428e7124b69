"""The verdict of a finished experiment: its runs' scores, task by task, put before the judge.

In: the results of every arm, and what the config says is to be compared. Out: `VerdictFindings` for the conclusion:
the verdict, what became of the hypothesis, and the lines that say both. Scores of a test benchmark select nothing
unless the config says `allow_test_selection`, and then the conclusion admits it. A hypothesis whose deciding runs had
finished before the launch is no prediction, and the sentence that tells its outcome says so.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from evsys_sdk.config.metadata import Hypothesis, Metadata
from evsys_sdk.constants import START, UNTRAINED
from evsys_sdk.errors import Cancelled, EvsysError
from evsys_sdk.format import errors_text
from evsys_sdk.history.compare import error_counts, is_share_of_tasks, task_values
from evsys_sdk.protocols import EvalResult, Rollout, RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.registry import better_direction
from evsys_sdk.report.conclusion import VerdictFindings, metric_key, metric_keys, score_keys, training_mark_of
from evsys_sdk.report.verdict_text import arm_score_text, constant_scores, effect, training_note, verdict_lines
from evsys_sdk.score_names import is_test_score, metric_of, parse_key, resolve
from evsys_sdk.stats.arm_scores import ArmScores, Values
from evsys_sdk.stats.hypothesis import HypothesisResult, judge_hypothesis, not_judged, predicted_pair
from evsys_sdk.stats.judge import catch_statistics_errors, judge_arms
from evsys_sdk.stats.verdict import Mode, Verdict

Arms = Mapping[str, Sequence[RunResult]]


def not_pruned(arms: Arms) -> Arms:
    """The arms that a search did not leave behind: only they have a result that can be compared."""
    return {arm: runs for arm, runs in arms.items() if any(run.status != "pruned" for run in runs)}


def judge_experiment(
    arms: Arms, metadata: Metadata, *, searched: bool = False, name: str = "NAME", looks: int = 1
) -> VerdictFindings:
    """What the scores allow us to say; without a success metric, or scores by task, why they allow nothing.

    `searched`: the arms are trials of a search, which has no baseline unless one is named. `name`: of the experiment,
    for the command that judges it again.
    """
    success = metadata.success_metric
    if success is None:
        return _no_verdict("no success_metric is named, so arms are not ranked", arms, metadata, searched)
    try:
        verdict, keys = _judge(arms, success.name, success.direction, metadata, searched, looks)
        hypothesis = metadata.hypothesis
        judged = None
        if isinstance(hypothesis, Hypothesis):
            named = hypothesis.prediction.metric
            is_by_it = named is None or score_keys(arms, named) == keys
            judged = _hypothesis(hypothesis, arms, metadata, searched, verdict if is_by_it else None)
        with catch_statistics_errors():
            found = _findings(verdict, judged, metadata, keys)
            if verdict.pairs and verdict.winner is not None:  # the baseline has no score, and others have one
                arm = next(arm.arm for arm in verdict.arms if arm.mean is not None)
                command = shlex.join(["evsys", "judge", name, "--baseline-arm", arm])
                line = f"To judge against another arm without training again: {command}"
                found = replace(found, lines=[*found.lines, line])
            return found
    except Cancelled:
        raise
    except EvsysError as exc:
        return _no_verdict(str(exc), arms, metadata, searched)


def _judge(
    arms: Arms, metric: str, mode: Mode, metadata: Metadata, searched: bool, looks: int = 1
) -> tuple[Verdict, list[str]]:
    """The verdict by one metric, and the scores that it means; EvsysError where there is none."""
    with catch_statistics_errors():
        keys = resolve(metric, metric_keys(arms))
        if not keys:
            raise EvsysError(f"no arm has a score for {metric}")
        hypothesis, predicted = metadata.hypothesis, []
        if isinstance(hypothesis, Hypothesis):
            baseline = metadata.baseline_arm or (None if searched else next(iter(arms)))
            predicted = [predicted_pair(hypothesis.prediction, baseline)]
        # Task -> the template it was made from, for tasks as `_values` names them, and how that is known.
        clusters: dict[str, str] = {}
        clustered_by: dict[str, None] = {}
        for one in (one for results in arms.values() for run in results for one in run.evals):
            for key in {metric_key(one, score) for score in one.scores} & set(keys):
                # With the key in front, as two benchmarks may have tasks or templates of one name.
                clusters |= {f"{key}/{task}": f"{key}/{cluster}" for task, cluster in one.clusters.items()}
                clustered_by |= {one.clustered_by: None} if one.clusters else {}
        untrained, start = _score_starts(arms, keys)
        try:
            verdict = judge_arms(
                [_arm_scores(arm, results, keys) for arm, results in arms.items()],
                metric=metric,
                mode=mode,
                baseline_arm=metadata.baseline_arm,
                starts=untrained,
                also=predicted,
                share=all(is_share_of_tasks(metric_of(key)) for key in keys),
                searched=searched,
                looks=looks,
                clusters=clusters,
                clustered_by=", ".join(clustered_by),
                per_run=not any(map(parse_key, keys)),
                unit=_unit(arms, keys),
                started_from=START if any(one.start for one in start) else UNTRAINED,
            )
        except EvsysError as exc:
            raise EvsysError(f"{metric}: {exc}") from exc
        counts = error_counts(_rollouts(start, keys))
        if counts["n_errors"]:
            errors = errors_text(counts["n_errors"], counts["n_rollouts"])
            note = f"before training: {errors} and count as failures"
            verdict = replace(verdict, notes=[*verdict.notes, note])
        return verdict, keys


def _unit(arms: Arms, keys: Sequence[str]) -> str:
    """What the scores that `keys` mean are counted in."""
    evals = (one for results in arms.values() for run in results for one in run.evals)
    return next((score.unit for one in evals for score in one.scores if metric_key(one, score) in keys), "")


def _no_verdict(why: str, arms: Arms, metadata: Metadata, searched: bool) -> VerdictFindings:
    hypothesis = metadata.hypothesis
    if isinstance(hypothesis, str) and hypothesis.strip():
        needs = "" if metadata.success_metric else "metadata.success_metric and "
        line = (
            "The hypothesis is in words, and there is no verdict to answer it with. To have the next one judged: "
            f"{needs}metadata.hypothesis: {{claim: ..., prediction: {{arm: {next(iter(arms), '...')}, vs: ...}}}}."
        )
        return VerdictFindings(why_not=why, lines=[line], hypothesis_in_words=line)
    if not isinstance(hypothesis, Hypothesis):
        return VerdictFindings(why_not=why)
    judged = _hypothesis(hypothesis, arms, metadata, searched) or not_judged(hypothesis, _named_metric(metadata), why)
    return VerdictFindings(why_not=why, lines=[judged.line], hypothesis_result=judged)


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
            named: Mode | None = None
            if prediction.direction is not None:
                named = "max" if prediction.direction == "higher" else "min"
            mode = better_direction(prediction.metric, named)
            return judge_hypothesis(hypothesis, _judge(arms, prediction.metric, mode, metadata, searched)[0])
    except Cancelled:
        raise
    except EvsysError as exc:
        return not_judged(hypothesis, prediction.metric or _named_metric(metadata), str(exc))


def _named_metric(metadata: Metadata) -> str:
    return metadata.success_metric.name if metadata.success_metric else ""


def _findings(
    verdict: Verdict, judged: HypothesisResult | None, metadata: Metadata, keys: Sequence[str]
) -> VerdictFindings:
    lines: list[str] = []
    only_test = all(map(is_test_score, keys))
    if only_test and not metadata.allow_test_selection:
        verdict = replace(
            verdict, best_arm=None, winner=None,
            why_no_best="it was measured on a test benchmark only, and test scores do not select",
        )  # fmt: skip
    elif only_test and len(verdict.arms) > 1:
        lines.append(
            "Arms were picked on test scores (allow_test_selection): only tasks that have not been looked at can say "
            "how good the one on top is."
        )
    in_words = ""
    if judged is not None:
        lines.insert(0, judged.line)
    elif isinstance(metadata.hypothesis, str) and metadata.hypothesis.strip():
        in_words = _answer_in_words(verdict)
        lines.insert(0, in_words)
    # An arm with many errors says so before anything is read into its score.
    written = verdict_lines(verdict)
    warnings = [line for line in written if line.startswith("Warning: ")]
    rest = [line for line in written if line not in warnings]
    # An experiment of one arm has no other.
    only = verdict.winner.arm if len(verdict.arms) == 1 and verdict.winner else None
    return VerdictFindings(
        best_arm=verdict.best_arm or only,
        lines=[*warnings, *lines, *rest],
        verdict=verdict,
        hypothesis_result=judged,
        hypothesis_in_words=in_words,
    )


def _answer_in_words(verdict: Verdict) -> str:
    """What was measured, for a hypothesis that is text: the comparison that most likely answers it, and how to write
    the next hypothesis so that it is judged."""
    # The arm on top against the baseline, or the next one where it is the baseline; without one, the untrained.
    top = verdict.winner.arm if verdict.winner else None
    scored = [arm for arm in verdict.arms if arm.mean is not None]
    arms = sorted(scored, key=lambda arm: arm.arm != top)
    compared = [arm.vs_baseline for arm in arms if arm.vs_baseline] + verdict.pairs
    found = next(iter([*compared, *(arm.vs_untrained for arm in arms if arm.vs_untrained)]), None)
    alone = "<another arm>" if verdict.per_run else UNTRAINED
    if not scored:
        arm, vs, measured = verdict.arms[0].arm, alone, "no arm has a score"
    elif found is None or found.difference is None:
        arm, vs, measured = scored[0].arm, alone, f"{scored[0].arm} scored {arm_score_text(scored[0], verdict)}"
    elif verdict.constant is not None and len(scored) > 1:
        arm, vs, measured = found.arm, found.vs, constant_scores(verdict).lower()
    else:
        arm, vs = found.arm, found.vs
        mark = next(training_note(one) for one in scored if one.arm == arm)
        verb = "has" if found.difference == 0 else "is"  # the same mean as another; 3 points above it
        measured = f"{arm}{mark} {verb} {effect(found, verdict)}, {found.verdict}"
        if found.verdict == "worse" and vs != UNTRAINED:  # the next prediction is that the better one is better
            arm, vs = vs, arm
    # A single arm can only be compared with the model before training, which then has to be scored.
    untrained = " and `baseline: true` in its benchmark" if vs == UNTRAINED and found is None else ""
    # Without a direction the prediction is that `arm` is the better one, whichever way that is for the metric.
    return (
        f"The hypothesis is in words, so it is not judged. Measured: {measured}. To have the next one judged: "
        f"metadata.hypothesis: {{claim: ..., prediction: {{arm: {arm}, vs: {vs}}}}}{untrained}."
    )


def _arm_scores(arm: str, results: Sequence[RunResult], keys: Sequence[str]) -> ArmScores:
    seeds: dict[int, Values] = {}
    failed: dict[int, str] = {}
    rollouts: list[Rollout] = []
    for number, result in enumerate(results):
        seed = number if result.seed is None else result.seed
        try:
            if result.status != "completed":
                raise EvsysError(result.error or result.status)
            seeds[seed] = _values(_evals_of_final_weights(result), keys, result.metrics)
            rollouts += _rollouts(_evals_of_final_weights(result), keys)
        except EvsysError as exc:
            failed[seed] = str(exc)
    mark = training_mark_of(results, keys)
    return ArmScores(arm=arm, seeds=seeds, failed=failed, training_mark=mark, **error_counts(rollouts))


def _rollouts(evals: Sequence[EvalResult], keys: Sequence[str]) -> list[Rollout]:
    """Those behind the scores that `keys` mean; of a benchmark that was scored several times, of the last time."""
    last = {(one.split, one.name): one for one in evals if any(metric_key(one, score) in keys for score in one.scores)}
    return [rollout for one in last.values() for rollout in one.rollouts]


def _evals_of_final_weights(result: RunResult) -> list[EvalResult]:
    """The evaluations of the weights that the run ended with: those whose numbers are the run's own."""
    return [
        found
        for found in result.final_evals
        if found.step != 0
        and (found.error or all(result.metrics.get(key) == value for key, value in eval_metrics(found).items()))
    ]


def _values(evals: Sequence[EvalResult], keys: Sequence[str], numbers: Mapping[str, float]) -> Values:
    """The metric on each task, tasks of several benchmarks side by side; a number that no benchmark measured, such as
    the final loss, counts as one task."""
    found = {
        key: (one, score) for one in evals for score in one.scores for key in [metric_key(one, score)] if key in keys
    }
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


def _score_starts(arms: Arms, keys: Sequence[str]) -> tuple[dict[str, Values], list[EvalResult]]:
    """What each arm scored before training, if that was scored on the same benchmarks, and the evaluations that say so.
    Weights that several runs start from are one model: the first scores of them stand for all."""
    by_start: dict[str, tuple[Values, list[EvalResult]]] = {}
    found: dict[str, Values] = {}
    for arm, results in arms.items():
        for result in results:
            start = [one for one in result.evals if one.step == 0]
            name = next((one.start for one in start), None)
            if name is None:
                continue
            try:
                by_start.setdefault(name, (_values(start, keys, {}), start))
            except EvsysError:
                continue
            found.setdefault(arm, by_start[name][0])
    if len(by_start) == 1:  # one model, also for arms whose own runs did not get to score it
        found = {arm: next(iter(by_start.values()))[0] for arm in arms}
    return found, [one for _, start in by_start.values() for one in start]


def note_post_hoc(
    findings: VerdictFindings, arms: Mapping[str, Sequence[RunResult]], launched: float | None
) -> VerdictFindings:
    """The findings, admitting where runs that decide the hypothesis had finished before the launch: no Brier score."""
    judged = findings.hypothesis_result
    if judged is None or launched is None:
        return findings
    runs = [run for arm in dict.fromkeys([judged.arm, judged.vs]) for run in arms.get(arm, ())]
    # Only a run that was reused can have been known; one that finished later in an experiment beside this was not.
    known = sum(
        run.reused_from is not None
        and run.finished_before is not None
        and datetime.fromisoformat(run.finished_before).timestamp() < launched
        for run in runs
    )
    if not known:
        return findings
    whose = "its run" if len(runs) == 1 else "its runs"
    note = f"{whose} had finished before this was written: a description, not a prediction"
    if known < len(runs):
        note = f"{known} of its {len(runs)} runs had finished before this was written: not wholly a prediction"
    noted = replace(judged, why=f"{judged.why}; {note}", brier=None, known_before=True)
    lines = [noted.line if line == judged.line else line for line in findings.lines]
    return replace(findings, lines=lines, hypothesis_result=noted)
