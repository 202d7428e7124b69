"""Tasks that are not independent: those made from one template.

In: tasks with their texts and metadata; or an array of values and the cluster of each column. Out: which cluster a task
belongs to and how that is known; or one column per cluster, so that clusters are the units of every interval and test.
Ten templates with twenty tasks each are ten observations of templates, and not two hundred of tasks.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Numbers = NDArray[np.int_]

FEWEST_PER_CLUSTER = 3.0
"""Tasks per cluster, on average, from which a pattern in ids or texts is taken for a template."""
FEWEST_CLUSTERS = 3
"""One template for all tasks, or two, would leave nothing to estimate from: tasks are then the units, of these."""
SOME, LEAST = 0.25, 5
"""Share of the tasks from which templates of a part of them count, and tasks that such a template has. A choice: with
17 and 23 % from three templates of 20, counting all tasks as independent makes 8 and 9 % false verdicts; independent
texts of a small vocabulary have up to 12 % of their tasks in alike fives."""
COPIES = "copies of tasks"
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`")
UNFILLED = re.compile(r"\s+|[^\s\"'`]+")
NO_SPACE = re.compile(r"\S+")
UP_TO_LAST_DIGIT = re.compile(r"\S*\d")
# The look-behind lets a match begin at the first digit of a number only: a long number in the middle of an id would
# otherwise be tried again from each of its digits.
LAST_NUMBER = re.compile(r"[-_./:#]?(?<!\d)\d+$")
# A date in an id is one number: what was written on one day is no template.
DATE = re.compile(r"(?<!\d)\d{4}([-_./]?)\d{2}\1\d{2}(?!\d)")
NUMBER = re.compile(r"\d\S*")
SEPARATOR = re.compile(r"[-_./:#\s]+")
WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
ALIKE, FEWEST_WORDS = 0.55, 3
"""Texts share a template where they have this share of the words of the longer one in common, in the same order, and at
least so many. Measured on generated suites (docs/verdict.md): at 0.55 to 0.6 most templates with one to three slots are
found; below, questions that only begin alike (`what is the ... of the ...`) are taken for one."""
EVERYWHERE = 0.6
"""Share of the texts from which a word that they have says nothing of a template: it is the prompt around the tasks."""
NEAREST, LAST = 4, 200
"""Earlier texts that a text is compared with, those that share most words with it; and of how many with each word."""
LONGEST = 80
"""Words of a text that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """Which tasks belong together."""

    of: dict[str, str] = field(default_factory=dict)
    """task_id -> cluster; empty where tasks are independent."""
    found_by: str = ""
    """`metadata key topic`, `task ids`, `task texts` or `copies of tasks`."""


def find_clusters(
    ids: Sequence[str],
    texts: Mapping[str, str],
    labels: Mapping[str, str | None],
    *,
    key: str | None,
    copies: Mapping[str, str] | None = None,
) -> Clusters:
    """By the metadata key, where one is named; else by what ids, or else texts, have in common.

    Without a key, tasks form clusters where ids share their words but not a number or a last letter (`mail-01`,
    `07_mail`, `mail-01-easy`, `mail-b`), where texts differ only in numbers, quoted words and capitalised names, or
    where they have most words in common in the same order; with at least three tasks per cluster and three clusters.
    Texts may also make clusters of a part of the tasks, with the others alone. `copies`: task -> the task that it
    repeats; these are one unit, however few there are.
    """
    if key is not None:
        return Clusters(of={one: labels.get(one) or f"(no {key}) {one}" for one in ids}, found_by=f"metadata key {key}")
    copies = copies or {}
    found, found_by = _find_templates(ids, texts)
    if not found and len({copies.get(one, one) for one in ids}) in range(FEWEST_CLUSTERS, len(ids)):
        found, found_by = {one: one for one in ids}, COPIES
    return Clusters(of={one: found[copies.get(one, one)] for one in found}, found_by=found_by)


def _find_templates(ids: Sequence[str], texts: Mapping[str, str]) -> tuple[dict[str, str], str]:
    for pattern in (_without_last_number, _before_number, _without_numbers, _without_last_letter):
        if found := _if_templates({one: pattern(DATE.sub("0", one)) for one in ids}):
            return found, "task ids"
    by_text = [{one: _text_pattern(texts.get(one, "")) for one in ids}, _alike(ids, texts)]
    for rule in (_if_templates, _if_some_templates):
        for patterns in by_text:
            if found := rule(patterns):
                return found, "task texts"
    return {}, ""


