"""Keep or discard, from a comparison alone."""

from __future__ import annotations

import pytest

from evsys_sdk.research.decision import decide
from evsys_sdk.stats.verdict import Comparison


def ruling(p, *, looks=2, first_seeds=1, n_seeds=4, difference=0.05, direction="max"):
    word = "better" if p < 0.05 else "undecided"
    found = Comparison(arm="candidate", vs="incumbent", verdict=word, difference=difference, p=p, p_holm=p)
    return decide(found, direction=direction, n_seeds=n_seeds, max_repeats=4, looks=looks, first_seeds=first_seeds)


def test_a_promising_candidate_is_repeated_once_with_all_seeds():
    found = ruling(0.3, looks=1, n_seeds=1)
    assert (found.word, found.seeds) == ("repeat", 4)


@pytest.mark.parametrize(
    ("p", "looks", "first_seeds", "word"),
    [
        (0.22, 2, 1, "kept"),  # 0.0275 before the correction for a look that could keep nothing
        (0.26, 2, 1, "undecided"),
        (0.11, 2, 2, "undecided"),  # the first look could have kept it, so it counts
        (0.11, 1, 1, "undecided"),
        (0.09, 3, 1, "kept"),  # 0.0033 at one look; two looks count, and 0.027 is below 0.03
        (0.11, 3, 1, "undecided"),
        (0.04, 1, 2, "undecided"),  # better for the verdict, and not sure enough to build on
        (0.02, 1, 2, "kept"),
    ],
)
def test_a_first_look_that_could_keep_nothing_is_not_corrected_for(p, looks, first_seeds, word):
    assert ruling(p, looks=looks, first_seeds=first_seeds).word == word


def test_what_lies_below_the_incumbent_is_not_kept_whatever_its_p():
    assert ruling(0.11, difference=-0.05).word == "discarded"
    assert ruling(0.11, difference=0.05, direction="min").word == "discarded"
    assert ruling(0.11, difference=-0.05, direction="min").word == "kept"
