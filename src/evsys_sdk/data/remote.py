"""Datasets and benchmarks on a dashboard: uploaded from a workspace, pulled into one.

In: an address, a key and a project (EVSYS_API_URL, EVSYS_API_KEY, EVSYS_PROJECT_ID), and a stored version or a
reference. Out: the version on the server (`created`, `unchanged` or `new version`), or its rows for `Workspace.pull`.
The server keeps a version whole or not at all; what was cut short is taken up where it stopped.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from evsys_sdk import constants
from evsys_sdk.data.manifest import DatasetManifest, Kind
from evsys_sdk.errors import EvsysAuthError, EvsysError, WorkspaceError, shorten
from evsys_sdk.redaction import add_secrets

SUITES_PATH = "/api/dashboard/api/sdk/suites/"
CHUNK_BYTES = 4 * 1024 * 1024
MAX_ROW_BYTES = 30 * 1024 * 1024
"""The server takes 32 MiB in one request."""
PAGE_ROWS = 2000
TIMEOUT_SECONDS = (3.05, 120.0)
"""To connect, and to wait for an answer: a server checks a whole upload before it answers."""

UploadStatus = Literal["created", "unchanged", "new version"]


class NotAtSource(WorkspaceError):
    """A remote source has nothing by that reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """What became of an upload."""

    status: UploadStatus
    ref: str
    """How configs call the version there; its number differs from the local one where other content had that."""
    version: int
    n_rows: int
    split: str


