"""`run.eval`: rows of every shape are asked and compared, and a lost answer is not a wrong one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from evsys_sdk.errors import Cancelled, DataError
from evsys_sdk.eval.row_eval import prompt_of, question_of, score_rows, target_of
from evsys_sdk.registry import get_inference, metrics, verifiers

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris"},
]


class Client:
    """A user's own client: only `generate`, and not async."""

    def __init__(self, answers=None):
        self.answers, self.asked, self.threads = answers or {}, [], set()

    def generate(self, *, prompt, max_tokens, temperature, stop):
        self.asked.append((prompt, max_tokens, temperature, stop))
        self.threads.add(threading.current_thread())
        answer = self.answers.get(str(prompt), "Paris")
        if isinstance(answer, Exception):
            raise answer
        return answer


async def scored(rows, client, *names, **options):
    return await score_rows(rows, metrics=[(n, metrics.build(n, {})) for n in names], client=client, **options)


@pytest.mark.parametrize(
    ("row", "prompt", "target"),
    [
        ({"prompt": "Q", "answer": "A"}, "Q", "A"),
        ({"prompt": "Q", "tool_slug": "S", "toolkit": "t"}, "Q", {"tool_slug": "S", "toolkit": "t"}),
        ({"prompt": "Q", "metadata": {"tool_slug": "S", "toolkit": "t"}}, "Q", {"tool_slug": "S", "toolkit": "t"}),
        ({"prompt": "Q", "completion": "C"}, "Q", "C"),
        ({"messages": CHAT}, CHAT[:2], "Paris"),
        ({"messages": CHAT[1:]}, "Capital of France?", "Paris"),
        ({"messages": CHAT[:2], "target_assistant": "Paris"}, CHAT[:2], "Paris"),
        ({"messages": CHAT[1:], "target_assistant": "Paris"}, "Capital of France?", "Paris"),
        ({"messages": CHAT, "target_assistant": "Lyon"}, CHAT, "Lyon"),
        ({"messages": CHAT[:2], "expected": "Paris"}, CHAT[:2], "Paris"),
        ({"messages": CHAT[1:], "tool_slug": "S"}, "Capital of France?", "S"),
        ({"inputs": {"question": "Q"}, "expected": "A"}, "Q", "A"),
        ({"inputs": {"a": 1, "b": 2}, "expected": "3"}, "a: 1\nb: 2", "3"),
    ],
)
def test_a_row_knows_its_question_and_its_answer(row, prompt, target):
    assert prompt_of(row) == prompt
    assert target_of(row) == target


@pytest.mark.parametrize(
    ("row", "missing"),
    [({"text": "x"}, "no prompt"), ({"prompt": "Q"}, "no target"), ({"messages": CHAT[1:2]}, "no target")],
)
def test_a_row_that_cannot_be_asked_or_compared_is_named(row, missing):
    with pytest.raises(DataError, match=f"eval row 3 has {missing}"):
        question_of(row, 3)


async def test_nothing_is_asked_when_any_row_is_wrong():
    client = Client()
    with pytest.raises(DataError, match="eval row 1"):
        await scored([{"prompt": "Q", "answer": "A"}, {"prompt": "Q"}], client, "exact_match")
    assert client.asked == []


async def test_answers_are_compared_and_folded_like_a_benchmark():
    rows = [{"prompt": str(i), "answer": "Paris"} for i in range(4)]
    client = Client({"0": "Lyon", "1": "I think <answer>Paris</answer>"})
    result = await scored(rows, client, "exact_match", "mean_reward", "pass@1")
    assert (result.name, result.split) == ("eval", "eval")
    assert [score.value for score in result.scores] == [0.75, 0.75, 0.75]
    first = result.scores[0]
    assert (first.n_tasks, first.n_rollouts, first.n_errors) == (4, 4, 0) and first.low < 0.75 < first.high
    assert result.rollouts[1].metadata["prediction"] == "Paris"


async def test_toolkit_and_slug_are_scored_apart():
    rows = [{"prompt": "Q", "tool_slug": "GMAIL_SEND", "toolkit": "gmail"}]
    result = await scored(rows, Client({"Q": "<answer>GMAIL_FETCH</answer>"}), "exact_match", "toolkit_match")
    assert [score.value for score in result.scores] == [0.0, 1.0]


