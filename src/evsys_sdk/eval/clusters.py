"""Tasks that are not independent: those made from one template.

In: tasks with their texts and metadata; or an array of values and the cluster of each column. Out: which cluster a task
belongs to and how that is known; or one column per cluster, so that clusters are the units of every interval and test.
Ten templates with twenty tasks each are ten observations of templates, and not two hundred of tasks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEWEST_PER_CLUSTER = 3.0
"""Tasks per cluster, on average, from which a pattern in ids or texts is taken for a template."""
FEWEST_CLUSTERS = 3
"""One template for all tasks, or two, would leave nothing to estimate from: tasks are then the units, of these."""
FILLED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|\S*\d\S*")
LAST_NUMBER = re.compile(r"[-_./:#]?\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """Which tasks belong together."""

    of: dict[str, str] = field(default_factory=dict)
    """task_id -> cluster; empty where tasks are independent."""
    found_by: str = ""
    """`metadata key topic`, `task ids` or `task texts`."""


def find_clusters(
    ids: Sequence[str], texts: Mapping[str, str], labels: Mapping[str, str | None], *, key: str | None
) -> Clusters:
    """By the metadata key, where one is named; else by what ids, or else texts, have in common.

    Without a key, tasks form clusters where ids differ only in a last number (`mail-01`, `mail-02`) or texts only in
    numbers, quoted words and capitalised names, with at least three tasks per pattern and three patterns.
    """
    if key is not None:
        return Clusters(of={one: labels.get(one) or f"(no {key}) {one}" for one in ids}, found_by=f"metadata key {key}")
    for found_by, pattern in (("task ids", _id_pattern), ("task texts", lambda one: _text_pattern(texts.get(one, "")))):
        found = _by_pattern(ids, pattern)
        if found:
            return Clusters(of=found, found_by=found_by)
    return Clusters()


def _by_pattern(ids: Sequence[str], pattern: Callable[[str], str]) -> dict[str, str]:
    of = {one: pattern(one) for one in ids}
    sizes = Counter(of.values())
    alone = sum(size for size in sizes.values() if size == 1)
    is_template = len(sizes) >= FEWEST_CLUSTERS and len(ids) >= FEWEST_PER_CLUSTER * len(sizes) and "" not in sizes
    return of if is_template and alone <= len(ids) / 10 else {}


def _id_pattern(task_id: str) -> str:
    """`mail` of `mail-01`; an id that does not end in a number stands for itself."""
    return LAST_NUMBER.sub("", task_id) or task_id


def _text_pattern(text: str) -> str:
    """The text without what a template fills in: numbers, quoted words, names in the middle of a sentence."""
    words = FILLED.sub("#", text).split()
    kept = [
        "#" if word[:1].isupper() and index and not words[index - 1].endswith((".", "!", "?", ":")) else word
        for index, word in enumerate(words)
    ]
    return re.sub(r"(?:# ?)+", "# ", " ".join(kept)).strip()


def by_cluster(values: Array, clusters: Sequence[str]) -> Array:
    """One column per cluster, so that each row keeps its mean over tasks.

    A cluster's value is its mean; where sizes differ, its distance from the row's mean counts by its size. The variance
    of these columns over their number is the cluster-robust variance of the mean (Liang and Zeger 1986).
    """
    import numpy as np

    names, place, sizes = np.unique(np.array(clusters), return_inverse=True, return_counts=True)
    sums = np.zeros((len(values), len(names)))
    np.add.at(sums.T, place, values.T)
    means = values.mean(axis=1, keepdims=True)
    columns: Array = means + (sums / sizes - means) * sizes * (len(names) / values.shape[1])
    return columns