def _if_templates(of: dict[str, str]) -> dict[str, str]:
    """The clusters, where there are enough tasks in each, enough of them, and few tasks alone; else none."""
    sizes = Counter(of.values())
    alone = sum(size for size in sizes.values() if size == 1)
    # An empty pattern is that of tasks without a text, which have nothing in common but that.
    is_template = len(sizes) >= FEWEST_CLUSTERS and len(of) >= FEWEST_PER_CLUSTER * len(sizes) and "" not in sizes
    return of if is_template and alone <= len(of) / 10 else {}


def _if_some_templates(of: dict[str, str]) -> dict[str, str]:
    """The clusters of five tasks and more, the other tasks alone, where a quarter of all tasks is in such; else none.

    Four templates of 25 tasks beside 60 other tasks, counted as 160 independent ones, make 19 % false verdicts; counted
    as 64, 5.5 %."""
    sizes = Counter(of.values())
    kept = {pattern for pattern, size in sizes.items() if size >= LEAST and pattern}
    if len(kept) < FEWEST_CLUSTERS or sum(sizes[pattern] for pattern in kept) < SOME * len(of):
        return {}
    return {one: pattern if pattern in kept else f"(alone) {one}" for one, pattern in of.items()}


def _without_last_number(task_id: str) -> str:
    """`mail` of `mail-01`; an id that does not end in a number stands for itself."""
    return LAST_NUMBER.sub("", task_id) or task_id


def _before_number(task_id: str) -> str:
    """`mail` of `mail-01-easy` and of `07_mail`: the words before the first number, or after it where there are none.

    A number is a separate part: letters and digits in one part, as in a hash, say nothing."""
    parts = SEPARATOR.split(task_id)
    first = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return task_id if first is None else " ".join(parts[:first] or parts[first + 1 :]) or task_id


def _without_numbers(task_id: str) -> str:
    """`task mail` of `task-01-mail`."""
    return " ".join(part for part in SEPARATOR.split(task_id) if not part.isdigit()) or task_id


def _without_last_letter(task_id: str) -> str:
    """`mail` of `mail-b`."""
    parts = SEPARATOR.split(task_id)
    return " ".join(parts[:-1]) if len(parts) > 1 and len(parts[-1]) == 1 and parts[-1].isalpha() else task_id


def _text_pattern(text: str) -> str:
    """The text without what a template fills in: numbers, quoted words, names in the middle of a sentence."""
    words = without_fillings(text).split()
    kept = [
        "#" if word[:1].isupper() and index and not words[index - 1].endswith((".", "!", "?", ":")) else word
        for index, word in enumerate(words)
    ]
    # A slot may be filled with one word or with several: neighbouring marks count as one.
    return re.sub(r"(?:# ?)+", "# ", " ".join(kept)).strip()


def without_fillings(text: str) -> str:
    """The text with `#` for what is quoted and for words with a digit. A new word begins behind a quoted text.

    Each word is searched for its last digit once: a pattern (`\\S*\\d\\S*`) would do so again from each of its letters.
    """
    kept: list[str] = []
    at = word_end = digits_end = 0
    while at < len(text):
        if at >= word_end and (word := NO_SPACE.match(text, at)):
            last = UP_TO_LAST_DIGIT.match(text, at)
            word_end, digits_end = word.end(), last.end() if last else at
        if quoted := QUOTED.match(text, at):
            piece, at = "#", quoted.end()
        # A digit follows in this word: the rest of the word is a filling, also the letters before that digit.
        elif at < digits_end:
            piece, at = "#", word_end
        else:
            # A quotation mark without its partner matches neither pattern, and is kept as it is.
            rest = UNFILLED.match(text, at)
            end = rest.end() if rest else at + 1
            piece, at = text[at:end], end
        kept.append(piece)
    return "".join(kept)


