"""What a probe says: log probabilities or completions of a target beside those of the weights that were scored.

In: a fingerprint and the target's answers. Out: a `ProbeResult` that claims no more than was compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from evsys_sdk.protocols import Fingerprint, ProbeResult

ROUNDED = 5e-2
"""How far log probabilities move where one of the two sides computes in bfloat16. Measured on a tiny model: 0.02."""


def allowed(given: float | None, usual: float, fingerprint: Fingerprint) -> float:
    """The tolerance: the one in the config, else the target's usual one, wider where the fingerprint is rounded."""
    return given or (usual if fingerprint.precision == "float32" else max(usual, ROUNDED))


def compare_logprobs(
    fingerprint: Fingerprint, answers: Sequence[Sequence[float]], *, tolerance: float, how: str
) -> ProbeResult:
    """`answers`: for each case the target's log probabilities of every token but the first."""
    differences: list[float] = []
    for case, answer in zip(fingerprint.cases, answers, strict=True):
        if len(answer) != len(case.logprobs):
            return _refuse(
                f"{how}: {len(answer)} log probabilities of {case.text!r}, where {len(case.logprobs)} are expected: "
                "the target splits the text otherwise",
                tolerance,
            )
        differences += [abs(ours - theirs) for ours, theirs in zip(case.logprobs, answer, strict=True)]
    return _judge(fingerprint, differences, tolerance=tolerance, how=how)


def compare_top(
    fingerprint: Fingerprint, answers: Sequence[Mapping[int, float]], *, tolerance: float, how: str
) -> ProbeResult:
    """`answers`: for each case the target's likeliest tokens in the last place, with their log probabilities."""
    differences: list[float] = []
    for case, answer in zip(fingerprint.cases, answers, strict=True):
        shared = [abs(value - answer[token]) for token, value in case.top if token in answer]
        # The last ones of ten may be another ten's eleventh; the likeliest is in both.
        if not case.top or case.top[0][0] not in answer or len(shared) * 2 < len(case.top):
            return _refuse(f"{how}: after {case.text!r} the likeliest tokens are others", tolerance)
        differences += shared
    return _judge(fingerprint, differences, tolerance=tolerance, how=how)


def compare_completions(fingerprint: Fingerprint, answers: Sequence[str], *, how: str) -> ProbeResult:
    """Greedy completions, where a target gives no log probabilities: weaker, and said to be."""
    wrong = [
        f"{case.text!r} is completed by {answer!r}, not {case.greedy!r}"
        for case, answer in zip(fingerprint.cases, answers, strict=True)
        if answer != case.greedy
    ]
    detail = f"{how}: greedy completions of {len(answers)} prompts compared, because it gives no log probabilities; "
    return ProbeResult(compared="tokens", ok=not wrong, detail=detail + (wrong[0] if wrong else "all are the same"))


def _judge(fingerprint: Fingerprint, differences: Sequence[float], *, tolerance: float, how: str) -> ProbeResult:
    # A NaN compares as neither larger nor smaller, and must not pass.
    largest = math.inf if any(math.isnan(one) for one in differences) else max(differences, default=math.inf)
    ok = largest <= tolerance
    detail = (
        f"{how}: {len(differences)} log probabilities on {len(fingerprint.cases)} prompts differ by at most "
        f"{largest:.2g} from those of the scored weights (tolerance {tolerance:g})"
    )
    if ok and fingerprint.contrast is not None and fingerprint.contrast <= tolerance:
        detail += (
            f"; the base model differs by only {fingerprint.contrast:.2g} there, so this cannot tell the trained "
            "weights from it"
        )
    difference = largest if math.isfinite(largest) else None
    return ProbeResult(compared="logprobs", ok=ok, detail=detail, difference=difference, tolerance=tolerance)


def _refuse(detail: str, tolerance: float) -> ProbeResult:
    return ProbeResult(compared="logprobs", ok=False, detail=detail, tolerance=tolerance)
