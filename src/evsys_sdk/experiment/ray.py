"""Runs on a Ray cluster: where one machine is not enough.

In: run plans, from the experiment's threads. Out: their results. A worker of the cluster executes the run and writes
into its directory, which lies on a disk that all machines share; journal, budget and callbacks stay in this process
(`remote.py`). A worker that is lost is replaced, and its run resumes from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from evsys_sdk import __version__
from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.errors import Cancelled, EvsysError, RunLocked, need
from evsys_sdk.experiment.remote import (
    LOCK_POLL_SECONDS,
    LOCK_SECONDS,
    RemoteRunSpec,
    RpcCall,
    RpcConnection,
    RpcReply,
    RpcServer,
    execute_remote,
    sendable,
)
from evsys_sdk.logs import configure_logger, get_logger
from evsys_sdk.protocols import RunResult, RunStatus
from evsys_sdk.registry import register_launcher
from evsys_sdk.run.stop import StopFlag

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from evsys_sdk.run.plan import RunPlan

THREADS = 4
"""Of a worker: a run, the wait for its calls, an answer, a signal."""
PARENT_POLL_SECONDS = 1.0
POLL_SECONDS = 0.5
WARN_AFTER_SECONDS = 15.0
"""After so long without a free place on the cluster, say so."""
CONNECT_SECONDS = 10.0


class RayWorker:
    """An actor that executes one run at a time and keeps its backend warm for the next. `run` executes on one thread of
    the actor, the other methods beside it."""

    def __init__(self, environment: Mapping[str, str]):
        os.environ.update(environment)
        configure_logger()
        parent = os.getppid()

        def end_with_parent() -> None:
            # Without the raylet that started it nothing can reach this process, and it would keep its run directory
            # locked. Ray itself waits for the run to end, or takes an unreaped raylet for a living one.
            while os.getppid() == parent:
                time.sleep(PARENT_POLL_SECONDS)
            os._exit(1)

        threading.Thread(target=end_with_parent, name="evsys-parent", daemon=True).start()
        self._connection, self._stop = RpcConnection(), StopFlag()
        self._where = f"Ray worker {os.getpid()} on {socket.gethostname()}"

    def ready(self, folder: str, version: str) -> None:
        """Go to the folder in which the experiment was started, as the same SDK."""
        if version != __version__:
            raise EvsysError(f"{self._where} has evsys-sdk {__version__}, and the experiment is run by {version}")
        try:
            os.chdir(folder)
        except OSError as exc:
            raise EvsysError(
                f"{self._where} cannot go to {folder}: {exc.strerror}. Runs on other machines need the project on a "
                "disk that all of them share"
            ) from exc

    def run(self, spec: RemoteRunSpec) -> RpcReply:
        self._stop = StopFlag()
        try:
            return RpcReply(value=execute_remote(spec, self._connection, self._stop, where=self._where))
        except Exception as exc:
            return RpcReply(error=sendable(exc))

    def calls(self, seconds: float) -> list[RpcCall]:
        return self._connection.calls(seconds)

    def answer(self, number: int, answer: RpcReply) -> None:
        self._connection.answer(number, answer)

    def stop(self) -> None:
        self._stop.set()

    def interrupt(self) -> None:
        self._stop.interrupt()


class ClusterLost(EvsysError):
    """No worker can start any more."""


@register_launcher("ray")
class RayLauncher:
    """Each run on a worker of a Ray cluster (extra `ray`), `max_concurrent_arms` at a time."""

    requires: ClassVar = {"ray": "ray"}

    class Config(Params):
        address: str | None = None
        """Of the cluster, `host:port`; by default RAY_ADDRESS, a cluster that runs on this machine, or one of this
        process's own."""
        num_cpus: float = Field(default=1.0, ge=0)
        """Cores that a run takes up on its machine."""
        num_gpus: float = Field(default=0.0, ge=0)
        """GPUs that a run takes up on its machine."""
        resources: dict[str, float] = Field(default_factory=dict)
        """Custom resources of the cluster that a run takes up, such as `{big_memory: 1}`."""
        runtime_env: JsonDict = Field(default_factory=dict)
        """Ray's own description of what workers need (`pip`, `env_vars`, ...)."""
        environment: list[str] = Field(default_factory=list)
        """Variables of this process that workers get too, such as API keys; those that begin with EVSYS_ always go."""
        max_losses: int = Field(default=5, ge=0)
        """How often a run resumes on another worker after losing one."""

    def __init__(self, **params: object):
        self.cfg = self.Config.model_validate(params)
        self._idle: list[ActorHandle] = []
        self._lock = threading.Lock()
        self._ray: ModuleType | None = None
        self._is_ours = False

    def execute(self, plan: RunPlan) -> RunResult:
        from evsys_sdk.run.runner import load_completed

        before = load_completed(plan)
        if before is not None:
            return before
        errors, server, why = self.ray.exceptions, RpcServer(plan), ""
        # The first worker, and one more for every loss that is allowed.
        for losses in range(1, self.cfg.max_losses + 2):
            try:
                with self.worker(plan.run_id, plan.stop.event.is_set) as worker:
                    return self._serve(worker, server)
            except (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError) as exc:
                server.lose_worker()
                why = str(exc).strip().splitlines()[0]
                what_now = "resumes elsewhere" if losses <= self.cfg.max_losses else "is given up"
                get_logger(__name__).warning("%s lost its Ray worker and %s: %s", plan.run_id, what_now, why)
            except ClusterLost as exc:
                return _record_failure(plan, str(exc))
            except Cancelled as exc:
                if losses == 1:  # it has not begun
                    raise
                return _record_failure(plan, str(exc), status="cancelled")
        return _record_failure(plan, f"lost its Ray worker {self.cfg.max_losses + 1} times; the last time: {why}")

    def _serve(self, worker: ActorHandle, server: RpcServer) -> RunResult:
        """Let the worker execute the run, and make the calls it asks for until the run is over."""
        plan, sent = server.plan, set[str]()
        spec = RemoteRunSpec.of(plan, fresh=plan.fresh and not server.begun)
        done: ObjectRef[RpcReply] = worker.run.remote(spec)
        is_done = False
        while not server.over and not is_done:
            # Seen before the calls are fetched: those are then its last ones.
            is_done = bool(self.ray.wait([done], timeout=0)[0])
            for call in self.ray.get(worker.calls.remote(POLL_SECONDS)):
                # Workers are reused, and a thread of the run before may have called after that run was over.
                answer = server.handle(call) if call.run_id == plan.run_id else None
                if answer is not None:
                    worker.answer.remote(call.number, answer)
            for signal, is_wanted in {"stop": plan.stop.event.is_set(), "interrupt": plan.stop.interrupted}.items():
                if is_wanted and signal not in sent:
                    sent.add(signal)
                    getattr(worker, signal).remote()
        reply: RpcReply = self.ray.get(done)
        if error := reply.error or server.broken:
            raise error
        result: RunResult = reply.value
        return result

    @property
    def ray(self) -> ModuleType:
        """Ray, connected to the cluster."""
        with self._lock:
            if self._ray is not None:
                return self._ray
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Else SIGTERM, by which an experiment is asked to stop, ends this process with a dump.
            os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
            ray: ModuleType = need("ray", extra="ray")
            if not ray.is_initialized():
                address = self.cfg.address or os.environ.get("RAY_ADDRESS")
                try:
                    host, _, port = (address or "").rpartition(":")
                    if host and port.isdigit():  # Ray itself tries for minutes, and cannot be interrupted
                        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
                    ray.init(address=self.cfg.address, logging_level="ERROR", log_to_driver=True)
                except (RuntimeError, ValueError, OSError) as exc:
                    raise EvsysError(f"there is no Ray cluster at {address or 'this machine'}: {exc}") from exc
                # What is ours is the connection: on a cluster that runs without us `shutdown` only disconnects.
                self._is_ours = True
            self._ray = ray
            return ray

    @contextmanager
    def worker(self, run_id: str, is_stopped: Callable[[], bool]) -> Iterator[ActorHandle]:
        """A worker for one run; it stays for the next, unless something went wrong with it."""
        worker = self._take_idle() or self._start(run_id, is_stopped)
        try:
            yield worker
        # Also KeyboardInterrupt: a worker in the midst of a run must not be handed to the next one.
        except BaseException:
            self.ray.kill(worker)
            raise
        with self._lock:
            self._idle.append(worker)

    def _take_idle(self) -> ActorHandle | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _start(self, run_id: str, is_stopped: Callable[[], bool]) -> ActorHandle:
        """A new worker, or one that becomes idle before the new one is ready."""
        ray, cfg = self.ray, self.cfg
        passed = {key: value for key, value in os.environ.items()
                  if key.startswith("EVSYS_") or key in cfg.environment}  # fmt: skip
        # max_restarts=0: an actor that Ray restarts has lost its run. `execute` takes another worker and resumes there.
        worker = (
            ray.remote(RayWorker)
            .options(
                num_cpus=cfg.num_cpus,
                num_gpus=cfg.num_gpus,
                resources=cfg.resources,
                runtime_env=cfg.runtime_env or None,
                max_concurrency=THREADS,
                max_restarts=0,
            )
            .remote(passed)
        )
        ready = worker.ready.remote(str(Path.cwd()), __version__)
        try:
            other = self._wait_for(ready, run_id, is_stopped)
            if other is None:
                ray.get(ready)
                return worker
        except BaseException as exc:
            ray.kill(worker)
            if isinstance(exc, ray.exceptions.RayTaskError):
                raise EvsysError(str(exc.cause)) from None
            if isinstance(exc, ray.exceptions.RuntimeEnvSetupError):
                raise EvsysError(f"the Ray cluster cannot set up launcher.params.runtime_env: {exc}") from None
            if isinstance(exc, ray.exceptions.RayActorError) and exc.actor_init_failed:
                last, needed = str(exc).strip().splitlines()[-1], f"Every machine needs evsys-sdk {__version__}"
                raise EvsysError(f"a Ray worker could not start: {last}. {needed}") from None
            raise  # bad luck, which the next worker may not have
        ray.kill(worker)
        return other

    def _wait_for(self, ready: ObjectRef[None], run_id: str, is_stopped: Callable[[], bool]) -> ActorHandle | None:
        """Wait until the new worker is ready, or return an older one that becomes idle first: it may have the place
        that the new one waits for. Cancelled when the experiment stops."""
        cfg, warn_at = self.cfg, time.monotonic() + WARN_AFTER_SECONDS
        while not self.ray.wait([ready], timeout=POLL_SECONDS)[0]:
            if is_stopped():
                raise Cancelled("stopped while waiting for a worker")
            # No node joins a cluster of this process's own, and of another one not even the head is there.
            if not any(node["Alive"] for node in self.ray.nodes()):
                raise ClusterLost(
                    "the Ray cluster has lost its last node (killed, or out of memory), so no worker can start; the "
                    "same command resumes from the last checkpoint"
                )
            if (idle := self._take_idle()) is not None:
                return idle
            if time.monotonic() > warn_at:
                warn_at = math.inf
                needs = _describe({"CPU": cfg.num_cpus, "GPU": cfg.num_gpus, **cfg.resources})
                there, free = _describe(self.ray.cluster_resources()), _describe(self.ray.available_resources())
                say = "%s waits for a place on the Ray cluster: it needs %s; there is %s, free of that %s"
                get_logger(__name__).warning(say, run_id, needs, there, free)
        return None

    def close(self) -> None:
        """Release the workers, and the cluster if it is this process's own."""
        if self._ray is not None:
            while worker := self._take_idle():
                self._ray.kill(worker)
            if self._is_ours:
                self._ray.shutdown()


def _describe(resources: Mapping[str, float]) -> str:
    """The resources by which Ray gives out places."""
    hidden = ("node:", "object_store", "memory")
    shown = sorted((key, value) for key, value in resources.items() if value and not key.startswith(hidden))
    return ", ".join(f"{value:g} {key}" for key, value in shown) or "nothing"


def _record_failure(plan: RunPlan, error: str, *, status: RunStatus = "failed") -> RunResult:
    """Record a run that no worker executes, as soon as the lost worker has really released its directory."""
    from evsys_sdk.run.runner import record_failure

    until = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < until and not plan.stop.interrupted:
        try:
            return record_failure(replace(plan, fresh=False), error, status=status)
        except RunLocked:
            time.sleep(LOCK_POLL_SECONDS)
    return plan.failed_result(status, error)
