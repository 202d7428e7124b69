"""Workers of a Ray cluster: connected to, asked for, kept warm, let go.

In: what a run needs of a machine. Out: `RayWorker` actors, each for one run at a time. What cannot come up (no cluster,
another version of the SDK there, a folder that is not shared, a cluster whose last node is gone) is an EvsysError that
says so.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evsys_sdk import __version__
from evsys_sdk.errors import Cancelled, EvsysError, need
from evsys_sdk.logs import get_logger

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 15.0
"""After so long without a free place on the cluster, say so."""
CONNECT_SECONDS = 10.0


class ClusterLost(EvsysError):
    """No worker can come up any more."""


class RayPool:
    """The workers of one experiment."""

    def __init__(self, address: str | None, needs: dict[str, Any], runtime_env: dict[str, Any], environment: list[str]):
        self.address, self.needs, self.runtime_env, self.environment = address, needs, runtime_env, environment
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._ray: Any = None
        self._is_ours = False

    @property
    def ray(self) -> Any:
        """Ray, connected to the cluster."""
        with self._lock:
            if self._ray is None:
                self._ray = self._connect()
            return self._ray

    def _connect(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Else SIGTERM, by which an experiment is asked to stop, ends this process with a dump.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        ray = need("ray", extra="ray")
        if ray.is_initialized():
            return ray
        address = self.address or os.environ.get("RAY_ADDRESS")
        try:
            host, _, port = (address or "").rpartition(":")
            if host and port.isdigit():  # Ray itself goes on trying for minutes, and cannot be interrupted
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            ray.init(address=self.address, logging_level="ERROR", log_to_driver=True)
        except (RuntimeError, ValueError, OSError) as exc:
            raise EvsysError(f"there is no Ray cluster at {address or 'this machine'}: {exc}") from exc
        self._is_ours = True
        return ray

    @contextmanager
    def worker(self, run_id: str, is_stopped: Callable[[], bool]) -> Iterator[Any]:
        """A worker for one run; it stays for the next, unless something went wrong with it."""
        worker = self._idle_one() or self._start(run_id, is_stopped)
        try:
            yield worker
        except BaseException:
            self.ray.kill(worker)
            raise
        with self._lock:
            self._idle.append(worker)

    def _start(self, run_id: str, is_stopped: Callable[[], bool]) -> Any:
        from evsys_sdk.running.ray_worker import THREADS, RayWorker

        ray = self.ray
        passed = {
            key: value for key, value in os.environ.items() if key.startswith("EVSYS_") or key in self.environment
        }
        how = {"max_concurrency": THREADS, "max_restarts": 0, "runtime_env": self.runtime_env or None}
        worker = ray.remote(RayWorker).options(**self.needs, **how).remote(passed)
        ready = worker.ready.remote(str(Path.cwd()), __version__)
        try:
            other = self._wait_for(ready, run_id, is_stopped)
            if other is None:
                ray.get(ready)
                return worker
        except BaseException as exc:
            ray.kill(worker)
            raise _why_not(ray, exc) from None
        ray.kill(worker)
        return other

    def _idle_one(self) -> Any:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _wait_for(self, ready: Any, run_id: str, is_stopped: Callable[[], bool]) -> Any:
        """Until the new worker is there, or an older one, which may have the place that the new one waits for, has
        become idle: that one is returned. Cancelled when none is wanted any more."""
        say_at = time.monotonic() + PATIENCE_SECONDS
        while not self.ray.wait([ready], timeout=POLL_SECONDS)[0]:
            if is_stopped():
                raise Cancelled("stopped while waiting for a worker")
            self._refuse_without_nodes()
            if (idle := self._idle_one()) is not None:
                return idle
            if time.monotonic() > say_at:
                say_at = math.inf
                there, free = _told(self.ray.cluster_resources()), _told(self.ray.available_resources())
                say = "%s waits for a place on the Ray cluster: it needs %s; there is %s, free of that %s"
                get_logger(__name__).warning(say, run_id, _told(self.needs), there, free)
        return None

    def _refuse_without_nodes(self) -> None:
        """ClusterLost where nothing is left to wait for: no node joins a cluster of this process's own, and of another
        one not even the head is there."""
        if not any(node["Alive"] for node in self.ray.nodes()):
            raise ClusterLost(
                "the Ray cluster has lost its last node (killed, or out of memory), so no worker can come up; the same "
                "command goes on from the last checkpoint"
            )

    def close(self) -> None:
        """Let go of the workers, and of the cluster if it was ours."""
        if self._ray is None:
            return
        for worker in self._idle:
            self._ray.kill(worker)
        self._idle.clear()
        if self._is_ours:
            self._ray.shutdown()


def _why_not(ray: Any, exc: BaseException) -> BaseException:
    """Why a worker did not come up: the error itself if that was bad luck, which may be better the next time."""
    if isinstance(exc, ray.exceptions.RayTaskError):
        return EvsysError(str(exc.cause))
    if isinstance(exc, ray.exceptions.RuntimeEnvSetupError):
        return EvsysError(f"launcher.params.runtime_env cannot be set up on the Ray cluster: {exc}")
    if isinstance(exc, ray.exceptions.RayActorError) and exc.actor_init_failed:
        last = str(exc).strip().splitlines()[-1]
        return EvsysError(f"a Ray worker could not start: {last}. Every machine needs evsys-sdk {__version__}")
    return exc


def _told(resources: dict[str, Any]) -> str:
    """The resources by which places are given out."""
    flat = {**resources, **resources.get("resources", {})}
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    amounts = {
        names.get(key, key): value
        for key, value in flat.items()
        if key != "resources" and value and not key.startswith(("node:", "object_store", "memory"))
    }
    return ", ".join(f"{value:g} {key}" for key, value in sorted(amounts.items())) or "nothing"
