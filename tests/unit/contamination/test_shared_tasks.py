"""Tasks are the same by what they ask and want, whatever they are called and wherever they lie."""

from __future__ import annotations

import pytest

from evsys_sdk.contamination.tasks import BenchmarkTasks, overlap_of
from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier
from evsys_sdk.rollout.task_dirs import read_task, write_task


def task(text, expected="x", task_id="t", **metadata):
    verifier = InProcessVerifier(fn_name="exact_match", expected=expected)
    return HarborTask(task_id=task_id, instruction=text, verifier=verifier, metadata=metadata)


def shared(mine, theirs):
    return overlap_of(
        BenchmarkTasks(name="val/a", place="metadata.benchmark[0]", tasks=mine),
        BenchmarkTasks(name="test/b", place="metadata.benchmark[1]", tasks=theirs),
    )


@pytest.mark.parametrize(
    "other",
    [
        task("Name the red fruit.", task_id="another"),
        task("  name the RED fruit"),
        task("Name the red fruit.", expected={"answer": "x"}),
        task("Name the red fruit.", difficulty="hard"),
    ],
    ids=["another id", "another spelling", "the answer in another form", "other metadata"],
)
def test_the_same_question_is_the_same_task(other):
    assert shared([task("Name the red fruit.")], [other, task("Name the blue one.")]).shared == 1


@pytest.mark.parametrize(
    "other",
    [
        task("Name the blue fruit."),
        task("Name the red fruit.", history=[{"role": "user", "content": "Think of berries."}]),
    ],
    ids=["another word", "another talk before it"],
)
def test_another_question_is_another_task(other):
    assert shared([task("Name the red fruit.")], [other]).shared == 0


def test_where_several_ask_the_same_what_they_want_decides():
    mine = [task("Do what problem.md says.", expected=str(n)) for n in range(4)]
    theirs = [task("Do what problem.md says.", expected=str(n)) for n in range(3, 9)]
    found = shared(mine, theirs)
    assert (found.shared, found.tested) == (1, 1)


def test_task_directories_are_the_same_by_their_files(tmp_path):
    plan = E2BVerifier(dockerfile="FROM ubuntu\n", test_sh="exit 0\n")
    made = HarborTask(task_id="fix", instruction="Fix the failing test.", verifier=plan)
    here, there, changed = (read_task(write_task(made, tmp_path / name / "fix")) for name in ("a", "b", "c"))
    (tmp_path / "c" / "fix" / "tests" / "more.sh").write_text("exit 1")
    assert shared([here], [there]).shared == 1 and shared([here], [changed]).shared == 0


@pytest.mark.parametrize(
    ("mine", "theirs", "common", "most"), [(10, 10, 5, False), (10, 10, 6, True), (4, 90, 3, True)]
)
def test_most_is_more_than_half_of_the_smaller(mine, theirs, common, most):
    texts = [task(f"Say word number {n} of the list.") for n in range(200)]
    found = shared(texts[:mine], texts[mine - common : mine - common + theirs])
    assert found.shared == common and found.is_most is most
    assert found.text == f"{common} of the {mine} tasks of val/a, which selects, are among the {theirs} of test/b"
