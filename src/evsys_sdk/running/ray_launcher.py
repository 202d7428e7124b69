"""Runs on a Ray cluster: where one machine is not enough.

In: run plans, from the experiment's threads. Out: their results. A worker of the cluster carries out the run and writes
into its directory, which lies on a disk that all machines share; journal, budget and callbacks stay in this process,
which does for the worker what only it can. A worker that is lost is replaced, and its run goes on from its last
checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.errors import Cancelled, RunLocked
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunResult, RunStatus
from evsys_sdk.registry import register_launcher

if TYPE_CHECKING:
    from evsys_sdk.running.errands import Desk
    from evsys_sdk.running.workbench import RunPlan


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
        """GPUs, likewise."""
        resources: dict[str, float] = Field(default_factory=dict)
        """Custom resources of the cluster that a run takes up, such as `{big_memory: 1}`."""
        runtime_env: JsonDict = Field(default_factory=dict)
        """Ray's own description of what workers need (`pip`, `env_vars`, ...)."""
        environment: list[str] = Field(default_factory=list)
        """Variables of this process that workers get too, such as API keys; those that begin with EVSYS_ always go."""
        max_losses: int = Field(default=5, ge=0)
        """How often a run goes on after losing its worker."""

    def __init__(self, **params: Any):
        from evsys_sdk.running.ray_pool import RayPool

        self.cfg = cfg = self.Config(**params)
        needs = {"num_cpus": cfg.num_cpus, "num_gpus": cfg.num_gpus, "resources": cfg.resources}
        self.pool = RayPool(cfg.address, needs, cfg.runtime_env, cfg.environment)

    def execute(self, plan: RunPlan) -> RunResult:
        from evsys_sdk.runner import finished_before
        from evsys_sdk.running.errands import Desk
        from evsys_sdk.running.ray_pool import ClusterLost

        before = finished_before(plan)
        if before is not None:
            return before
        errors, desk, why = self.pool.ray.exceptions, Desk(plan), ""
        for losses in range(1, self.cfg.max_losses + 2):
            try:
                with self.pool.worker(plan.run_id, plan.stop.event.is_set) as worker:
                    return self._serve(worker, desk)
            except (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError) as exc:
                desk.worker_is_lost()
                why = str(exc).strip().splitlines()[0]
                what_now = "goes on elsewhere" if losses <= self.cfg.max_losses else "is given up"
                get_logger(__name__).warning("%s lost its Ray worker and %s: %s", plan.run_id, what_now, why)
            except ClusterLost as exc:
                return _given_up(plan, str(exc))
            except Cancelled as exc:
                if losses == 1:  # it has not begun
                    raise
                return _given_up(plan, str(exc), status="cancelled")
        error = f"lost its Ray worker {self.cfg.max_losses + 1} times; the last time: {why}"
        return _given_up(plan, error)

    def _serve(self, worker: Any, desk: Desk) -> RunResult:
        """Have the worker carry out the run, and do what it asks for until it is done."""
        from evsys_sdk.running.distant import Order

        ray, plan = self.pool.ray, desk.plan
        order = Order.of(plan, fresh=plan.fresh and not desk.begun)
        done, told = worker.run.remote(order), set[str]()
        while not desk.over and not ray.wait([done], timeout=0)[0]:
            self._do_errands(worker, desk)
            wanted = {"stop": plan.stop.event.is_set(), "interrupt": plan.stop.interrupted}
            for what in [what for what, is_wanted in wanted.items() if is_wanted and what not in told]:
                told.add(what)
                getattr(worker, what).remote()
        answer = ray.get(done)
        if answer.error is not None:
            raise answer.error
        if answer.value.stopped:
            plan.stop.set()
        result: RunResult = answer.value.result
        return result

    def _do_errands(self, worker: Any, desk: Desk) -> None:
        from evsys_sdk.running.ray_pool import POLL_SECONDS

        for call in self.pool.ray.get(worker.calls.remote(POLL_SECONDS)):
            answer = desk.handle(call) if call.run_id == desk.plan.run_id else None
            if answer is not None:
                worker.answer.remote(call.number, answer)

    def close(self) -> None:
        self.pool.close()


def _given_up(plan: RunPlan, error: str, *, status: RunStatus = "failed") -> RunResult:
    """The end of a run that no worker carries out, with a record as soon as the worker that was lost is really gone."""
    from evsys_sdk.runner import give_up
    from evsys_sdk.running.distant import LOCK_SECONDS, LOOK_SECONDS

    until = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < until and not plan.stop.interrupted:
        try:
            return give_up(replace(plan, fresh=False), error, status=status)
        except RunLocked:
            time.sleep(LOOK_SECONDS)
    return RunResult(run_id=plan.run_id, status=status, error=error, extras={"run_name": plan.run.name})
