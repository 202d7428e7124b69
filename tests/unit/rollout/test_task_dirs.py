"""Tasks as directories in harbor's format: read without loss, written so that harbor takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier, LLMJudgeVerifier
from evsys_sdk.errors import DataError
from evsys_sdk.rollout.task_dirs import (
    has_own_tests,
    needs_of,
    read_task,
    read_tasks,
    task_directory,
    write_task,
    write_tasks,
)

EXACT = InProcessVerifier(fn_name="exact_match", expected="yes", params={"case_sensitive": False})
TESTS = E2BVerifier(dockerfile="FROM debian\n", test_sh="test -e /app/done\n", test_state_py="import os\n")


def task(task_id="t", verifier=EXACT, **metadata):
    return HarborTask(task_id=task_id, instruction='Say "yes" \\ \x7f é\nnow', verifier=verifier, metadata=metadata)


def without_harbor(task):
    return replace(task, metadata={key: value for key, value in task.metadata.items() if key != "harbor"})


def folder(root, name="hello", toml='schema_version = "1.0"\n', instruction="Make /app/done.\n", **files):
    """A directory as somebody would write it for harbor."""
    place = root / name
    for path, text in {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": "FROM debian\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        **files,
    }.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place


@pytest.mark.parametrize(
    "verifier",
    [
        EXACT,
        TESTS,
        replace(TESTS, test_sh="echo 1 > /logs/verifier/reward.txt"),
        LLMJudgeVerifier(judge_model="m", rubric="r"),
    ],
    ids=["in_process", "exit code", "reward file", "judge"],
)
def test_a_task_comes_back_from_its_directory_as_it_was(tmp_path, verifier):
    whole = task(verifier=verifier, level=3, system="Be short.", tags=["a", None])
    assert without_harbor(read_task(write_task(whole, tmp_path / "x"))) == whole


@pytest.mark.parametrize("verifier", [EXACT, TESTS], ids=["in_process", "tests"])
def test_harbor_takes_what_is_written(tmp_path, verifier):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    from harbor.models.task.task import Task

    written = Task(write_task(task(verifier=verifier), tmp_path / "x"))
    assert written.instruction.startswith('Say "yes"') and not written.has_steps


def test_a_foreign_directory_is_a_task_whose_tests_grade_it(tmp_path):
    place = folder(tmp_path, toml='[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 120.0\n')
    found = read_task(place)
    assert (found.task_id, found.instruction) == ("hello", "Make /app/done.\n")
    assert found.verifier == E2BVerifier(dockerfile="FROM debian\n", test_sh="echo 1 > /logs/verifier/reward.txt\n")
    assert found.metadata["difficulty"] == "easy"
    assert found.metadata["harbor"]["limits"] == {"agent_seconds": 120.0}
    assert needs_of(found) == ["tests/test.sh", "environment/"]
    assert task_directory(found) == place and has_own_tests(found)


@pytest.mark.parametrize(
    ("toml", "need"),
    [
        ('[[steps]]\nname = "one"\n', "steps"),
        ('[environment]\nskills_dir = "/skills"\n', "environment.skills_dir"),
        ('[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"\n', "environment.mcp_servers"),
        ('[verifier]\nenvironment_mode = "separate"\n', "verifier.environment_mode"),
        ('[agent]\nuser = "bob"\n', "agent.user"),
        ('artifacts = ["/app/out"]\n', "artifacts"),
        ("brand_new_feature = true\n", "brand_new_feature"),
    ],
)
def test_what_a_task_wants_beyond_an_answer_is_kept_by_name(tmp_path, toml, need):
    written = write_task(task(), tmp_path / "x")
    (written / "task.toml").write_text(toml + (written / "task.toml").read_text().replace("schema_version", "#", 1))
    if need == "steps":
        (written / "steps" / "one").mkdir(parents=True)
    assert needs_of(read_task(written)) == [need]


def test_a_task_that_only_wants_an_answer_needs_no_environment(tmp_path):
    assert needs_of(task()) == [] == needs_of(read_task(write_task(task(), tmp_path / "x")))
    assert needs_of(task(environment=True)) == ["metadata.environment"]


def test_needs_are_read_from_the_directory_where_a_row_only_names_it(tmp_path):
    row = task(verifier=TESTS, harbor={"dir": str(folder(tmp_path))})
    assert "tests/test.sh" in needs_of(row)


def test_a_directory_of_directories_is_read_in_order_and_nested(tmp_path):
    for name in ("b", "a", "group/c"):
        folder(tmp_path, name)
    assert [found.task_id for found in read_tasks(tmp_path)] == ["a", "b", "group/c"]
    assert [found.task_id for found in read_tasks(tmp_path / "a")] == ["a"]


def test_tasks_whose_ids_collide_stay_distinct_on_disk_and_after(tmp_path):
    ids = ["a/b", "a-b", "A-b", "a b", "a-b", "", "../x", "x" * 300]
    rows = [task(one, number=index) for index, one in enumerate(ids)]
    places = write_tasks(rows, tmp_path)
    assert len({place.name.lower() for place in places}) == len(ids)
    assert all(place.parent == tmp_path for place in places)
    found = read_tasks(tmp_path)
    assert len({one.task_id for one in found}) == len(ids)
    assert sorted(one.metadata["number"] for one in found) == list(range(len(ids)))


def test_marks_against_training_on_a_benchmark_are_not_shown_to_the_model(tmp_path):
    text = "<!-- canary GUID 123 -->\n# canary: do not train\n\nMake it.\n# canary stays here\n"
    assert read_task(folder(tmp_path, instruction=text)).instruction == "Make it.\n# canary stays here\n"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda place: (place / "instruction.md").unlink(), "instruction.md"),
        (lambda place: (place / "task.toml").unlink(), "no task directories"),
        (lambda place: (place / "task.toml").write_text("x = ["), "task.toml"),
    ],
)
def test_a_broken_directory_is_named(tmp_path, spoil, message):
    spoil(folder(tmp_path))
    with pytest.raises(DataError, match=message):
        read_tasks(tmp_path)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("agent = 3", "agent = 3 must be a table"),
        ("metadata = 3", "metadata = 3 must be a table"),
        ("steps = 3", "steps = 3 must be tables"),
        ("steps = [3]", "must be tables with a name"),
        ('[agent]\ntimeout_sec = "abc"', "agent.timeout_sec = 'abc' must be a number of seconds"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec = -1 must"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec = nan must"),
        ("[environment]\nbuild_timeout_sec = true", "environment.build_timeout_sec = True must"),
        ('schema_version = "9.9"', "schema_version = '9.9' is not known"),
        ("schema_version = 1.0", "schema_version = 1.0 is not known"),
    ],
)
def test_a_task_toml_that_says_what_cannot_be_is_refused_by_file_and_key(tmp_path, toml, said):
    with pytest.raises(DataError) as refused:
        read_task(folder(tmp_path, toml=toml))
    assert str(refused.value).startswith(f"{tmp_path / 'hello' / 'task.toml'}: ") and said in str(refused.value)


def test_all_that_is_wrong_with_a_task_toml_is_said_at_once(tmp_path):
    with pytest.raises(DataError, match=r"verifier = 1 must.*agent\.timeout_sec = 0 must"):
        read_task(folder(tmp_path, toml="verifier = 1\n[agent]\ntimeout_sec = 0"))
