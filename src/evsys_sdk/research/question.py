"""What a model or an agent is asked, and how its answer is read.

In: the state of the research and its space. Out: a text with the recipe, what may change, the history and the decisions
so far; and from the answer's text, the changes with their claim. No test score is in the state, and none gets into the
text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from pydantic import Field, ValidationError

from evsys_sdk.config.base import JsonDict, Name, Strict
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.format import interval_text, shown
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import ResearchState, Trial, apply_changes

PAST = 30
"""How many decisions are listed, the newest."""
LONGEST_WHY = 160
LONGEST_ANSWER = 20_000
"""Characters of an answer that are read, the last ones."""
FORM = '{"changes": {"<dotted setting>": <new value>}, "claim": "<one sentence>", "confidence": <0 to 1>}'


class ProposedChange(Strict):
    """The answer that is asked for."""

    changes: JsonDict = Field(min_length=1)
    """Dotted setting of the run -> its new value."""
    claim: Name
    confidence: float | None = Field(default=None, ge=0, le=1)


def question_text(state: ResearchState, space: Space | None, rng: random.Random) -> str:
    """The whole question."""
    incumbent = state.incumbent
    assert incumbent is not None  # no one is asked before trial 0 has a score
    better = "higher" if state.direction == "max" else "lower"
    score = "no score"
    if incumbent.score is not None:
        score = f"score {interval_text(incumbent.score, incumbent.low, incumbent.high)}"
    parts = [
        f"You improve a training recipe. It is measured by {state.metric}; {better} is better.",
        f"## The best recipe so far (trial {incumbent.number}, {score})\n" + json.dumps(incumbent.recipe, indent=1),
    ]
    if space is not None:
        lines = [f"- {path}: {one.bounds_text}" for path, one in space.tunables(incumbent.recipe).items()]
        parts.append("## Settings that may change\n" + "\n".join(lines))
    past = [_past_line(trial) for trial in state.trials[1:]][-PAST:]
    parts.append("## Tried so far (oldest first)\n" + ("\n".join(past) or "- nothing yet"))
    if state.noise is not None:
        parts.append(f"Differences below {shown(state.noise)} are noise.")
    if state.context:
        parts.append(state.context)
    parts.append(
        "## Your answer\nPropose one change of the best recipe that is not among those tried. Seeds, backend, "
        f"evaluation and benchmarks stay as they are. Answer with one JSON object and nothing else:\n{FORM}"
    )
    example = _example(incumbent.recipe, space, rng)
    if example:
        parts.append(f"For instance:\n{json.dumps(example)}")
    return "\n\n".join(parts) + "\n"


def _past_line(trial: Trial) -> str:
    effect = f", {shown(trial.effect.difference, signed=True)} to the best of then" if trial.effect else ""
    why = f" ({shorten(trial.why, LONGEST_WHY)})" if trial.why else ""
    changes = json.dumps(dict(trial.proposal.changes))
    word = trial.decision or trial.status
    return f"- trial {trial.number}, of trial {trial.proposal.parent}: {shorten(changes, 400)}: {word}{effect}{why}"


def _example(recipe: JsonObject, space: Space | None, rng: random.Random) -> JsonObject | None:
    """A legal answer, drawn by chance."""
    tunable = list(space.tunables(recipe).items()) if space else []
    if not tunable:
        return None
    path, setting = rng.choice(tunable)
    value = setting.draw(rng)
    return {"changes": {path: value}, "claim": f"{path} of {value} is better.", "confidence": 0.3}  # type: ignore[dict-item]


def read_answer(text: str, recipe: JsonObject, space: Space | None) -> ProposedChange:
    """The last JSON object with `changes` in a text, if it is legal; EvsysError with everything that is wrong."""
    found = [one for one in _objects_in(text[-LONGEST_ANSWER:]) if "changes" in one]
    if not found:
        raise EvsysError(f"there is no JSON object with changes in the answer; the form is {FORM}")
    try:
        proposed = ProposedChange.model_validate(found[-1])
    except ValidationError as exc:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in exc.errors())
        raise EvsysError(f"the answer is not of the form {FORM}: {wrong}") from None
    changed = apply_changes(recipe, proposed.changes)
    problems = space.check(changed) if space is not None else []
    if problems:
        raise EvsysError("; ".join(f"{one.path}: {one.message}" for one in problems))
    return proposed


def _objects_in(text: str) -> Iterator[JsonDict]:
    """The outermost JSON objects in a text, whatever stands around them."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # brackets in brackets, without end
            value, end = None, at + 1
        if isinstance(value, dict):
            yield value
        at = text.find("{", end)
