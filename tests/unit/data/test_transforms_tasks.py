"""to_harbor_task and to_prompt_example: rows of the published formats."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from evsys_sdk.data.transforms import ToHarborTask, ToPromptExample
from evsys_sdk.data_types import HarborTask, InProcessVerifier, PromptExample, detect_format, from_dict, task_messages
from evsys_sdk.errors import DataError

ROW = {"query": "weather?", "tool_slug": "WEATHER", "toolkit": "w", "metadata": {"source": "log"}}


def task(row: dict[str, Any] = ROW, **params: Any) -> HarborTask:
    (out,) = ToHarborTask(**params)([row])
    assert detect_format(out) == "harbor_task"
    typed = from_dict(out)
    assert isinstance(typed, HarborTask)
    return typed


def test_a_task_follows_from_known_columns() -> None:
    made = task()
    assert made.instruction == "weather?"
    assert made.verifier == InProcessVerifier(fn_name="exact_match", expected="WEATHER")
    assert made.metadata == {"query": "weather?", "tool_slug": "WEATHER", "toolkit": "w", "source": "log"}


def test_a_prompt_of_messages_is_the_question_behind_its_history() -> None:
    """The form in which verl and TRL keep prompts; the answer may be a message as well."""
    before = [{"role": "system", "content": "Be brief."}]
    prompt = [*before, {"role": "user", "content": "2+2?"}]
    made = task({"prompt": prompt, "completion": [{"role": "assistant", "content": "4"}]})
    assert made.instruction == "2+2?" and made.verifier == InProcessVerifier(fn_name="exact_match", expected="4")
    assert task_messages(made) == prompt
    alone = task({"prompt": prompt[1:], "answer": "4"})
    assert "history" not in alone.metadata and alone.task_id != made.task_id
    with pytest.raises(DataError, match=r"row 0 .*last message is the assistant's"):
        task({"prompt": [*prompt, {"role": "assistant", "content": "4"}], "answer": "4"})


def test_templates_and_keys_say_what_is_asked_and_expected() -> None:
    made = task(
        instruction_template="Q: {query}",
        expected_template="<answer>{tool_slug}</answer>",
        fn_name="contains",
        verifier_params={"case_sensitive": False},
    )
    assert made.instruction == "Q: weather?"
    assert made.verifier == InProcessVerifier(
        fn_name="contains", expected="<answer>WEATHER</answer>", params={"case_sensitive": False}
    )


def test_an_expected_value_keeps_its_type() -> None:
    made = task({"question": "2+2?", "sum": 4}, expected_key="sum")
    assert isinstance(made.verifier, InProcessVerifier) and made.verifier.expected == 4
    assert made.metadata == {"question": "2+2?"}


def test_params_are_not_shared_between_rows() -> None:
    one, two = ToHarborTask(verifier_params={"a": 1})([ROW, ROW])
    one["verifier"]["params"]["a"] = 2
    assert two["verifier"]["params"] == {"a": 1}


def test_ids_differ_even_for_equal_rows_and_repeat() -> None:
    rows = [ROW, ROW, {**ROW, "query": "news?"}, ROW]
    ids = [row["task_id"] for row in ToHarborTask()(rows)]
    assert len(set(ids)) == 4
    assert ids[1:] == [f"{ids[0]}-2", ids[2], f"{ids[0]}-3"]
    assert ids == [row["task_id"] for row in ToHarborTask()(rows)]


def test_ids_from_a_column_must_differ() -> None:
    transform = ToHarborTask(task_id_key="n")
    assert [row["task_id"] for row in transform([{**ROW, "n": 1}, {**ROW, "n": 2}])] == ["1", "2"]
    with pytest.raises(DataError, match=r"to_harbor_task: row 2 .* the id '1' in 'n', and so has row 0"):
        transform([{**ROW, "n": 1}, {**ROW, "n": 2}, {**ROW, "n": 1}])


@pytest.mark.parametrize(
    ("row", "params", "words"),
    [
        ({"text": "x", "answer": "y"}, {}, "nothing to do.*it has: text, answer; set instruction_template"),
        ({"query": "x"}, {}, "no right answer.*set expected_key"),
        ({"query": "x"}, {"expected_key": "gold"}, "has no 'gold'"),
        ({"query": "x", "answer": "y"}, {"task_id_key": "id"}, "has no 'id'"),
        ({**ROW, "metadata": [1]}, {}, "list in `metadata`"),
    ],
)
def test_a_row_that_makes_no_task_is_named(row: dict[str, Any], params: dict[str, Any], words: str) -> None:
    with pytest.raises(
        DataError, match=rf"to_harbor_task: row 0 \(counting from 0\) has .*{words.removeprefix('has ')}"
    ):
        ToHarborTask(**params)([row])


def test_a_verifier_that_does_not_exist_is_refused_before_any_row() -> None:
    with pytest.raises(ValidationError, match="closest: exact_match"):
        ToHarborTask(fn_name="exact_mach")
    with pytest.raises(ValidationError, match="keep one"):
        ToHarborTask(expected_key="a", expected_template="{a}")


def example(row: dict[str, Any] = ROW, **params: Any) -> PromptExample:
    (out,) = ToPromptExample(**params)([row])
    assert detect_format(out) == "prompt_dataset"
    typed = from_dict(out)
    assert isinstance(typed, PromptExample)
    return typed


def test_an_example_takes_all_columns_but_the_answer_as_inputs() -> None:
    assert example() == PromptExample(
        inputs={"query": "weather?", "toolkit": "w"}, expected="WEATHER", metadata={"source": "log"}
    )


def test_named_inputs_leave_the_rest_to_metadata() -> None:
    assert example(input_keys=["query"], expected_key="toolkit") == PromptExample(
        inputs={"query": "weather?"}, expected="w", metadata={"tool_slug": "WEATHER", "source": "log"}
    )


def test_an_example_may_have_nothing_expected() -> None:
    assert example({"text": "x"}) == PromptExample(inputs={"text": "x"})


@pytest.mark.parametrize("params", [{"input_keys": ["nope"]}, {"expected_key": "nope"}])
def test_an_example_without_its_columns_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"to_prompt_example: row 0 .* has no 'nope'"):
        example(**params)
