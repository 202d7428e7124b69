"""What a step is said to have come to.

In: a batch, the backend's answers, the time it took. Out: numbers under the names the logs use.
"""

from __future__ import annotations

from evsys_sdk.surface import AdamParams, ForwardBackwardOutput, OptimStepOutput
from evsys_sdk.training.batch import TrainingBatch


def learning_metrics(
    batch: TrainingBatch, outputs: list[ForwardBackwardOutput], optim: OptimStepOutput, adam: AdamParams
) -> dict[str, float]:
    """Loss, rate and what the backend measured."""
    metrics = merged([output.metrics for output in outputs]) | optim.metrics
    metrics["lr"] = adam.learning_rate
    if outputs:
        metrics["loss"] = metrics["loss:sum"] / (batch.loss_scale or _weight(batch) or len(outputs))
    return metrics


def merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several calls as one: names that end in `:sum` add up, the others are averaged."""
    together: dict[str, list[float]] = {}
    for part in parts:
        for key, value in part.items():
            together.setdefault(key, []).append(value)
    return {key: sum(values) if key.endswith(":sum") else sum(values) / len(values) for key, values in together.items()}


def _weight(batch: TrainingBatch) -> float:
    """What `loss:sum` is divided by to compare batches: the weight of the tokens that pull. 0 for a custom loss,
    whose scale only its author knows."""
    if not isinstance(batch.loss_fn, str):
        return 0.0
    key = "weights" if batch.loss_fn == "cross_entropy" else "advantages"
    arrays = [datum.loss_fn_inputs[key].to_numpy() for datum in batch.data]
    return float(sum(abs(array).sum() if key == "weights" else (array != 0).sum() for array in arrays))


def speed_metrics(batch: TrainingBatch, seconds: float) -> dict[str, float]:
    tokens = sum(datum.model_input.length for datum in batch.data)
    return {"tokens": tokens, "step_seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}
