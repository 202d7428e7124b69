"""Where an experiment's weights were deployed: `<experiment>.deployments.jsonl` beside its record.

In: a `RecordedDeployment` at every change of its state, the intent before anything is done. Out: the newest state of
each. A line is appended whole and synced, so a killed process leaves the states up to its last one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from evsys_sdk.constants import DEPLOYMENTS_FILE, EXPERIMENT_RESULT_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.record.lines import append_durably
from evsys_sdk.record.models import RecordPart
from evsys_sdk.redaction import redact, redact_data

DeploymentState = Literal["started", "deployed", "unchanged", "rolled back", "failed", "retired"]


class RecordedProbe(RecordPart):
    """What the probe of a deployment compared."""

    compared: str = "nothing"
    ok: bool | None = None
    detail: str = ""
    difference: float | None = None
    tolerance: float | None = None


class RecordedDeployment(RecordPart):
    """One deployment of an experiment's weights."""

    id: str
    state: DeploymentState
    """`started` without a later state: its process was killed. What the target serves is then what it served before, or
    these weights; the next `evsys deploy` finds out."""
    kind: str
    name: str
    """Of the weights, content-addressed."""
    digest: str
    arm: str
    run: str
    time: str
    """Of this state."""
    endpoint: str = ""
    alias: str = ""
    replaced: str | None = None
    """The name of the weights that the alias had before."""
    probe: RecordedProbe | None = None
    error: str | None = None
    warning: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    """Of the deployer, without secrets."""

    @property
    def line(self) -> str:
        """The deployment in one sentence, for conclusions and lists."""
        where = f"{self.name} (arm {self.arm}, run {self.run}) to {self.kind}" + f" {self.endpoint}".rstrip()
        checked = f" Probe: {self.probe.detail}." if self.probe else ""
        warning = f" Warning: {self.warning}." if self.warning else ""
        if self.state == "deployed":
            was = f"; it replaced {self.replaced}" if self.replaced else ""
            return f"Deployed {where}{f' as {self.alias}' if self.alias else ''}{was}.{checked}{warning}"
        if self.state == "unchanged":
            return f"Already deployed, unchanged: {where}.{checked}"
        if self.state == "rolled back":
            kept = f"{self.replaced} still answers" if self.replaced else "nothing was deployed before"
            return f"Not deployed: {where} failed its probe and was rolled back; {kept}.{checked}"
        if self.state == "retired":
            return f"Retired {where}."
        if self.state == "failed":
            return f"Not deployed: {where}: {self.error}"
        return f"Interrupted: the deployment of {where} began and has no end. Repeat it with evsys deploy."


def deployments_path(record: Path) -> Path:
    return Path(str(record).removesuffix(EXPERIMENT_RESULT_FILE) + DEPLOYMENTS_FILE)


def add_deployment(record: Path, deployment: RecordedDeployment) -> None:
    """Append this state of a deployment."""
    path = deployments_path(record)
    data = redact_data(deployment.model_dump(exclude_none=True))
    line = redact(json.dumps(data, ensure_ascii=False))
    try:
        append_durably(path, line)
    except OSError as exc:
        raise EvsysError(f"the deployment could not be noted in {path}: {exc.strerror}") from exc


def read_deployments(record: Path) -> list[RecordedDeployment]:
    """Each deployment in its newest state, in the order they began; a line that cannot be read is left out."""
    path = deployments_path(record)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: dict[str, RecordedDeployment] = {}
    for line in lines:
        try:
            one = RecordedDeployment.model_validate(json.loads(line))
        except (ValueError, ValidationError):
            continue
        found[one.id] = one
    return list(found.values())
