"""Calls that may fail: how often they are tried, how long is waited, and what is left when they fail for good."""

from __future__ import annotations

import pytest

from evsys_sdk.errors import BackendError, BackendUnavailable, Cancelled, EvsysAuthError, EvsysError
from evsys_sdk.eval import RetryFailure, RetryReport, acall_with_retry, call_with_retry


class Flaky:
    """Fails `failures` times, then answers."""

    def __init__(self, failures, error=None):
        self.failures, self.error, self.calls = failures, error or OSError("lost"), 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "answer"

    async def awaited(self):
        return self()


def test_a_call_is_tried_again_with_pauses_that_double():
    pauses, report = [], RetryReport()
    answer = call_with_retry(
        Flaky(4), max_attempts=5, base_delay_seconds=1, max_delay_seconds=5, sleep=pauses.append, report=report
    )
    assert (answer, pauses) == ("answer", [1, 2, 4, 5])
    assert (report.total_calls, report.total_retries, report.total_failures) == (1, 4, 0)


def test_a_call_that_fails_for_good_is_in_the_report_and_gives_nothing():
    report, call = RetryReport(), Flaky(9)
    assert call_with_retry(call, key="row 7", max_attempts=3, report=report, sleep=lambda seconds: None) is None
    assert call.calls == 3
    assert report.failures == [RetryFailure(key="row 7", attempts=3, error="OSError: lost")]
    assert (report.total_failures, report.total_retries) == (1, 2)


def test_without_a_report_the_last_error_is_raised():
    with pytest.raises(OSError, match="lost"):
        call_with_retry(Flaky(9), max_attempts=2, sleep=lambda seconds: None)


@pytest.mark.parametrize("error", [EvsysAuthError("refused"), Cancelled("stop")])
def test_what_no_second_try_can_help_is_raised_at_once(error):
    call = Flaky(1, error)
    with pytest.raises(type(error)):
        call_with_retry(call, report=RetryReport())
    assert call.calls == 1


async def test_an_awaited_call_is_treated_the_same():
    pauses, report = [], RetryReport()

    async def sleep(seconds):
        pauses.append(seconds)

    assert await acall_with_retry(Flaky(2).awaited, report=report, sleep=sleep) == "answer"
    assert pauses == [0.5, 1.0]
    gone = Flaky(9, BackendError("no answer"))
    assert await acall_with_retry(gone.awaited, key="k", report=report, sleep=sleep) is None
    assert report.failures[0].error == "no answer"


def test_a_report_survives_json():
    report = RetryReport()
    report.add(1)
    report.add(3, RetryFailure(key="a", attempts=3, error="no"))
    assert report.to_dict()["total_failures"] == 1
    assert RetryReport.from_dict(report.to_dict()) == report


def test_no_tries_at_all_is_refused():
    with pytest.raises(EvsysError, match="at least 1"):
        call_with_retry(Flaky(0), max_attempts=0)


def test_what_the_client_has_retried_itself_is_not_tried_again():
    tries, report = [], RetryReport()

    def call():
        tries.append(1)
        raise BackendUnavailable("the provider did not answer in 6 tries")

    assert call_with_retry(call, key="row 1", max_attempts=3, report=report, sleep=lambda seconds: None) is None
    assert len(tries) == 1 and report.failures[0].attempts == 1 and "6 tries" in report.failures[0].error
