"""Whatever verifier a task carries, one function awaits its verdict."""

from __future__ import annotations

import asyncio

import pytest

from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier, LLMJudgeVerifier
from evsys_sdk.errors import DuplicateKind, VerifierFailed
from evsys_sdk.registry import Registration, register_verifier, verifiers
from evsys_sdk.verifiers import grade, grading_problem, grading_problems


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))


def task(fn_name="exact_match", task_id="t1", **params) -> HarborTask:
    plan = InProcessVerifier(fn_name=fn_name, expected="red", params=params)
    return HarborTask(task_id=task_id, instruction="Say red.", verifier=plan)


async def test_an_in_process_verifier_is_asked_with_its_params():
    assert (await grade(task(), "red")).reward == 1.0
    assert (await grade(task(), "RED")).reward == 0.0
    assert (await grade(task(case_sensitive=False), "RED")).reward == 1.0


async def test_the_instruction_is_the_prompt_unless_another_is_given():
    @register_verifier("sees")
    class Sees:
        async def verify(self, *, prompt, completion, target):
            return float(prompt == completion)

    assert (await grade(task("sees"), "Say red.")).reward == 1.0
    assert (await grade(task("sees"), "other", prompt="other")).reward == 1.0


async def test_a_failure_names_the_task():
    with pytest.raises(VerifierFailed, match="verifier 'exact_match' on task 't1': params: kase: unknown key"):
        await grade(task(kase=1), "red")


async def test_other_rollouts_go_on_while_one_is_graded():
    order = []

    @register_verifier("slow")
    async def slow(completion, expected):
        await asyncio.sleep(0.02)
        order.append("slow")
        return 1.0

    async def quick():
        await asyncio.sleep(0.001)
        order.append("quick")

    await asyncio.gather(grade(task("slow"), ""), quick())
    assert order == ["quick", "slow"]


@pytest.mark.parametrize(
    "plan",
    [LLMJudgeVerifier(judge_model="m", rubric="r"), E2BVerifier(dockerfile="d", test_sh="t", test_state_py="s")],
    ids=lambda plan: plan.kind,
)
async def test_a_plan_is_carried_out_by_the_verifier_of_its_name_which_is_not_a_projects_to_replace(plan):
    seen = {}

    def own(model_output, expected, params):
        seen.update(params)
        return 0.5

    with pytest.raises(DuplicateKind, match=plan.kind):
        register_verifier(plan.kind)(own)
    verifiers.entries[plan.kind] = Registration(name=plan.kind, target=own, origin="tests")
    verdict = await grade(HarborTask(task_id="t1", instruction="?", verifier=plan), "x")
    assert verdict.reward == 0.5
    assert seen == {name: getattr(plan, name) for name in plan.__dataclass_fields__ if name != "kind"}


def test_what_would_stop_grading_is_told_once_for_all_tasks():
    tasks = [task("exact_mach", "a"), task("exact_mach", "b"), task(kase=1, task_id="c"), task(task_id="d")]
    found = grading_problems(tasks)
    assert len(found) == 2
    assert "task 'a'" in found[0] and "closest: exact_match" in found[0]
    assert "task 'c'" in found[1] and "kase" in found[1]
    assert grading_problem(task()) is None
