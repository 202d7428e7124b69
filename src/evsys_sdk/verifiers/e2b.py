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

from evsys_sdk.config.base import Params
from evsys_sdk.dockerfile import Recipe, recipe_of, what_is_missing
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
class Tried:
    """How the tests ended."""

    exit_code: int
    stdout: str
    stderr: str
    where: str


@register_verifier("e2b", yields=True)
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
    def why_not(cls, params: dict[str, Any]) -> str | None:
        """What keeps the tests from running here."""
        if os.environ.get(KEY):
            return None if _has_e2b() else _NO_E2B
        from evsys_sdk.sandbox import why_unavailable

        missing = what_is_missing(cls.Config(**params).dockerfile)
        return why_unavailable() or (f"{missing}: {INSTEAD}, or install it here" if missing else None)

    async def verify(self, *, prompt: Any, completion: str, target: Any) -> VerificationResult:
        run = _run_in_e2b if os.environ.get(KEY) else _run_here
        async with _slots():  # a time limit means little when all of a batch's tests share two cores
            tried = await run(self.cfg, _files(self.cfg, completion))
        if tried.exit_code in NOT_RUN:
            raise VerifierFailed(
                f"the tests could not run (exit code {tried.exit_code}): {shorten(tried.stderr or tried.stdout, 200)}"
            )
        info = {name: getattr(tried, name)[-2000:] for name in ("stdout", "stderr", "where")}
        return VerificationResult(reward=float(tried.exit_code == 0), info={"exit_code": tried.exit_code, **info})


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _slots() -> asyncio.Semaphore:
    many = 32 if os.environ.get(KEY) else 2 * (os.cpu_count() or 1)
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(many))


def _files(cfg: SandboxTests.Config, completion: str) -> dict[str, bytes]:
    """Where everything lies. The tests are in the working directory too, for those who call them by bare name."""
    workdir = recipe_of(cfg.dockerfile).workdir
    tests = {"test.sh": cfg.test_sh, **({"test_state.py": cfg.test_state_py} if cfg.test_state_py else {})}
    places = {f"{folder}/{name}": text for folder in (TESTS, workdir) for name, text in tests.items()}
    texts = {**places, f"{workdir}/output.txt": completion}
    return {path: text.encode(errors="replace") for path, text in texts.items()}


def _environment(recipe: Recipe) -> dict[str, str]:
    return {**recipe.env, "EVSYS_OUTPUT": f"{recipe.workdir}/output.txt"}


async def _run_here(cfg: SandboxTests.Config, files: dict[str, bytes]) -> Tried:
    from evsys_sdk.sandbox import Sandbox, View
    from evsys_sdk.sandbox_grading import grading_variables

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
        view = View(pinned={f"{recipe.workdir}/{name}": f"{TESTS}/{name}" for name in tests})
        env = grading_variables(_environment(recipe))
        result = await box.run(RUN_TESTS, timeout_seconds=cfg.timeout_seconds, env=env, view=view)
    if result.timed_out:
        raise VerifierFailed(_too_long(cfg))
    return Tried(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr, where="local")


def _too_long(cfg: SandboxTests.Config) -> str:
    return (
        f"the tests did not end within {cfg.timeout_seconds:g} s; limit the model's code in test.sh (`timeout 10 ...`)"
    )


_NO_E2B = f"{KEY} is set, and the e2b package is not installed: pip install 'evsys-sdk[e2b]'"
_builds: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[None]]] = WeakKeyDictionary()


def _has_e2b() -> bool:
    return importlib.util.find_spec("e2b") is not None


async def _run_in_e2b(cfg: SandboxTests.Config, files: dict[str, bytes]) -> Tried:
    try:
        e2b = importlib.import_module("e2b")
    except ImportError as exc:
        raise MissingDependency(_NO_E2B) from exc
    recipe = recipe_of(cfg.dockerfile)
    template = await _template(e2b, cfg.dockerfile)
    box = await e2b.AsyncSandbox.create(
        template=template, timeout=int(cfg.timeout_seconds) + 60, allow_internet_access=False
    )
    try:
        await box.files.write_files([{"path": path, "data": data} for path, data in files.items()], user="root")
        return await _test_in_e2b(e2b, box, cfg, recipe)
    finally:
        await asyncio.shield(box.kill())


async def _test_in_e2b(e2b: Any, box: Any, cfg: SandboxTests.Config, recipe: Recipe) -> Tried:
    try:
        done = await box.commands.run(
            RUN_TESTS,
            cwd=recipe.workdir,
            user="root",
            envs=_environment(recipe),
            timeout=cfg.timeout_seconds,
        )
    except e2b.CommandExitException as exc:  # how e2b reports any exit code but 0
        done = exc
    except e2b.TimeoutException as exc:
        raise VerifierFailed(_too_long(cfg)) from exc
    return Tried(exit_code=done.exit_code, stdout=done.stdout or "", stderr=done.stderr or "", where="e2b")


async def _template(e2b: Any, dockerfile: str) -> str:
    """The image's name at e2b; built at the first use, once for all rollouts that need it."""
    name = "evsys-" + hashlib.sha256(dockerfile.encode()).hexdigest()[:24]
    builds = _builds.setdefault(asyncio.get_running_loop(), {})
    if name not in builds or (builds[name].done() and (builds[name].cancelled() or builds[name].exception())):
        builds[name] = asyncio.ensure_future(_build(e2b, name, dockerfile))
    await asyncio.shield(builds[name])
    return name


async def _build(e2b: Any, name: str, dockerfile: str) -> None:
    if not await e2b.AsyncTemplate.alias_exists(name):
        await e2b.AsyncTemplate.build(e2b.Template().from_dockerfile(dockerfile), alias=name)