async def test_a_task_row_is_judged_by_its_own_verifier():
    verifier = {"kind": "in_process", "fn_name": "contains", "expected": "par", "params": {"case_sensitive": False}}
    row = {"task_id": "t", "instruction": "Capital?", "verifier": verifier}
    result = await scored([row], Client({"Capital?": "It is Paris."}), "mean_reward")
    assert result.scores[0].value == 1.0


async def test_a_broken_verifier_is_an_error_and_not_a_zero():
    verifier = {"kind": "in_process", "fn_name": "regex_match", "expected": "("}
    rows = [{"task_id": "t", "instruction": "Capital?", "verifier": verifier}]
    result = await scored(rows, Client(), "mean_reward")
    assert result.scores[0].value is None and "regex_match" in result.error


async def test_a_verifier_that_hangs_is_an_error_after_a_while(monkeypatch):
    monkeypatch.setattr("evsys_sdk.eval.row_eval.VERIFIER_SECONDS", 0.05)
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    opened = threading.Event()
    verifiers.register("hangs")(lambda output, expected, params: float(opened.wait(300)))
    row = {"task_id": "t", "instruction": "Capital?", "verifier": {"kind": "in_process", "fn_name": "hangs"}}
    result = await scored([row], Client(), "mean_reward")
    opened.set()
    assert result.scores[0].value is None and "took longer than 0.05 seconds" in result.error


async def test_a_failing_client_leaves_an_error_in_the_denominator():
    rows = [{"prompt": "a", "answer": "Paris"}, {"prompt": "b", "answer": "Paris"}]
    result = await scored(rows, Client({"b": ConnectionError("gone")}), "exact_match")
    score = result.scores[0]
    assert (score.value, score.n_errors, result.error) == (0.5, 1, None)
    assert result.rollouts[1].reward is None and "ConnectionError: gone" in result.rollouts[1].error


async def test_a_client_that_never_answers_makes_the_eval_invalid():
    result = await scored([{"prompt": "a", "answer": "x"}], Client({"a": ConnectionError("gone")}), "exact_match")
    assert result.scores[0].value is None and "gone" in result.error


async def test_a_client_that_returns_no_text_is_an_error():
    result = await scored([{"prompt": "a", "answer": "x"}], Client({"a": 3}), "exact_match")
    assert "returned int, not text" in result.error


async def test_a_plain_client_is_asked_in_a_thread_with_its_own_settings():
    class Settings:
        max_tokens, temperature, stop = 7, 0.5, ["\n"]

    client = Client()
    client.cfg = Settings
    await scored([{"prompt": "Q", "answer": "A"}], client, "exact_match")
    assert client.asked == [("Q", 7, 0.5, ["\n"])]
    assert threading.main_thread() not in client.threads


async def test_an_async_client_is_awaited():
    class AsyncClient:
        async def generate(self, *, prompt, max_tokens, temperature, stop):
            await asyncio.sleep(0)
            return "Paris"

    result = await scored([{"prompt": "Q", "answer": "Paris"}], AsyncClient(), "exact_match")
    assert result.scores[0].value == 1.0


async def test_the_limit_takes_the_first_rows():
    client = Client()
    rows = [{"prompt": str(i), "answer": "Paris"} for i in range(5)]
    result = await scored(rows, client, "exact_match", limit=2)
    assert result.scores[0].n_tasks == 2 and sorted(asked[0] for asked in client.asked) == ["0", "1"]


async def test_a_cancelled_run_passes_through():
    with pytest.raises(Cancelled):
        await scored([{"prompt": "a", "answer": "x"}], Client({"a": Cancelled("stop")}), "exact_match")


async def test_what_answers_took_reaches_the_metrics_tokens_and_cost():
    row = {"prompt": "What is the capital of France", "answer": "Paris"}
    result = await scored([row], get_inference("mock")(), "tokens", "cost")
    # The mock client repeats the question's six words and says so.
    assert [(score.value, score.error) for score in result.scores] == [(12.0, None), (0.0, None)]
    assert result.rollouts[0].metadata["n_output_tokens"] == 6


async def test_tokens_that_a_client_does_not_tell_are_not_counted_as_none():
    result = await scored([{"prompt": "Q", "answer": "Paris"}], Client(), "exact_match", "tokens", "cost")
    exact, tokens, cost = result.scores
    assert exact.value == 1.0
    assert tokens.value is None and "not known" in tokens.error
    assert cost.value is None and "not known" in cost.error
