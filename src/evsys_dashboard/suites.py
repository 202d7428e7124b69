"""Datasets and benchmarks: upload in chunks, versions, paged download.

In: an announcement (kind, name, sha256, number of rows), then rows in order, then "that was all". Out: a version that
is complete, or nothing: until the rows are as announced no reader sees them. The same content under the same name is
the same version. Rows are kept byte for byte; each is one line of UTF-8 with one JSON object. Rows of a test split
never go through an agent's key.

The row of an upload has the id that project, kind, name and content give, so that an upload that was cut short is
taken up again, and two uploads of the same file at the same time are one. What people and configs call a version is
its reference, `<name>-v<version>-<first 8 characters of sha256>`, as in the workspace.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from django.db.models import Max
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from evsys_dashboard import auth, ingest
from evsys_dashboard.auth import Refusal, Visitor
from evsys_dashboard.models import TEST, Project, SuiteRow, SuiteVersion
from evsys_dashboard.request_body import parse_body, unpack
from evsys_sdk.data.manifest import check_name, mint_id, slug
from evsys_sdk.data.remote import SUITES_PATH
from evsys_sdk.errors import WorkspaceError
from evsys_sdk.record.dashboard import wire

ROOT = SUITES_PATH.removeprefix("/")
UPLOADING = "uploading"
"""In `Suite.fields` until the rows are complete. A suite that was only recorded lacks it, and has no rows."""
ABANDONED_SECONDS = 24 * 3600.0
"""An upload without progress for this long is deleted when the next one begins."""
MAX_ROWS = 10_000_000
MAX_PAGE_ROWS = 5000
MAX_PAGE_BYTES = 4 * 1024 * 1024
"""A page ends before it is larger, but has one row at least."""
_REFERENCE = re.compile(r"-v(\d{1,9})-([0-9a-f]{8})$")

Status = Literal["created", "unchanged", "new version", "uploading"]


class SuiteAnnouncement(BaseModel):
    """What is going to be uploaded."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["dataset", "benchmark"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=80)]
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    n_rows: int = Field(gt=0, le=MAX_ROWS)
    version: int | None = Field(default=None, gt=0, lt=10**9)
    """The number that the sender's workspace gave it; kept unless other content has it."""
    split: Annotated[str, StringConstraints(max_length=50)] = ""
    lineage: dict[str, Any] = Field(default_factory=dict)
    description: Annotated[str, StringConstraints(max_length=10_000)] = ""


def upload_id(project: Project, kind: str, name: str, sha256: str) -> str:
    return wire.derived_id("suite", project.pk, kind, name, sha256)


def reference_of(suite: SuiteVersion) -> str:
    """How configs call a complete version; a suite that was only recorded is called by its id."""
    return mint_id(suite.name, int(suite.version), suite.sha256) if suite.complete else suite.pk


# Upload.


def announce(project: Project, given: SuiteAnnouncement) -> tuple[SuiteVersion, Status]:
    """The suite that rows are to be sent for, or the one that has them already."""
    try:
        check_name(given.name)
    except WorkspaceError as exc:
        raise Refusal(422, f"name: {exc}") from None
    for old in project.suites.filter(complete=False, created__lt=time.time() - ABANDONED_SECONDS):
        if old.fields.get(UPLOADING):
            old.delete()
    names = project.suites.filter(kind=given.kind, complete=True).exclude(name=given.name)
    for other in names.values_list("name", flat=True).distinct():
        if slug(other) == slug(given.name):
            raise Refusal(409, f"{given.name!r} would share its ids with {other!r}; take that name or another")
    identifier = upload_id(project, given.kind, given.name, given.sha256)
    suite = SuiteVersion.objects.filter(pk=identifier).first()
    if suite is None:
        suite = SuiteVersion(pk=identifier, project=project, kind=given.kind, name=given.name, sha256=given.sha256)
    elif suite.complete:
        # A stored version may become a test split and never stops being one, or its rows could be read by that way.
        if given.split and given.split != suite.split:
            if suite.split == TEST:
                raise Refusal(
                    409, f"{reference_of(suite)} is stored as a test split and stays one; upload under another name"
                )
            suite.split = given.split
            suite.save(update_fields=["split"])
        return suite, "unchanged"
    split = TEST if suite.split == TEST else given.split  # a test split stays one, also while the rows arrive
    if suite.n_rows not in (None, given.n_rows):  # of the same content there is one number of rows
        suite.rows.all().delete()
    suite.n_rows, suite.split, suite.lineage = given.n_rows, split, given.lineage
    suite.description, suite.created = given.description, time.time()
    suite.fields = {UPLOADING: True, "version": given.version}
    suite.save()
    return suite, "uploading"


