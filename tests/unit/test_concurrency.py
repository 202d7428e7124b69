"""`run_async`: what it costs beside the work itself."""

from __future__ import annotations

from evsys_sdk.concurrency import run_async


def test_a_result_is_returned_without_being_written_out_as_text():
    written = []

    class Large:
        def __repr__(self) -> str:
            written.append(1)
            return "Large"

    async def work() -> Large:
        return Large()

    result = run_async(work())
    assert isinstance(result, Large)
    assert written == []
