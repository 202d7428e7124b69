"""The model card of deployed weights: what they are, and what was measured of them.

In: the records of the experiment and of the run that left the weights. Out: Markdown. Every number comes from a record,
with its interval and its number of tasks; what was not measured is said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from evsys_sdk.format import benchmark_score_text, markdown_text
from evsys_sdk.protocols import EvalResult, of_kept_weights
from evsys_sdk.record.models import ExperimentRecord, RunRecord

SHIPPED = "Deployment: "
"""How the line of a conclusion begins that says what came of a deployment; the card is about the weights alone."""


def model_card(
    name: str, digest: str, experiment: ExperimentRecord, arm: str, run: RunRecord, *, base_model: str
) -> str:
    """The card, but for how to load the weights, which the deployer adds: that depends on their form."""
    algorithm = run.hparams.get("algorithm") or {}
    model = {key: value for key, value in (run.hparams.get("model") or {}).items() if key != "name"}
    recipe = {"algorithm": algorithm.get("kind"), "seed": run.seed, "model": model, "params": algorithm.get("params")}
    data = [
        f"- `{one.source}`: {one.rows:,} rows (of {one.rows_read:,} read), sha256 `{one.sha256}`"
        for one in run.environment.data
    ]
    leaked = [str(text) for audit in run.leakage if (text := audit.get("text") or audit.get("summary"))]
    git = (run.environment.git or {}).get("commit")
    head = json.dumps(base_model)  # JSON strings are YAML
    verdict = "\n".join(line for line in experiment.conclusion.splitlines() if not line.startswith(SHIPPED))
    return "\n".join(
        [
            "---",
            f"base_model: {head}",
            "tags: [evsys-sdk]",
            "---",
            "",
            f"# {name}",
            "",
            f"Weights of the run `{run.run_id}` (arm `{arm}` of the experiment `{experiment.experiment}`), trained "
            f"over `{base_model}`.",
            "",
            f"- digest of the weights: sha256 `{digest}`",
            *([f"- code: git commit `{git}`"] if git else []),
            f"- trained: {run.ts or 'unknown'}, {run.seconds:.0f} s",
            "",
            "## Data",
            "",
            *(data or ["The run's record names no data."]),
            *[f"- {markdown_text(text)}" for text in leaked],
            "",
            "## Recipe",
            "",
            "```json",
            json.dumps(recipe, indent=2, ensure_ascii=False, default=str),
            "```",
            "",
            "## Scores",
            "",
            *_score_lines(of_kept_weights(run.evals, run.chosen_steps)),
            "",
            "## Verdict",
            "",
            markdown_text(verdict).strip() or "The experiment's record has no conclusion.",
            "",
        ]
    )


def _score_lines(evals: Sequence[EvalResult]) -> list[str]:
    """The last score of the kept weights on every benchmark, and that of the untrained model beside it."""
    last: dict[tuple[str, str, bool], list[str]] = {}
    for one in evals:
        texts = [f"{score.metric} {benchmark_score_text(score, one.training_mark)}" for score in one.scores]
        last[one.split, one.name, one.step == 0] = texts
    lines = []
    for (split, name, before), texts in last.items():
        when = "before training" if before else "these weights"
        lines += [f"- {split}/{name}, {when}: {text}" for text in texts]
    note = "Brackets are 95 % intervals over tasks."
    return [*lines, "", note] if lines else ["These weights were not scored on a benchmark."]
