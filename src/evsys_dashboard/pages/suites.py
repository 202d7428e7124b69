"""Datasets and benchmarks: which there are, their versions and rows, and which experiments used them.

In: a project. Out: a list by name with the newest version, and a page per version with its rows. An experiment used a
suite if its record has the suite's content hash, or if its config names the suite's id or, by `dataset_name` or as a
benchmark, its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import URLPattern, path
from django.views.decorators.http import require_safe

from evsys_dashboard import auth
from evsys_dashboard.models import ExperimentRow, Project, SuiteRow, SuiteVersion
from evsys_sdk.format import count

PAGE_NAMES = 200
PAGE_ROWS = 50
LONGEST_ROW = 4000
"""Characters of a row that the page shows."""
LOOKED_THROUGH = 1000
"""Experiments, the newest, that are looked through for users of a suite."""
NAMING_KEYS = ("dataset_name", "dataset_id")
FILE_LABELS = {SuiteVersion.Kind.DATASET: "contents of ", SuiteVersion.Kind.BENCHMARK: "tasks of "}
"""How a record's `contents` calls what an experiment read, by what it is."""
SHOWN_FILES = 200
SHOWN_USERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteUser:
    """An experiment that used a suite."""

    id: str
    name: str
    created: float
    by_name: bool = False
    """The config names the suite; which version that was, the record does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFile:
    """Rows or tasks that experiments read from a file."""

    name: str
    """Of a dataset the path in the config; of a benchmark `<split>/<name>`."""
    sha256: str
    users: list[SuiteUser]
    """The newest first."""

    @property
    def shown_users(self) -> list[SuiteUser]:
        return self.users[:SHOWN_USERS]

    @property
    def n_more(self) -> int:
        return len(self.users) - len(self.shown_users)


@dataclass(slots=True, kw_only=True)
class SuiteUsage:
    """What the project's experiments used."""

    by_hash: dict[str, list[SuiteUser]] = field(default_factory=dict)
    by_id: dict[str, list[SuiteUser]] = field(default_factory=dict)
    """By every id or name that a config has."""
    by_name: dict[str, list[SuiteUser]] = field(default_factory=dict)
    """By the names that configs have, of experiments without hashes: where there are some, these tell the version."""
    by_label: dict[tuple[str, str], list[SuiteUser]] = field(default_factory=dict)
    """By what a record's `contents` calls it and its hash."""
    is_cut: bool = False

    def files(self, kind: str, uploaded: set[str]) -> list[UsedFile]:
        """What experiments read without it being uploaded, the one that was used last first."""
        prefix = FILE_LABELS[SuiteVersion.Kind(kind)]
        found = [
            UsedFile(name=label.removeprefix(prefix), sha256=sha256, users=users)
            for (label, sha256), users in self.by_label.items()
            if label.startswith(prefix) and sha256 not in uploaded
        ]
        return sorted(found, key=lambda one: -one.users[0].created)

    def users_of(self, suite: SuiteVersion) -> list[SuiteUser]:
        """The newest first."""
        named = [*self.by_name.get(suite.name, []), *self.by_id.get(suite.id, [])]
        hashed = self.by_hash.get(suite.sha256, []) if suite.sha256 else []
        return sorted({one.id: one for one in [*named, *hashed]}.values(), key=lambda one: -one.created)


def usage_in(project: Project) -> SuiteUsage:
    """Read from the hashes and the configs of the newest experiments; records are not read whole."""
    usage = SuiteUsage()
    rows = (
        ExperimentRow.objects.filter(project=project)
        .order_by("-created")
        # Two keys of the record, cut out by the database: a whole one may have megabytes.
        .values_list("id", "name", "created", "config", "record__contents", "record__config")[: LOOKED_THROUGH + 1]
    )
    for number, (pk, name, created, config, contents, recorded) in enumerate(rows):
        if number == LOOKED_THROUGH:
            usage.is_cut = True
            break
        labelled = (
            {(str(label), str(value)) for label, value in contents.items()} if isinstance(contents, dict) else set()
        )
        hashes = {sha256 for _, sha256 in labelled}
        for one in labelled:
            usage.by_label.setdefault(one, []).append(SuiteUser(id=pk, name=name, created=created))
        for sha256 in hashes:
            usage.by_hash.setdefault(sha256, []).append(SuiteUser(id=pk, name=name, created=created))
        for text in {*_names(config), *_names(recorded)}:
            user = SuiteUser(id=pk, name=name, created=created, by_name=True)
            usage.by_id.setdefault(text, []).append(user)
            if not hashes:
                # A hash tells the version; a name alone might claim every version.
                usage.by_name.setdefault(text, []).append(user)
    return usage


