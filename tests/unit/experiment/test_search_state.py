"""What a search knows of its trials is what its journal says."""

from __future__ import annotations

from contextlib import closing

from evsys_sdk.experiment.search import SearchState, TrialValue
from evsys_sdk.record.journal import EXPERIMENT, Journal


def test_the_value_of_a_trial_that_was_tried_again_is_the_same_after_a_resume(tmp_path):
    with closing(Journal(tmp_path / "x.sqlite")) as journal:
        state = SearchState.of(journal.begin(EXPERIMENT, "same"))
        state.add_value(0, 4, TrialValue(value=None, status="failed"))
        state.add_value(0, 4, TrialValue(value=0.5, status="paused"))
        state.add_value(0, None, TrialValue(value=0.25, status="completed"))
        state.add_value(0, None, TrialValue(value=0.75, status="completed"))
        resumed = SearchState.of(state.line)
        assert resumed.values == state.values
        assert resumed.values[0, "4"] == TrialValue(value=0.5, status="paused")
        resumed.add_value(0, None, TrialValue(value=0.25, status="completed"))
        assert SearchState.of(state.line).values == resumed.values, "also back to a value that it had before"


def test_the_same_value_is_written_once(tmp_path):
    with closing(Journal(tmp_path / "x.sqlite")) as journal:
        state = SearchState.of(journal.begin(EXPERIMENT, "same"))
        for _ in range(3):
            state.add_value(0, None, TrialValue(value=0.25, status="completed"))
        assert len(state.line.events(upto=0)) == 1