def add_rows(suite: SuiteVersion, first: int, data: bytes) -> int:
    """Keep rows from number `first` on; returns how many the upload has now. Rows that are there already stay."""
    lines = split_rows(data, first)
    if suite.n_rows is not None and first + len(lines) > suite.n_rows:
        raise Refusal(422, f"rows {first} to {first + len(lines) - 1}: only {suite.n_rows} were announced")
    rows = [SuiteRow(suite=suite, number=first + place, text=text) for place, text in enumerate(lines)]
    SuiteRow.objects.bulk_create(rows, ignore_conflicts=True, batch_size=500)
    return received(suite)


def split_rows(data: bytes, first: int = 0) -> list[str]:
    """The lines of a chunk, checked: each ends in a line feed and holds one JSON object."""
    if not data.endswith(b"\n"):
        raise Refusal(422, "the last row of a chunk does not end in a line feed")
    lines = []
    for place, line in enumerate(data[:-1].split(b"\n")):
        try:
            text = line.decode()
            found = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise Refusal(422, f"row {first + place}: no JSON object: {str(exc)[:200]}") from None
        if not isinstance(found, dict):
            raise Refusal(422, f"row {first + place}: expected a JSON object, got {type(found).__name__}")
        lines.append(text)
    return lines


def received(suite: SuiteVersion) -> int:
    """How many rows an upload has from its beginning on, without a gap."""
    last = suite.rows.aggregate(last=Max("number"))["last"]
    count = suite.rows.count()
    if last is None or count == last + 1:
        return count
    numbers = suite.rows.order_by("number").values_list("number", flat=True).iterator(chunk_size=5000)
    return next((place for place, number in enumerate(numbers) if place != number), count)


def stored_lines(suite: SuiteVersion) -> Iterator[bytes]:
    for text in suite.rows.order_by("number").values_list("text", flat=True).iterator(chunk_size=1000):
        yield text.encode() + b"\n"


def complete(suite: SuiteVersion) -> tuple[SuiteVersion, Status]:
    """Make the rows a version, if they are as announced; else delete them."""
    if suite.complete:
        return suite, "unchanged"
    # Hashed from what is stored, not from what was sent: it is the stored rows that later runs read.
    digest, rows, size = hashlib.sha256(), 0, 0
    for line in stored_lines(suite):
        digest.update(line)
        rows, size = rows + 1, size + len(line)
    if rows != suite.n_rows:
        raise Refusal(409, f"{rows} of {suite.n_rows} rows are here; send the others first")
    if digest.hexdigest() != suite.sha256:
        with ingest.writing():
            suite.delete()
        raise Refusal(422, "the content is not the one announced (sha256 differs); nothing was kept, upload it again")
    with ingest.writing():
        # Several processes of a server may complete versions of one name at once; the project's row is their lock.
        Project.objects.select_for_update().get(pk=suite.project_id)
        suite = SuiteVersion.objects.get(pk=suite.pk)
        if suite.complete:
            return suite, "unchanged"
        others = SuiteVersion.objects.filter(
            project_id=suite.project_id, kind=suite.kind, name=suite.name, complete=True
        )
        taken = {int(version) for version in others.values_list("version", flat=True) if version.isdigit()}
        wanted = suite.fields.get("version")
        version = wanted if wanted and wanted not in taken else 1 + max(taken, default=0)
        suite.version, suite.n_bytes, suite.complete = str(version), size, True
        suite.fields, suite.created = {}, time.time()
        suite.save()
    return suite, "new version" if taken else "created"


# Looking up and reading.


def find_suite(project: Project, ref: str, kind: str | None = None) -> SuiteVersion:
    """By reference or by name (its newest version), among complete ones; or any by the id of its row."""
    suites = project.suites.filter(**({"kind": kind} if kind else {}))
    marks = _REFERENCE.search(ref)
    if marks:
        for one in suites.filter(complete=True, version=str(int(marks[1])), sha256__startswith=marks[2]):
            if reference_of(one) == ref:
                return one
    # Versions are numbers in a text column: 10 comes after 9 only as a number.
    named = sorted(suites.filter(complete=True, name=ref), key=lambda one: int(one.version))
    found = named[-1] if named else suites.filter(pk=ref).first()
    if found is None or found.fields.get(UPLOADING):
        raise Refusal(404, f"there is no {kind or 'dataset or benchmark'} {ref!r} in this project")
    return found


def visible_suites(project: Project, *, kind: str = "", name: str = "") -> list[SuiteVersion]:
    """Complete and recorded suites, newest first."""
    found = project.suites.order_by("-created", "id")
    found = found.filter(kind=kind) if kind else found
    found = found.filter(name=name) if name else found
    return [suite for suite in found if not suite.fields.get(UPLOADING)]


