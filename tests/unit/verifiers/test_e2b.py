"""Tests judge in a sandbox: their exit code is the reward, and tests that could not run are no verdict."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from evsys_sandbox import sandbox
from evsys_sandbox.errors import SandboxUnavailable
from evsys_sandbox.sandbox import why_unavailable
from evsys_sdk.data_types import E2BVerifier, HarborTask
from evsys_sdk.errors import VerifierFailed
from evsys_sdk.registry import verifiers
from evsys_sdk.verifiers import grade, grading_problem

MISSING = why_unavailable()
needs_bubblewrap = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)


def task(test_sh: str, *, dockerfile: str = "FROM debian:12", test_state_py: str = "") -> HarborTask:
    plan = E2BVerifier(dockerfile=dockerfile, test_sh=test_sh, test_state_py=test_state_py)
    return HarborTask(task_id="t1", instruction="Write 42.", verifier=plan)


@needs_bubblewrap
@pytest.mark.parametrize(("output", "reward"), [("42", 1.0), ("41", 0.0), ("", 0.0)])
async def test_the_exit_code_is_the_reward(output, reward):
    verdict = await grade(task("grep -qx 42 output.txt"), output)
    assert verdict.reward == reward and verdict.info["where"] == "local"
    assert verdict.info["exit_code"] == 1 - reward


@needs_bubblewrap
async def test_a_test_in_python_finds_the_output_by_variable_and_its_file_by_either_name():
    code = "import os, sys; sys.exit(open(os.environ['EVSYS_OUTPUT']).read() != 'yes')"
    for call in ("python3 /tests/test_state.py", "python3 test_state.py"):
        assert (await grade(task(call, test_state_py=code), "yes")).reward == 1.0
        assert (await grade(task(call, test_state_py=code), "no")).reward == 0.0


@needs_bubblewrap
async def test_workdir_and_variables_of_the_dockerfile_hold():
    image = 'FROM debian\nWORKDIR /work\nWORKDIR sub\nENV A=1 B="two words"\nRUN mkdir -p made && echo x > made/y\n'
    script = '[ "$PWD" = /work/sub ] && [ "$A$B" = "1two words" ] && cat made/y && cat output.txt'
    assert (await grade(task(script, dockerfile=image), "x")).reward == 1.0


@needs_bubblewrap
async def test_the_code_of_a_model_cannot_change_the_tests():
    verdict = await grade(task("sh output.txt; grep -q right output.txt"), "echo 'exit 0' > /tests/test.sh")
    assert verdict.reward == 0.0 and "Read-only" in verdict.info["stderr"]


@needs_bubblewrap
@pytest.mark.parametrize("script", ["no-such-program output.txt", "/tests", "exec ./output.txt"])
async def test_tests_that_cannot_run_are_no_verdict(script):
    with pytest.raises(VerifierFailed, match=r"^verifier 'e2b' on task 't1': the tests could not run"):
        await grade(task(script), "42")


@needs_bubblewrap
async def test_tests_that_do_not_end_are_no_verdict():
    params = {"dockerfile": "FROM debian", "test_sh": "sleep 60", "timeout_seconds": 0.5}
    with pytest.raises(VerifierFailed, match=r"did not end within 0\.5 s"):
        await verifiers.adapted("e2b").ajudge("", None, params)


@needs_bubblewrap
async def test_many_are_graded_at_once():
    verdicts = await asyncio.gather(*(grade(task("grep -q 1 output.txt"), str(n % 2)) for n in range(24)))
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0] * 12


async def test_without_a_sandbox_nothing_runs_and_the_run_is_told_to_stop(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "why_unavailable", lambda: "the sandbox needs bwrap; nothing is run without a sandbox")
    witness = tmp_path / "ran"
    with pytest.raises(SandboxUnavailable, match="needs bwrap"):
        await grade(task(f"touch {witness}"), "42")
    assert not witness.exists()
    assert "needs bwrap" in str(grading_problem(task("true")))


@needs_bubblewrap
async def test_tests_are_not_failed_for_want_of_their_image():
    image = "FROM x\nRUN pip install no-such-thing-1"
    with pytest.raises(VerifierFailed, match=r"installs no-such-thing-1.*set E2B_API_KEY"):
        await grade(task("exit 1", dockerfile=image), "42")
    with pytest.raises(VerifierFailed, match=r"`RUN touch /data` failed in the local sandbox.*Read-only"):
        await grade(task("exit 1", dockerfile="FROM x\nRUN touch /data"), "42")
    assert "no-such-thing-1" in str(grading_problem(task("true", dockerfile=image)))


class E2BStandIn:
    """As much of the e2b package as is used, with its signatures; notes what is asked of it."""

    def __init__(self, exit_code: int = 0, failure: Exception | None = None):
        self.calls: list = []
        self.exit_code, self.failure = exit_code, failure
        self.module = types.ModuleType("e2b")
        self._fill(self.module)

    def _fill(self, module):
        stand_in = self

        class CommandExitException(Exception):
            def __init__(self, exit_code):
                self.exit_code, self.stdout, self.stderr = exit_code, "out", "err"

        class TimeoutException(Exception):
            pass

        class Template:
            def from_dockerfile(self, dockerfile_content_or_path):
                return f"template of {dockerfile_content_or_path}"

        class AsyncTemplate:
            @classmethod
            async def alias_exists(cls, alias, **opts):
                return False

            @classmethod
            async def build(cls, template, name=None, *, alias=None, **opts):
                await asyncio.sleep(0.01)
                stand_in.calls.append(("build", template, alias))

        class Commands:
            async def run(self, cmd, background=None, envs=None, user=None, cwd=None, *, timeout=60):
                stand_in.calls.append(("run", cmd, cwd, envs))
                if stand_in.failure:
                    raise stand_in.failure
                if stand_in.exit_code:
                    raise CommandExitException(stand_in.exit_code)
                return types.SimpleNamespace(exit_code=0, stdout="out", stderr="")

        class Files:
            async def write_files(self, files, user=None, request_timeout=None):
                stand_in.calls.append(("write", {entry["path"]: entry["data"] for entry in files}))

        class AsyncSandbox:
            commands, files = Commands(), Files()

            @classmethod
            async def create(cls, template=None, timeout=None, metadata=None, envs=None, *, allow_internet_access=None):
                stand_in.calls.append(("create", template, allow_internet_access))
                return cls()

            async def kill(self, **opts):
                stand_in.calls.append(("kill",))
                return True

        for item in (CommandExitException, TimeoutException, Template, AsyncTemplate, AsyncSandbox):
            setattr(module, item.__name__, item)

    def named(self, name: str) -> list:
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def e2b(monkeypatch):
    def install(**options) -> E2BStandIn:
        made = E2BStandIn(**options)
        monkeypatch.setenv("E2B_API_KEY", "key")
        monkeypatch.setitem(sys.modules, "e2b", made.module)
        monkeypatch.setattr(sandbox, "why_unavailable", lambda: "the local sandbox must not be touched")
        return made

    return install


@pytest.mark.parametrize(("exit_code", "reward"), [(0, 1.0), (1, 0.0), (137, 0.0)])
async def test_with_the_key_the_tests_run_in_e2b_and_their_exit_code_is_the_reward(e2b, exit_code, reward):
    made = e2b(exit_code=exit_code)
    verdict = await grade(task("grep 42 output.txt", dockerfile="FROM x\nWORKDIR /work"), "42")
    assert verdict.reward == reward and verdict.info["where"] == "e2b"
    files = made.named("write")[0][1]
    assert files["/work/output.txt"] == b"42" and files["/tests/test.sh"] == b"grep 42 output.txt"
    assert made.named("run")[0][2] == "/work" and made.named("create")[0][2] is False and made.named("kill")


async def test_an_image_is_built_once_for_all(e2b):
    made = e2b()
    await asyncio.gather(*(grade(task("true"), str(n)) for n in range(10)))
    assert len(made.named("build")) == 1 and len(made.named("create")) == len(made.named("kill")) == 10


@pytest.mark.parametrize("failure", [ConnectionError("lost"), "timeout"])
async def test_a_failure_of_e2b_is_no_verdict_and_the_sandbox_is_given_back(e2b, failure):
    made = e2b()
    made.failure = made.module.TimeoutException("slow") if failure == "timeout" else failure
    with pytest.raises(VerifierFailed, match=r"lost|did not end"):
        await grade(task("true"), "42")
    assert made.named("kill")


async def test_exit_code_127_is_no_verdict_in_e2b_either(e2b):
    e2b(exit_code=127)
    with pytest.raises(VerifierFailed, match="could not run"):
        await grade(task("nothing"), "42")


def test_the_key_without_the_package_is_told(monkeypatch):
    monkeypatch.setenv("E2B_API_KEY", "key")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "evsys-sdk[e2b]" in str(grading_problem(task("true")))
