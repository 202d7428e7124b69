"""The dashboard client: every write goes to the local mirror first, then to the server.

In: experiments, runs (on the wire: generations), step metrics, evals, predictions. Out: mirror lines, and the same
records on the server. Creating and updating waits for the server's word, so that a wrong request raises where it was
made; steps and predictions go out in the background. A server that is away never stops training: the mirror keeps
everything and the next client sends what is left.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evsys_sdk import constants
from evsys_sdk.errors import Cancelled, EvsysAuthError, EvsysError
from evsys_sdk.format import refuse_non_numbers
from evsys_sdk.logs import get_logger
from evsys_sdk.record.dashboard import mirror, wire
from evsys_sdk.record.dashboard.mirror import MirrorSession
from evsys_sdk.record.dashboard.sender import Sender, Transport
from evsys_sdk.redaction import add_secrets

FINISH_SECONDS = 5.0


class DashboardClient:
    """A line to the dashboard that survives the dashboard.

    Arguments left out come from EVSYS_API_URL, EVSYS_API_KEY, EVSYS_PROJECT_ID, EVSYS_LOG_DIR and EVSYS_OFFLINE.
    """

    def __init__(
        self,
        api_url: str | None = None,
        api_key: str | None = None,
        project_id: str | None = None,
        log_dir: str | Path | None = None,
        offline: bool | None = None,
        environ: Mapping[str, str] = os.environ,
        *,
        timeout_seconds: float = 10.0,
    ):
        url = api_url or environ.get(constants.ENV_API_URL) or constants.DEFAULT_API_URL
        if not url.startswith(("http://", "https://")):
            raise EvsysError(f"{constants.ENV_API_URL} = {url!r} is no http:// or https:// address")
        self.api_url = url.rstrip("/")
        self.project_id = project_id or environ.get(constants.ENV_PROJECT_ID) or None
        is_set = environ.get(constants.ENV_OFFLINE, "").strip().lower() in ("1", "true", "yes", "on")
        self.offline = is_set if offline is None else offline
        api_key = api_key or environ.get(constants.ENV_API_KEY) or None
        folder = log_dir or environ.get(constants.ENV_LOG_DIR) or constants.DEFAULT_LOG_DIR
        self.mirror_dir = mirror.project_folder(folder, self.project_id)
        self._timeout_seconds = timeout_seconds
        self._target = {"api_url": self.api_url, "project_id": self.project_id, "offline": self.offline}
        self._lock = threading.Lock()
        self._session: MirrorSession | None = None
        self._last_stamp = 0.0
        self._finished = False
        self._sender: Sender | None = None
        if not self.offline:
            self._sender = self._connect(api_key)
            # A script that forgets `finish` still sends its last steps.
            atexit.register(self.finish)

    def _connect(self, api_key: str | None) -> Sender:
        if not api_key or not self.project_id:
            missing = [constants.ENV_API_KEY] * (not api_key) + [constants.ENV_PROJECT_ID] * (not self.project_id)
            raise EvsysAuthError(
                f"the dashboard needs {' and '.join(missing)} (dashboard: Settings > API keys); "
                f"set {constants.ENV_OFFLINE}=1 to record only on this machine"
            )
        # From now on every log and record hides the key, whatever name it came under.
        add_secrets([api_key])
        transport = Transport(self.api_url, api_key, self.project_id, timeout_seconds=self._timeout_seconds)
        return Sender(transport, lambda: mirror.left_behind(self.mirror_dir, self._target))

    def _stamp(self) -> float:
        """The time of a record. It never runs backwards, also when the clock is set back: of two values for a field the
        newer one counts, and the end of a run must not count as older than its start."""
        self._last_stamp = max(time.time(), self._last_stamp)
        return self._last_stamp

    @property
    def mirror_path(self) -> Path | None:
        """This session's file; None before the first write."""
        return self._session.path if self._session else None

    def create_experiment(
        self, name: str, *, hypothesis: str = "", experiment_id: str | None = None, **details: object
    ) -> str:
        """Record an experiment; return its id. `details`: description, config, tags, metadata, ..."""
        identifier = experiment_id or wire.new_id()
        event = wire.experiment_event(identifier, name=name, hypothesis=hypothesis, details=details, ts=self._stamp())
        self._deliver(event)
        return identifier

    def update_experiment(self, experiment_id: str, **fields: object) -> None:
        """Set fields of an experiment: status, best_score, conclusion, ..."""
        self._deliver(wire.experiment_update(experiment_id, fields, ts=self._stamp()))

    def create_generation(
        self,
        experiment_id: str,
        *,
        name: str = "",
        recipe_kind: str = "",
        run_config: Mapping[str, object] | None = None,
        generation_id: str | None = None,
    ) -> str:
        """Record a run of an experiment; return its id."""
        identifier = generation_id or wire.new_id()
        self._deliver(
            wire.generation_event(
                identifier,
                experiment_id,
                name=name,
                recipe_kind=recipe_kind,
                run_config=run_config or {},
                ts=self._stamp(),
            )
        )
        return identifier

    def update_generation(self, generation_id: str, **fields: object) -> None:
        """Set fields of a run: status, metrics, artifacts, error, conclusion, ..."""
        self._deliver(wire.generation_update(generation_id, fields, ts=self._stamp()))

    def log_step_metric(self, generation_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step. Returns when the mirror has them."""
        refuse_non_numbers(metrics, step)
        self._submit(wire.step_event(generation_id, step, metrics, ts=self._stamp()))

    def log_eval_run(
        self,
        generation_id: str,
        *,
        metrics: Mapping[str, float] | None = None,
        name: str = "eval",
        split: str = "eval",
        step: int | None = None,
        benchmark_id: str | None = None,
        eval_run_id: str | None = None,
        **details: object,
    ) -> str:
        """Record one evaluation; return its id. `details`: scores with intervals, breakdown, error, ... An evaluation
        that is logged again under its own `eval_run_id` is not a second one."""
        identifier = eval_run_id or wire.new_id()
        about = {"name": name, "split": split, "step": step, "benchmark_id": benchmark_id}
        fields: dict[str, object] = {**about, **details, "metrics": dict(metrics or {})}
        self._deliver(wire.eval_event(identifier, generation_id, fields, ts=self._stamp()))
        return identifier

    def log_predictions(
        self, generation_id: str, predictions: Iterable[Mapping[str, object]], *, eval_run_id: str | None = None
    ) -> int:
        """Record what the model answered, one record per rollout; return how many."""
        count = 0
        for prediction in predictions:
            record = {**prediction, "eval_run_id": eval_run_id}
            self._submit(wire.prediction_event(generation_id, record, ts=self._stamp()))
            count += 1
        return count

    def record_benchmark(self, name: str, *, benchmark_id: str | None = None, **fields: object) -> str:
        """Record a suite of tasks (version, n_tasks, sha256, ...); return its id. The same name gives the same id."""
        identifier = benchmark_id or wire.derived_id(
            "benchmark", self.project_id or "", name, str(fields.get("version", ""))
        )
        self._deliver(wire.benchmark_event(identifier, name=name, fields=fields, ts=self._stamp()))
        return identifier

    def replay(self, session_path: str | Path) -> None:
        """Send a whole mirror session (of an offline run, or after the server lost its database) to this server."""
        if self._sender is None:
            raise EvsysError(f"cannot replay {session_path}: this client is offline")
        if not Path(session_path).is_file():
            raise EvsysError(f"cannot replay {session_path}: there is no such file")
        session = MirrorSession.claim(Path(session_path), from_start=True)
        if session is None:
            raise EvsysError(f"cannot replay {session_path}: its owner is still writing to it")
        self._sender.replay(session)

    def flush(self, timeout: float = FINISH_SECONDS) -> bool:
        """Wait until the server has everything; False when that takes longer than `timeout` seconds."""
        return self._sender is None or self._sender.flush(timeout)

    def finish(self, timeout: float = FINISH_SECONDS) -> bool:
        """Send what is left and close, within about `timeout` seconds. What was not sent stays for the next client."""
        if self._finished:
            return True
        self._finished = True
        # The interpreter may be on its way down: whatever is not sent by then stays in the mirror.
        complete = self.flush(timeout)
        if self._sender is not None:
            self._sender.stop(1.0)
            atexit.unregister(self.finish)
        if self._session is not None:
            if not complete:
                left = self._session.unsent_lines()
                get_logger(__name__).warning(
                    "%d records were not sent; the next client sends them from %s", left, self._session.path
                )
            self._session.close()
        return complete

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _submit(self, event: wire.WireEvent) -> None:
        session = self._session or self._open()
        if self._sender is None:
            session.append(event)
        else:
            self._sender.submit(session, event)

    def _deliver(self, event: wire.WireEvent) -> None:
        session = self._session or self._open()
        if self._sender is None:
            session.append(event)
        else:
            # A second more than the request has, so that it is the request that times out and is counted.
            self._sender.deliver(session, event, timeout_seconds=self._timeout_seconds + 1)

    def _open(self) -> MirrorSession:
        # Two threads may log the first record at once; one session has to hold both.
        with self._lock:
            if self._finished:
                raise EvsysError("this dashboard client is finished; make a new one to record more")
            if self._session is None:
                self._session = MirrorSession.create(self.mirror_dir, self._target)
            return self._session


class ExperimentRun:
    """One experiment with one run, as a `with` block: an exception in it is recorded and raised."""

    def __init__(
        self,
        client: DashboardClient,
        *,
        experiment_name: str,
        recipe_kind: str = "",
        run_config: Mapping[str, object] | None = None,
        run_name: str = "",
        experiment_id: str | None = None,
        **details: Any,
    ):
        self.client = client
        self.experiment_id = experiment_id or wire.new_id()
        self.generation_id = wire.new_id()
        self._joins = experiment_id is not None
        self._experiment = {"name": experiment_name, **details}
        self._generation: dict[str, Any] = {
            "name": run_name or experiment_name,
            "recipe_kind": recipe_kind,
            "run_config": run_config,
        }

    def __enter__(self) -> Self:
        if not self._joins:
            self.client.create_experiment(experiment_id=self.experiment_id, **self._experiment)
        self.client.create_generation(self.experiment_id, generation_id=self.generation_id, **self._generation)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self._close(status="completed")
            return
        status = "cancelled" if isinstance(exc, KeyboardInterrupt | Cancelled) else "failed"
        try:
            self._close(status=status, error=f"{type(exc).__name__}: {exc}")
        except EvsysError as second:  # the first error is the one to tell
            get_logger(__name__).error("could not record that the run %s: %s", status, second)

    def _close(self, **fields: object) -> None:
        self.update_generation(**fields)
        # An experiment that was joined belongs to its maker, and may have other runs.
        if not self._joins:
            self.update_experiment(status=fields["status"])
        self.client.flush()

    def log_step(self, step: int, metrics: Mapping[str, float] | None = None, /, **more: float) -> None:
        """Numbers of one step, as a dict, as keywords, or both."""
        self.client.log_step_metric(self.generation_id, step, {**(metrics or {}), **more})

    def log_eval(self, metrics: Mapping[str, float], **fields: Any) -> str:
        """One evaluation of this run; `fields` as in `DashboardClient.log_eval_run`."""
        return self.client.log_eval_run(self.generation_id, metrics=metrics, **fields)

    def log_predictions(self, predictions: Iterable[Mapping[str, object]], *, eval_run_id: str | None = None) -> int:
        return self.client.log_predictions(self.generation_id, predictions, eval_run_id=eval_run_id)

    def update_generation(self, **fields: object) -> None:
        self.client.update_generation(self.generation_id, **fields)

    def update_experiment(self, **fields: object) -> None:
        self.client.update_experiment(self.experiment_id, **fields)

    def set_best_score(self, score: float) -> None:
        self.update_experiment(best_score=score)

    def set_conclusion(self, text: str) -> None:
        self.update_experiment(conclusion=text)

    @contextmanager
    def benchmark(
        self, name: str, *, split: str = "test", step: int | None = None, **fields: Any
    ) -> Iterator[BenchmarkBlock]:
        """Score this run on a benchmark: what is logged inside becomes one eval, with an error if the block raises."""
        benchmark_id = self.client.record_benchmark(name, **fields)
        scoring = BenchmarkBlock()
        error = None
        try:
            yield scoring
        # Ctrl-C too: an evaluation that was broken off is not a complete one.
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            eval_run_id = self.log_eval(
                scoring.metrics, name=name, split=split, step=step, benchmark_id=benchmark_id, error=error
            )
            self.log_predictions(scoring.predictions, eval_run_id=eval_run_id)


class BenchmarkBlock:
    """What a `benchmark` block gathers."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.predictions: list[Mapping[str, object]] = []

    def log_metrics(self, metrics: Mapping[str, float] | None = None, /, **more: float) -> None:
        self.metrics.update(metrics or {}, **more)

    def log_prediction(self, **prediction: object) -> None:
        """One rollout: task_id, completion, reward, ..."""
        self.predictions.append(prediction)
