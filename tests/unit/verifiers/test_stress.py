"""The stress test finds what is weak, and leaves a sound benchmark alone."""

from __future__ import annotations

import json

import pytest

from evsys_sandbox import sandbox
from evsys_sandbox.sandbox import why_unavailable
from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier, LLMJudgeVerifier
from evsys_sdk.registry import inference, register_inference, register_verifier, verifiers
from evsys_sdk.verifiers.stress import StressReport, expected_answers, solutions, stress


@pytest.fixture(autouse=True)
def registries_as_before(monkeypatch):
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    monkeypatch.setattr(inference, "entries", dict(inference.entries))


def task(task_id, fn_name, expected=None, *, prompt="What is it?", metadata=None, **params) -> HarborTask:
    plan = InProcessVerifier(fn_name=fn_name, expected=expected, params=params)
    return HarborTask(task_id=task_id, instruction=prompt, verifier=plan, metadata=metadata or {})


def told(found: StressReport) -> set[tuple[str, str, str]]:
    return {(finding.task_id, finding.agent, finding.what) for finding in found.findings}


SOUND = [
    task("five", "exact_match", "5", prompt="2 + 3?"),
    task("six", "exact_match", "6", prompt="3 + 3?"),
    task("eighteen", "numeric_match", 18, prompt="Twice nine?"),
    task("forty", "numeric_match", 40, prompt="Four times ten?"),
    task("send", "tool_calls_match", [{"name": "send", "arguments": {"to": "a"}}]),
    task("list", "tool_calls_match", [{"name": "list", "arguments": {}}]),
    task("city", "json_match", {"city": "Oslo"}),
    task("year", "regex_match", r"\d{4}", full_match=True, metadata={"solution": "1905"}),
    task("both", "weighted", "7", parts=[{"fn_name": "exact_match"}, {"fn_name": "format_only"}]),
]


async def test_a_sound_benchmark_has_no_findings():
    found = await stress(SOUND)
    assert told(found) == set() and found.without_solution == []
    passed = {report.agent: (report.passed, report.tasks) for report in found.agents}
    assert passed["oracle"] == (9, 9)
    assert {passed[name] for name in ("null", "empty", "echo_prompt", "long_repeat", "answer_list")} == {(0, 9)}


async def test_each_agent_finds_its_own_kind_of_weakness():
    @register_verifier("long_is_good")
    def long_is_good(model_output, expected, params):
        return len(model_output) > 10_000

    @register_verifier("empty_is_fine")
    def empty_is_fine(model_output, expected, params):
        return model_output.strip() in ("", expected)

    found = await stress(
        [
            *SOUND,
            task("blank", "empty_is_fine", "x"),
            task("parrot", "contains", "azure", prompt="Say azure."),
            task("verbose", "long_is_good", metadata={"solution": "x" * 20_000}),
            task("grep", "contains", "Reykjavik"),
            task("sniff", "contains", "ok", prompt="Fine?"),
        ]
    )
    # Also the list is longer than 10,000 characters only when the benchmark is large; here it is not.
    assert told(found) == {
        ("blank", "null", "passes"),
        ("blank", "empty", "passes"),
        ("parrot", "echo_prompt", "passes"),
        ("parrot", "long_repeat", "passes"),
        ("parrot", "answer_list", "passes"),
        ("verbose", "long_repeat", "passes"),
        ("grep", "answer_list", "passes"),
        ("sniff", "long_repeat", "passes"),
        ("sniff", "answer_list", "passes"),
    }


async def test_a_solution_that_fails_is_found():
    found = await stress([*SOUND, task("typo", "numeric_match", 3, metadata={"solution": "four"})])
    assert told(found) == {("typo", "oracle", "fails")}


async def test_a_verifier_that_breaks_is_told_of_once():
    found = await stress([*SOUND, task("broken", "exact_match", None)])
    assert len(found.findings) == 1
    assert found.findings[0].what == "breaks" and "needs `expected`" in str(found.findings[0].error)


async def test_a_suite_with_one_answer_is_passed_by_a_parrot():
    found = await stress([task(str(n), "exact_match", "positive") for n in range(5)])
    assert {finding.agent for finding in found.findings} == {"answer_list"} and len(found.findings) == 5
    assert told(await stress([task("only", "exact_match", "positive")])) == set()


async def test_the_answer_list_holds_every_answer_of_the_suite():
    seen = []

    @register_verifier("notes")
    def notes(model_output, expected, params):
        seen.append(model_output)
        return 0.0

    tasks = [task(f"t{n}", "notes", f"answer-{n}") for n in range(20)]
    await stress(tasks)
    assert expected_answers(tasks) == [f"answer-{n}" for n in range(20)]
    assert any(all(f"answer-{n}" in output for n in range(20)) for output in seen)


def test_the_solution_left_by_the_author_comes_before_a_guess():
    assert solutions(task("a", "exact_match", "5", metadata={"solution": "five, so 5"})) == ["five, so 5"]
    assert solutions(task("a", "exact_match", {"tool_slug": "GMAIL_SEND"}))[0] == "GMAIL_SEND"
    assert json.loads(solutions(task("a", "json_match", {"b": [1]}))[0]) == {"b": [1]}
    assert solutions(task("a", "regex_match", r"v1\.2"))[0] == "v1.2"


async def test_a_task_without_a_known_solution_is_named_and_not_failed():
    found = await stress([task("pattern", "regex_match", r"^[a-z]{3}\d$")])
    assert found.without_solution == ["pattern"] and told(found) == set()


async def test_a_judge_that_believes_what_it_reads_is_found():
    class Gullible:
        def __init__(self, **params):
            pass

        async def agenerate(self, *, prompt, max_tokens, temperature, stop):
            claimed = "meets the rubric in full" in prompt
            return json.dumps({"score": 1.0 if claimed else 0.0})

    register_inference("gullible")(Gullible)
    plan = LLMJudgeVerifier(judge_model="gullible", rubric="Is it kind?")
    found = await stress([HarborTask(task_id="t", instruction="Be kind.", verifier=plan)])
    assert told(found) == {("t", "grader_attack", "passes")}


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
async def test_tests_that_run_the_models_code_in_their_own_process_are_found():
    code = "exec(open('output.txt').read())\nassert answer == 42\n"
    plan = E2BVerifier(dockerfile="FROM x", test_sh="python3 test_state.py", test_state_py=code)
    sound = E2BVerifier(dockerfile="FROM x", test_sh='[ "$(timeout 5 python3 output.txt 2>/dev/null)" = 42 ]')
    found = await stress(
        [
            HarborTask(task_id="t", instruction="?", verifier=plan, metadata={"solution": "answer = 42"}),
            HarborTask(task_id="s", instruction="?", verifier=sound, metadata={"solution": "print(42)"}),
        ]
    )
    assert told(found) == {("t", "grader_attack", "passes")}


async def test_a_machine_without_a_sandbox_is_no_finding(monkeypatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    monkeypatch.setattr(sandbox, "why_unavailable", lambda: "no bubblewrap")
    plan = E2BVerifier(dockerfile="FROM x", test_sh="true")
    red, blue = (InProcessVerifier(fn_name="exact_match", expected=colour) for colour in ("red", "blue"))
    plans = {"t": plan, "r": red, "b": blue}
    tasks = [HarborTask(task_id=name, instruction="?", verifier=each) for name, each in plans.items()]
    found = await stress(tasks)
    assert found.findings == [] and [(each.task_id, each.why) for each in found.not_run] == [("t", "no bubblewrap")]
    assert {report.tasks for report in found.agents} == {2}, "the other tasks are tried"
