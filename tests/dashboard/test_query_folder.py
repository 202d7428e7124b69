"""`evsys query` in a folder without a server: the same SQL on what lies on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from evsys_sdk.record.models import ExperimentRecord, RecordedArm, RecordedRun


def evsys(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: Django is configured once per process."""
    names = ("EVSYS_API_URL", "EVSYS_API_KEY", "EVSYS_PROJECT_ID")
    environ = {key: value for key, value in os.environ.items() if key not in names}
    command = [sys.executable, "-m", "evsys_sdk.cli.main", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_a_folder_is_asked_by_the_same_sql(tmp_path):
    (tmp_path / ".evsys").mkdir()
    for name in ("lr", "rank"):
        ExperimentRecord(
            experiment=name,
            status="completed",
            hypothesis=f"{name} matters",
            arms=[RecordedArm(arm="a", statuses=["completed"])],
            runs=[RecordedRun(run_id=f"{name}/a", status="completed", metrics={"loss": 0.5})],
            ts="2026-01-01T00:00:00+00:00",
        ).write(tmp_path / "outputs" / f"{name}.experiment_result.json")
    asked = evsys(tmp_path, "query", "select name, hypothesis, n_runs from experiments order by name", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["rows"] == [["lr", "lr matters", 1], ["rank", "rank matters", 1]]
    refused = evsys(tmp_path, "query", "select * from dashboard_apikey")
    assert refused.returncode == 1
    assert "not allowed" in refused.stderr