def describe_suite(suite: SuiteVersion) -> dict[str, Any]:
    """What the API says of a suite."""
    is_version = suite.complete
    return {
        "id": suite.pk,
        "ref": reference_of(suite),
        "kind": suite.kind,
        "name": suite.name,
        "version": suite.version,
        "split": suite.split,
        "n_rows": suite.n_rows,
        "n_bytes": suite.n_bytes,
        "sha256": suite.sha256,
        "lineage": suite.lineage,
        "description": suite.description,
        "complete": is_version,
        "created": suite.created,
    }


def refuse_test_rows(visitor: Visitor, suite: SuiteVersion) -> None:
    if suite.split == TEST and not visitor.may_see_test_rows:
        raise Refusal(
            403,
            f"{reference_of(suite)} is a test split: its rows are for people and never go through an agent-scoped key, "
            "so that no agent trains or tunes on them. A person can see them on the dashboard.",
        )


def page_of_rows(suite: SuiteVersion, first: int, limit: int) -> dict[str, Any]:
    """Rows from number `first` on, as texts."""
    limit = max(1, min(limit, MAX_PAGE_ROWS))
    texts: list[str] = []
    size = 0
    if suite.complete:
        window = suite.rows.filter(number__gte=first, number__lt=first + limit).order_by("number")
        for text in window.values_list("text", flat=True).iterator(chunk_size=200):
            # At least one row, whatever its size, or a reader would ask for the same page for ever.
            size += len(text)
            if texts and size > MAX_PAGE_BYTES:
                break
            texts.append(text)
    total = suite.n_rows or 0 if suite.complete else 0
    after = first + len(texts)
    return {"from": first, "total": total, "next": after if texts and after < total else None, "rows": texts}


# Routes. `auth.api` turns a Refusal into its answer.


def _upload_of(request: HttpRequest, suite_id: str) -> SuiteVersion:
    project = auth.key_for(request, "write").project
    found = project.suites.filter(pk=suite_id).first()
    if found is None:
        raise Refusal(404, f"there is no upload {suite_id!r} in this project; announce it first")
    return found


def _answer(suite: SuiteVersion, status: Status) -> HttpResponse:
    count = suite.n_rows if suite.complete else received(suite)
    return JsonResponse({"status": status, "received": count, "suite": describe_suite(suite)})


@auth.api
def uploads(request: HttpRequest) -> HttpResponse:
    """POST: announce an upload."""
    if request.method != "POST":
        raise Refusal(405, f"{request.method} is not possible here; use POST")
    project = auth.key_for(request, "write").project
    body = parse_body(request.body, request.headers.get("Content-Encoding", ""))
    try:
        given = SuiteAnnouncement.model_validate(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        raise Refusal(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    with ingest.writing():
        suite, status = announce(project, given)
    return _answer(suite, status)


@auth.api
def upload_rows(request: HttpRequest, suite_id: str) -> HttpResponse:
    """PUT: a chunk of rows, as JSON lines, from number `from` on."""
    if request.method != "PUT":
        raise Refusal(405, f"{request.method} is not possible here; use PUT")
    suite = _upload_of(request, suite_id)
    first = number_in(request, "from", 0)
    if suite.complete:
        return _answer(suite, "unchanged")
    if not suite.fields.get(UPLOADING):
        raise Refusal(409, f"{suite_id!r} is no upload; announce it first")
    data = unpack(request.body, request.headers.get("Content-Encoding", ""))
    with ingest.writing():
        add_rows(suite, first, data)
    return _answer(suite, "uploading")


@auth.api
def upload_complete(request: HttpRequest, suite_id: str) -> HttpResponse:
    """POST: all rows are sent."""
    if request.method != "POST":
        raise Refusal(405, f"{request.method} is not possible here; use POST")
    suite = _upload_of(request, suite_id)
    if not suite.complete and not suite.fields.get(UPLOADING):
        raise Refusal(409, f"{suite_id!r} is no upload; announce it first")
    return _answer(*complete(suite))


def number_in(request: HttpRequest, name: str, default: int, *, most: int = 2**31 - 1) -> int:
    """A whole number of the query string, from 0 up."""
    text = request.GET.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
        raise Refusal(422, f"{name}={text[:40]!r}: give a whole number from 0 to {most:,}")
    return int(text)


urlpatterns = [
    path(ROOT, uploads),
    path(f"{ROOT}<str:suite_id>/rows/", upload_rows),
    path(f"{ROOT}<str:suite_id>/complete/", upload_complete),
]