def _names(config: object, depth: int = 12) -> Iterator[str]:
    """Ids and names of suites in a config."""
    if depth == 0:
        return
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in NAMING_KEYS and isinstance(value, str):
                yield value
            elif key == "benchmark":
                for entry in value if isinstance(value, list) else [value]:
                    if isinstance(entry, Mapping):
                        yield from (text for text in (entry.get("id"), entry.get("name")) if isinstance(text, str))
            else:
                yield from _names(value, depth - 1)
    elif isinstance(config, list):
        for one in config:
            yield from _names(one, depth - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSuite:
    """The newest version of a name, for the list."""

    suite: SuiteVersion
    n_versions: int
    users: list[SuiteUser]


def _start(request: HttpRequest) -> int:
    text = request.GET.get("from", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _list(request: HttpRequest, project: str, kind: str, title: str) -> HttpResponse:
    found = auth.project_for(request, project)
    versions: dict[tuple[str, str], list[SuiteVersion]] = {}
    for suite in (
        SuiteVersion.objects.filter(project=found, kind=kind).order_by("-created", "id").defer("fields", "lineage")
    ):
        # One name may have a val and a test split: those are two suites, not two versions.
        versions.setdefault((suite.name, suite.split), []).append(suite)
    start = _start(request)
    page = list(versions.values())[start : start + PAGE_NAMES]
    usage = usage_in(found)
    files = usage.files(kind, {suite.sha256 for suites in versions.values() for suite in suites}) if not start else []
    end = start + len(page)
    context = {
        "project": found,
        "section": f"{kind}s",
        "title": title,
        "total": count(len(versions), kind),
        "names": [
            NamedSuite(
                suite=suites[0],
                n_versions=len(suites),
                users=list({user.id: user for suite in suites for user in usage.users_of(suite)}.values()),
            )
            for suites in page
        ],
        "more_url": f"?from={end}" if end < len(versions) else "",
        "files": files[:SHOWN_FILES],
        "n_more_files": max(0, len(files) - SHOWN_FILES),
        "is_cut": usage.is_cut,
        "looked_through": LOOKED_THROUGH,
    }
    return render(request, "dashboard/suites.html", context)


@require_safe
@auth.page
def datasets(request: HttpRequest, project: str) -> HttpResponse:
    """All datasets."""
    return _list(request, project, SuiteVersion.Kind.DATASET, "Datasets")


@require_safe
@auth.page
def benchmarks(request: HttpRequest, project: str) -> HttpResponse:
    """All benchmarks."""
    return _list(request, project, SuiteVersion.Kind.BENCHMARK, "Benchmarks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row, cut to what a page can show."""

    number: int
    text: str
    n_more: int


@require_safe
@auth.page
def suite_page(request: HttpRequest, project: str, suite: str) -> HttpResponse:
    """One version with its rows."""
    found = auth.project_for(request, project)
    one = get_object_or_404(SuiteVersion, pk=suite, project=found)
    start = _start(request)
    stored = SuiteRow.objects.filter(suite=one)
    n_rows = stored.count() if one.complete else 0
    rows = [_shown(row) for row in stored.order_by("number")[start : start + PAGE_ROWS]] if one.complete else []
    usage = usage_in(found)
    versions = SuiteVersion.objects.filter(project=found, kind=one.kind, name=one.name, split=one.split)
    lineage = one.lineage if isinstance(one.lineage, dict) else {}
    context = {
        "project": found,
        "section": f"{one.kind}s",
        "suite": one,
        "is_test": one.split == "test",
        "lineage": [
            (str(key), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for key, value in list(lineage.items())[:30]
        ],
        "users": usage.users_of(one),
        "is_cut": usage.is_cut,
        "looked_through": LOOKED_THROUGH,
        "versions": list(versions.order_by("-created", "id")[:100]),
        "rows": rows,
        "n_rows": n_rows,
        "first": start + 1,
        "last": start + len(rows),
        "before_url": f"?from={max(0, start - PAGE_ROWS)}" if start else "",
        "next_url": f"?from={start + PAGE_ROWS}" if start + PAGE_ROWS < n_rows else "",
    }
    return render(request, "dashboard/suite.html", context)


def _shown(row: SuiteRow) -> ShownRow:
    """A row of JSON with indents, so that it can be read; anything else as it is."""
    text = row.text
    if len(text) <= LONGEST_ROW:
        try:
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            text = row.text
    return ShownRow(number=row.number, text=text[:LONGEST_ROW], n_more=max(0, len(text) - LONGEST_ROW))


urlpatterns: list[URLPattern] = [
    path("p/<str:project>/datasets", datasets, name="datasets"),
    path("p/<str:project>/benchmarks", benchmarks, name="benchmarks"),
    path("p/<str:project>/suites/<path:suite>", suite_page, name="suite"),
]