@dataclass(slots=True)
class DashboardSource:
    """A `RemoteSource`: a project on a dashboard."""

    api_url: str
    api_key: str
    project_id: str
    _session: Any = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> DashboardSource | None:
        """The dashboard that the environment names; None where it names none, or EVSYS_OFFLINE is set."""
        names = (constants.ENV_API_URL, constants.ENV_API_KEY, constants.ENV_PROJECT_ID)
        url, key, project = (environ.get(name, "").strip() for name in names)
        offline = environ.get(constants.ENV_OFFLINE, "").strip().lower() in ("1", "true", "yes", "on")
        if offline or not (url and key and project):
            return None
        if not url.startswith(("http://", "https://")):
            raise EvsysError(f"{constants.ENV_API_URL} = {url!r} is no http:// or https:// address")
        add_secrets([key])
        return cls(url.rstrip("/"), key, project)

    @classmethod
    def required(cls, environ: Mapping[str, str] = os.environ) -> DashboardSource:
        """The dashboard that the environment names; an error says what is missing."""
        found = cls.from_environment(environ)
        if found is None:
            names = (constants.ENV_API_URL, constants.ENV_API_KEY, constants.ENV_PROJECT_ID)
            missing = [name for name in names if not environ.get(name, "").strip()]
            why = f"set {', '.join(missing)}" if missing else f"unset {constants.ENV_OFFLINE}"
            raise EvsysAuthError(f"this needs a dashboard: {why} (dashboard: Settings > API keys)")
        return found

    # Pulling.

    def fetch(self, kind: Kind, ref: str) -> tuple[Mapping[str, Any], Iterator[bytes]]:
        """What the reference stands for, and its rows page by page, as they are asked for."""
        suite = self.describe(kind, ref)
        info = {
            "id": suite["ref"],
            "name": suite["name"],
            "version": int(suite["version"]),
            "n_rows": suite["n_rows"],
            "sha256": suite["sha256"],
            "lineage": suite["lineage"],
        }
        return info, self._rows(suite)

    def describe(self, kind: Kind, ref: str) -> dict[str, Any]:
        """What the server says of a complete version."""
        path = f"{self._project_path}/suites/{quote(ref, safe='')}?kind={kind}"
        suite = self._call("GET", path, missing=f"no {kind} {ref!r}")
        if not suite.get("complete"):
            raise NotAtSource(f"{kind} {ref!r} is only recorded at {self.api_url}: its rows were never uploaded")
        return suite

    def _rows(self, suite: Mapping[str, Any]) -> Iterator[bytes]:
        at: int | None = 0
        while at is not None:
            path = f"{self._project_path}/suites/{quote(suite['id'], safe='')}/rows?from={at}&limit={PAGE_ROWS}"
            page = self._call("GET", path)
            yield "".join(f"{text}\n" for text in page["rows"]).encode()
            after = page["next"]
            if after is not None and after <= at:
                raise WorkspaceError(f"{self.api_url} sends the same rows again and again")
            at = after

    # Uploading.

    def upload(self, manifest: DatasetManifest, path: Path, *, split: str = "", description: str = "") -> Uploaded:
        """Send a stored version; the server has all of it afterwards, or nothing new."""
        about = {
            "kind": manifest.kind,
            "name": manifest.name,
            "sha256": manifest.sha256,
            "n_rows": manifest.n_rows,
            "version": manifest.version,
            "split": split,
            "lineage": asdict(manifest.lineage),
            "description": description,
        }
        answer = self._call("POST", SUITES_PATH, json=about)
        status, suite = answer["status"], answer["suite"]
        if status == "uploading":
            place = f"{SUITES_PATH}{quote(suite['id'], safe='')}"
            for first, chunk in chunks_of(path, skip=int(answer["received"])):
                self._call("PUT", f"{place}/rows/?from={first}", data=gzip.compress(chunk, 1))
            answer = self._call("POST", f"{place}/complete/")
            status, suite = answer["status"], answer["suite"]
        return Uploaded(
            status=status,
            ref=suite["ref"],
            version=int(suite["version"]),
            n_rows=suite["n_rows"],
            split=suite["split"],
        )

    # Asking.

    def query(self, sql: str) -> dict[str, Any]:
        """The rows of one SELECT over the project: {columns, rows, truncated, seconds}."""
        return self._call("POST", f"{self._project_path}/query", json={"sql": sql})

    @property
    def _project_path(self) -> str:
        return f"/api/v1/projects/{quote(self.project_id, safe='')}"

    def _call(
        self, method: str, path: str, *, json: object = None, data: bytes | None = None, missing: str = ""
    ) -> dict[str, Any]:
        """One request; its answer as a mapping. Repeated once on a fresh connection: every route here may be."""
        import requests

        if self._session is None:
            self._session = requests.Session()
            self._session.auth = self._sign  # an explicit signer, or requests would prefer a line of ~/.netrc
        headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"} if data is not None else {}
        url = self.api_url + path

        def call() -> Any:
            return self._session.request(
                method, url, json=json, data=data, headers=headers, timeout=TIMEOUT_SECONDS, allow_redirects=False
            )

        try:
            try:
                response = call()
            except requests.ConnectionError:
                response = call()  # the server closes idle connections
            status, body = response.status_code, response.json() if response.status_code < 300 else None
        except (requests.RequestException, ValueError) as exc:
            raise WorkspaceError(f"{method} {url}: the dashboard did not answer ({type(exc).__name__})") from exc
        if status >= 300:
            try:
                reason = str(response.json()["error"])
            except (ValueError, KeyError, TypeError):
                reason = f"HTTP {status}"
            if status == 404 and missing:
                raise NotAtSource(f"{missing} at {self.api_url} in the project {self.project_id!r} either")
            kind = EvsysAuthError if status in (401, 403) else WorkspaceError
            raise kind(f"the dashboard at {self.api_url} refuses this: {shorten(reason, 500)}")
        if not isinstance(body, dict):
            raise WorkspaceError(f"{method} {url}: the answer is no object; is this a dashboard?")
        return body

    def _sign(self, prepared: Any) -> Any:
        prepared.headers["Authorization"] = f"Bearer {self.api_key}"
        return prepared


def chunks_of(path: Path, *, skip: int = 0) -> Iterator[tuple[int, bytes]]:
    """The rows of a stored file from number `skip` on: the number of the first row of each chunk, and the chunk."""
    lines: list[bytes] = []
    first, size = skip, 0
    with open(path, "rb") as handle:
        for number, line in enumerate(handle):
            if number < skip:
                continue
            if len(line) > MAX_ROW_BYTES:
                raise WorkspaceError(f"{path}:{number + 1}: the row has {len(line):,} bytes; at most {MAX_ROW_BYTES:,}")
            if lines and size + len(line) > CHUNK_BYTES:
                yield first, b"".join(lines)
                first, lines, size = number, [], 0
            lines.append(line)
            size += len(line)
    if lines:
        yield first, b"".join(lines)