def _alike(ids: Sequence[str], texts: Mapping[str, str]) -> dict[str, str]:
    """Task -> the first task of those whose texts have most words in common with each other, whatever their case.

    Each text joins the nearest of the few earlier ones that share most words with it, and only the last texts with a
    word are looked up, so that time grows with the number of texts and not with its square.
    """
    # All numbers are one word, so that a slot for a number counts as words in common.
    words = {one: WORD.findall(NUMBER.sub("0", texts.get(one, "")).casefold())[:LONGEST] for one in ids}
    spread = Counter(word for each in words.values() for word in set(each))
    most = EVERYWHERE * len(ids)
    own = {one: [word for word in each if spread[word] <= most] for one, each in words.items()}
    of: dict[str, str] = {}
    with_word: dict[str, deque[str]] = {}
    for one, mine in own.items():
        shared = Counter(other for word in set(mine) for other in with_word.get(word, ()))
        of[one] = one
        for other, _ in shared.most_common(NEAREST):
            blocks = SequenceMatcher(None, mine, own[other], autojunk=False).get_matching_blocks()
            longer = max(len(mine), len(own[other]))
            if sum(block.size for block in blocks) >= max(FEWEST_WORDS, ALIKE * longer):
                # The name of the cluster is its first task: `other` may itself have joined an earlier one.
                of[one] = of[other]
                break
        for word in set(mine):
            with_word.setdefault(word, deque(maxlen=LAST)).append(one)
    return of


EVEN = 0.86
"""Clusters are of about equal size where their effective number, (sum of sizes)^2 / sum of squares (Kish 1965), is at
least this part of their number; sizes may then differ by a factor of two. Measured: see `_join_uneven`."""


def by_cluster(values: Array, clusters: Sequence[str]) -> Array:
    """One column per cluster, so that each row keeps its mean over tasks.

    A cluster's value is its mean; where sizes differ, its distance from the row's mean counts by its size. The variance
    of these columns over their number is the cluster-robust variance of the mean (Liang and Zeger 1986), without its
    bias where tasks of a cluster are alike: there the expected squared distance of a cluster with share w from the mean
    is in proportion to 1 - 2 w + (sum of squared shares), which plain robust variances leave out (a bias reduction as
    that of Bell and McCaffrey 2002, with this working model and as one factor).
    """
    import numpy as np

    _, place, sizes = np.unique(np.array(clusters), return_inverse=True, return_counts=True)
    place, sizes = _join_uneven(place, sizes)
    n, share = len(sizes), sizes / sizes.sum()
    sums = np.zeros((len(values), n))
    # Places repeat: `sums[:, place] += values` would keep only the last task of each cluster.
    np.add.at(sums.T, place, values.T)
    means = values.mean(axis=1, keepdims=True)
    squares = float((share**2).sum())
    # 1 where all clusters are of one size, and for a single one, which has no distance from the mean.
    unbiased = (n - 1) / n * squares / float((share**2 * (1 - 2 * share + squares)).sum()) if n > 1 else 1.0
    columns: Array = means + (sums / sizes - means) * share * n * math.sqrt(unbiased)
    return columns


def _join_uneven(place: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
    """Clusters of about equal size: where a few are much larger than the others, the small ones are joined.

    A robust variance counts a cluster as one observation, whatever its size. With shares of 30 to 2 % in 10 clusters,
    the few large ones decide the mean and 9 of 10 degrees of freedom are not there: 9 % false verdicts, and 17 % where
    one cluster holds half of all tasks. Joined clusters are independent of each other too; as many are left as make
    groups of about equal size. Over 95 families of sizes (Zipf, geometric, lognormal, a few large ones among many; 3 to
    50 clusters, tasks of one template nearly alike or nearly independent; 16,000 to 40,000 simulations each) that makes
    5.1 % false verdicts on average and 6.0 % at worst; joining once to the effective number, without the bias reduction
    of `by_cluster`, made 5.5 and 8.9 %. With 0.88 it is 6.0 % too, for a point of power less.
    """
    import numpy as np

    effective = float(sizes.sum()) ** 2 / float((sizes.astype(float) ** 2).sum())
    if effective >= EVEN * len(sizes):
        return place, sizes
    order = np.argsort(-sizes, kind="stable").tolist()
    # Joining clusters only lowers their effective number, so more groups than this cannot be even.
    groups = max(2, int(effective / EVEN))
    while True:
        heap = [(0, group) for group in range(groups)]
        home = np.zeros(len(sizes), dtype=int)
        for cluster in order:  # the largest first, each to the smallest group so far
            size, home[cluster] = heap[0]
            heapq.heapreplace(heap, (size + int(sizes[cluster]), int(home[cluster])))
        joined = np.bincount(home, weights=sizes)
        if groups == 2 or float(sizes.sum()) ** 2 >= EVEN * groups * float((joined**2).sum()):
            return home[place], joined.astype(sizes.dtype)
        groups -= max(1, groups // 50)  # steps of 2 %: with thousands of clusters there would be hundreds of tries
