"""Tests judge: they run beside what the model wrote, in a sandbox, and their exit code is the reward.

In: a Dockerfile, `test.sh` and perhaps `test_state.py`. Out: 1.0 for exit code 0 and 0.0 for any other; tests that
could not run, or did not end, are `VerifierFailed`. With E2B_API_KEY set they run in e2b, otherwise in the local
sandbox; never outside one. The model's text is `output.txt` in the working directory; the tests lie in /tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import Field

from evsys_sandbox.dockerfile import DockerfileRecipe, recipe_of, syntax_error, what_is_missing
from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.errors import MissingDependency, VerifierFailed, shorten
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import register_verifier

KEY = "E2B_API_KEY"
TESTS = "/tests"
RUN_TESTS = f"if command -v bash >/dev/null; then exec bash {TESTS}/test.sh; else exec sh {TESTS}/test.sh; fi"
INSTEAD = f"set {KEY} to run it in e2b"
# The shell's own codes for a command that cannot be run or found: the tests said nothing about the model.
NOT_RUN = (126, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsOutcome:
    """How the tests ended."""

    exit_code: int
    stdout: str
    stderr: str
    where: str


@register_verifier("e2b")
class SandboxTests:
    """The exit code of tests that run beside the model's output in a sandbox."""

    class Config(Params):
        dockerfile: str
        """Of the environment in which the tests run."""
        test_sh: str = Field(min_length=1)
        """The script whose exit code decides."""
        test_state_py: str = ""
        """A file that the script may use."""
        timeout_seconds: float = Field(default=120.0, gt=0)
        """Of the whole verification."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    @classmethod
    def why_not(cls, params: JsonDict) -> str | None:
        """What keeps the tests from running here."""
        if os.environ.get(KEY):
            return None if importlib.util.find_spec("e2b") is not None else _NO_E2B
        from evsys_sandbox.sandbox import why_unavailable

        missing = what_is_missing(cls.Config(**params).dockerfile)
        return why_unavailable() or (f"{missing}: {INSTEAD}, or install it here" if missing else None)

    async def verify(self, *, prompt: object, completion: str, target: object) -> VerificationResult:
        broken = await asyncio.to_thread(syntax_error, self.cfg.test_sh)
        if broken is not None:
            raise VerifierFailed(f"the tests could not run: test.sh: {broken}")
        cfg, is_remote = self.cfg, bool(os.environ.get(KEY))
        # Where everything lies. The tests are in the working directory too, for those who call them by bare name.
        workdir = recipe_of(cfg.dockerfile).workdir
        tests = {"test.sh": cfg.test_sh, **({"test_state.py": cfg.test_state_py} if cfg.test_state_py else {})}
        texts = {f"{folder}/{name}": text for folder in (TESTS, workdir) for name, text in tests.items()}
        texts[f"{workdir}/output.txt"] = completion
        files = {path: text.encode(errors="replace") for path, text in texts.items()}
        # A time limit means little when all of a batch's tests share two cores.
        most = 32 if is_remote else 2 * (os.cpu_count() or 1)
        async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(most)):
            tried = await (_run_in_e2b if is_remote else _run_here)(cfg, files)
        if tried.exit_code in NOT_RUN:
            raise VerifierFailed(
                f"the tests could not run (exit code {tried.exit_code}): {shorten(tried.stderr or tried.stdout, 200)}"
            )
        info = {name: getattr(tried, name)[-2000:] for name in ("stdout", "stderr", "where")}
        return VerificationResult(reward=float(tried.exit_code == 0), info={"exit_code": tried.exit_code, **info})


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _environment(recipe: DockerfileRecipe) -> dict[str, str]:
    return {**recipe.env, "EVSYS_OUTPUT": f"{recipe.workdir}/output.txt"}


async def _run_here(cfg: SandboxTests.Config, files: dict[str, bytes]) -> TestsOutcome:
    from evsys_sandbox.grading import GRADER_HOME, grading_variables, tracing_for
    from evsys_sandbox.sandbox import Sandbox, View

    missing = await asyncio.to_thread(what_is_missing, cfg.dockerfile)
    if missing:
        raise VerifierFailed(f"{missing}: {INSTEAD}, or install it here")
    recipe = recipe_of(cfg.dockerfile)
    async with Sandbox(folders=(recipe.workdir, TESTS), read_only=(TESTS,), aliases=recipe.aliases) as box:
        for path, content in files.items():
            box.write(path, content)
        for step in recipe.steps:
            done = await box.run(step, timeout_seconds=cfg.timeout_seconds, env=_environment(recipe))
            if done.exit_code != 0:
                said = shorten(done.stderr or done.stdout, 200)
                raise VerifierFailed(f"`RUN {step}` failed in the local sandbox ({said}): {INSTEAD}")
        # The copies beside the model's work too: what it runs must not change the tests that run it.
        tests = ["test.sh", *(["test_state.py"] if cfg.test_state_py else [])]
        view = View(
            pinned={f"{recipe.workdir}/{name}": f"{TESTS}/{name}" for name in tests},
            home=GRADER_HOME,
            tracing=tracing_for(cfg.test_sh + cfg.test_state_py),
        )
        env = grading_variables(_environment(recipe))
        result = await box.run(RUN_TESTS, timeout_seconds=cfg.timeout_seconds, env=env, view=view)
    if result.timed_out:
        raise VerifierFailed(_too_long(cfg))
    return TestsOutcome(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr, where="local")


def _too_long(cfg: SandboxTests.Config) -> str:
    return (
        f"the tests did not end within {cfg.timeout_seconds:g} s; limit the model's code in test.sh (`timeout 10 ...`)"
    )


_NO_E2B = f"{KEY} is set, and the e2b package is not installed: pip install 'evsys-sdk[e2b]'"
_builds: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[None]]] = WeakKeyDictionary()


async def _run_in_e2b(cfg: SandboxTests.Config, files: dict[str, bytes]) -> TestsOutcome:
    try:
        e2b = importlib.import_module("e2b")
    except ImportError as exc:
        raise MissingDependency(_NO_E2B) from exc
    recipe = recipe_of(cfg.dockerfile)
    template = await _template(e2b, cfg.dockerfile)
    # `timeout` is how long the box lives, in seconds: longer than the tests may take, so that their own limit ends
    # them.
    box = await e2b.AsyncSandbox.create(
        template=template, timeout=int(cfg.timeout_seconds) + 60, allow_internet_access=False
    )
    env = _environment(recipe)
    try:
        await box.files.write_files([{"path": path, "data": data} for path, data in files.items()], user="root")
        done = await box.commands.run(RUN_TESTS, cwd=recipe.workdir, user="root", envs=env, timeout=cfg.timeout_seconds)
    except e2b.CommandExitException as exc:  # how e2b reports any exit code but 0
        done = exc
    except e2b.TimeoutException as exc:
        raise VerifierFailed(_too_long(cfg)) from exc
    finally:
        # A rollout that is cancelled must not leave a box that is paid for until its time is up.
        await asyncio.shield(box.kill())
    return TestsOutcome(exit_code=done.exit_code, stdout=done.stdout or "", stderr=done.stderr or "", where="e2b")


async def _template(e2b: Any, dockerfile: str) -> str:
    """The image's name at e2b; built at the first use, once for all rollouts that need it."""
    # By content: another Dockerfile is another image, and later processes find the same one again.
    name = "evsys-" + hashlib.sha256(dockerfile.encode()).hexdigest()[:24]
    builds = _builds.setdefault(asyncio.get_running_loop(), {})
    # A build that failed is tried again by the next rollout.
    if name not in builds or (builds[name].done() and (builds[name].cancelled() or builds[name].exception())):

        async def build() -> None:
            if not await e2b.AsyncTemplate.alias_exists(name):
                await e2b.AsyncTemplate.build(e2b.Template().from_dockerfile(dockerfile), alias=name)

        builds[name] = asyncio.ensure_future(build())
    await asyncio.shield(builds[name])
    return name
