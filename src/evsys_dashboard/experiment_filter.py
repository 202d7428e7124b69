"""Which experiments a list shows, in which order, under which headings.

In: the query string of a list. Out: a `ListQuery`, and from it a page of rows of the table `Experiment`. The filter is
text for people: words are looked for in name, hypothesis, description and conclusion; `key:value` and `name>=number`
narrow a column (`GRAMMAR`). Every value becomes a parameter of the ORM, none becomes SQL. Records and points are never
read: what is filtered and sorted by stands in the summary columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from django.db.models import F, Q, QuerySet, TextField
from django.db.models.functions import Cast
from django.http import QueryDict

from evsys_dashboard.models import ExperimentRow, Project
from evsys_sdk.errors import not_known

PAGE = 100
"""Rows that one answer has at most."""
LONGEST_FILTER = 1000
MOST_TERMS = 30
UNGROUPED = ""

GRAMMAR: tuple[tuple[str, str], ...] = (
    ("sampling temperature", "both words, in name, hypothesis, description or conclusion"),
    ('"learning rate"', "these words in this order"),
    ("status:running,failed", "one of these: running, completed, partial, failed, cancelled, interrupted, invalid"),
    ("verdict:supported", "supported, refuted, undecided, or none"),
    ("tag:baseline", "has the tag; twice for two tags"),
    ("model:qwen", "part of the model's name; so do algorithm:, backend:, arm:, parent:"),
    ("pass@1>=0.5", "the best arm's score by this metric; score>=0.5 for any metric"),
    ("cost<2 errors>0", "numbers: score, cost, seconds, errors, tasks, seeds, arms, runs"),
    ("after:2026-11-01", "begun on this day or later; before: for earlier days"),
    ("-tag:old", "a leading minus takes away what matches"),
)
"""The filter's grammar by example, as the help of the page shows it."""

TEXT_COLUMNS = {
    "model": "model",
    "algorithm": "algorithm",
    "backend": "backend",
    "arm": "best_arm",
    "parent": "parent_experiment_id",
}
NUMBER_COLUMNS = {
    "score": "best_value",
    "cost": "cost_usd",
    "seconds": "seconds",
    "errors": "n_errors",
    "tasks": "n_tasks",
    "seeds": "n_seeds",
    "arms": "n_arms",
    "runs": "n_runs",
}
SIGNS = {">=": "gte", "<=": "lte", ">": "gt", "<": "lt", "=": "exact"}
KEYS = ("status", "verdict", "tag", *TEXT_COLUMNS, "after", "before")
SEARCHED = ("name", "hypothesis", "description", "conclusion")

# A term: an optional minus, an optional `key:` or `name>=`, then a quoted text or one without spaces.
_TERM = re.compile(
    r'(?P<minus>-)?(?:(?P<key>[A-Za-z_]+):|(?P<name>[^\s"<>=:]+)(?P<sign>>=|<=|>|<|=))?'
    r'(?:"(?P<quoted>[^"]*)"?|(?P<plain>[^\s"]*))(?=\s|$)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterCondition:
    """A filter that was read: the condition, and what in it was not understood."""

    condition: Q
    problems: tuple[str, ...] = ()


def read_filter(text: str) -> FilterCondition:
    """The filter's text as a condition; what is not understood is reported and left out."""
    condition, problems = Q(), []
    if len(text) > LONGEST_FILTER:
        problems.append(f"The filter is longer than {LONGEST_FILTER} characters; the rest is left out.")
    terms = _terms(text[:LONGEST_FILTER])
    for number, (minus, key, name, sign, value) in enumerate(terms):
        if number >= MOST_TERMS:
            problems.append(f"The filter has more than {MOST_TERMS} terms; the rest is left out.")
            break
        try:
            part = _term(key, name, sign, value)
        except ValueError as exc:
            problems.append(str(exc))
            continue
        condition &= ~part if minus else part
    return FilterCondition(condition=condition, problems=tuple(problems))


def _terms(text: str) -> Iterator[tuple[bool, str, str, str, str]]:
    """minus, key, name, sign, value of each term."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TERM.match(text, at)
        if match is None or match.end() == at:
            # Such as `a"b`: taken as it stands, up to the next space.
            end = next((place for place in range(at, len(text)) if text[place].isspace()), len(text))
            yield False, "", "", "", text[at:end]
            at = end
            continue
        at = match.end()
        value = match["quoted"] if match["quoted"] is not None else match["plain"]
        if match["minus"] and not (match["key"] or match["name"] or value):
            yield False, "", "", "", "-"
        else:
            yield bool(match["minus"]), (match["key"] or "").lower(), match["name"] or "", match["sign"] or "", value


def _term(key: str, name: str, sign: str, value: str) -> Q:
    """One term's condition; ValueError with words for the reader."""
    if sign:
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if math.isnan(limit):
            raise ValueError(f"{name}{sign} takes a number, not {value!r}.")
        column = NUMBER_COLUMNS.get(name.lower())
        if column is not None:
            return Q(**{f"{column}__{SIGNS[sign]}": limit})
        # Any other name is a metric's, whole or without its benchmark.
        named = Q(metric=name) | Q(metric__endswith=f"/{name}") | Q(metric__endswith=f".{name}")
        return named & Q(**{f"best_value__{SIGNS[sign]}": limit})
    if not key:
        return _any_of(*(Q(**{f"{column}__icontains": value}) for column in SEARCHED))
    if key not in KEYS:
        raise ValueError(f'{not_known(key, "key", KEYS)}. For the text itself write "{key}:{value}" in quotes.')
    if not value:
        raise ValueError(f"{key}: has no value.")
    values = [part for part in value.split(",") if part]
    if key == "status":
        return Q(status__in=[part.lower() for part in values])
    if key == "verdict":
        return Q(verdict__in=["" if part.lower() == "none" else part.lower() for part in values])
    if key == "tag":
        # Tags are a JSON list: a whole tag is its JSON text. SQLite stores it with escapes, PostgreSQL without.
        texts = [text for part in values for text in {json.dumps(part), json.dumps(part, ensure_ascii=False)}]
        return _any_of(*(Q(tags__icontains=text) for text in texts))
    if key in ("after", "before"):
        try:
            start = datetime.strptime(value, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
        except ValueError:
            raise ValueError(f"{key}: takes a day such as 2026-11-18, not {value!r}.") from None
        return Q(created__gte=start) if key == "after" else Q(created__lt=start)
    return _any_of(*(Q(**{f"{TEXT_COLUMNS[key]}__icontains": part}) for part in values))


def _any_of(*parts: Q) -> Q:
    found = Q(pk__in=[])
    for part in parts:
        found |= part
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the list."""

    key: str
    title: str
    sort: str = ""
    """The column of the table that it sorts by; empty where sorting means nothing."""
    is_number: bool = False
    is_default: bool = True


COLUMNS = (
    Column(key="name", title="Experiment", sort="name"),
    Column(key="verdict", title="Verdict", sort="verdict"),
    Column(key="best", title="Best arm", sort="best_value"),
    Column(key="spark", title="Trend"),
    Column(key="errors", title="Errors", sort="n_errors", is_number=True),
    Column(key="cost", title="Cost", sort="cost_usd", is_number=True),
    Column(key="duration", title="Duration", sort="seconds", is_number=True),
    Column(key="tags", title="Tags"),
    Column(key="model", title="Model", sort="model", is_default=False),
    Column(key="algorithm", title="Algorithm", sort="algorithm", is_default=False),
    Column(key="runs", title="Arms, runs", sort="n_runs", is_number=True, is_default=False),
    Column(key="parent", title="Parent", sort="parent_experiment_id", is_default=False),
    Column(key="date", title="Begun", sort="created"),
)
BY_KEY = {column.key: column for column in COLUMNS}
GROUPS = {"tag": "Tag", "model": "Model", "parent": "Parent", "day": "Day"}
NEWEST = "-date"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """A list as its URL describes it."""

    text: str = ""
    sort: str = NEWEST
    """A column's key; with a minus, largest first."""
    group: str = UNGROUPED
    columns: tuple[Column, ...] = tuple(column for column in COLUMNS if column.is_default)
    start: int = 0
    problems: tuple[str, ...] = ()

    def url(self, **changes: str | int) -> str:
        """The query string with these changes, without what is the default."""
        columns = ",".join(column.key for column in self.columns)
        default = ",".join(column.key for column in COLUMNS if column.is_default)
        given: dict[str, str | int] = {"q": self.text, "sort": self.sort, "group": self.group, "cols": columns}
        given |= changes
        nothing = {"q": "", "sort": NEWEST, "group": "", "cols": default, "from": 0}
        return "?" + urlencode({key: value for key, value in given.items() if nothing.get(key) != value})

    def sort_url(self, column: Column) -> str:
        """What a click on the column's heading asks for: this order, then the other."""
        first = f"-{column.key}" if column.is_number or column.key in ("best", "date") else column.key
        other = column.key if first.startswith("-") else f"-{column.key}"
        return self.url(sort=other if self.sort == first else first)

    def direction(self, column: Column) -> str:
        """For `aria-sort`; empty for a column that the list is not sorted by."""
        if self.sort.lstrip("-") != column.key:
            return ""
        return "descending" if self.sort.startswith("-") else "ascending"


def read_query(given: QueryDict | Mapping[str, str]) -> ListQuery:
    """The list that a query string asks for; what is not known there is left out and reported."""
    problems = []
    sort, group = given.get("sort") or NEWEST, given.get("group") or UNGROUPED
    column = BY_KEY.get(sort.lstrip("-"))
    if column is None or not column.sort:
        problems.append(f"sort={sort}: {not_known(sort, 'column', [c.key for c in COLUMNS if c.sort])}")
        sort = NEWEST
    if group not in ("", *GROUPS):
        problems.append(f"group={group}: {not_known(group, 'grouping', list(GROUPS))}")
        group = UNGROUPED
    # A form sends one `cols` per ticked box, a link all of them in one.
    sent = given.getlist("cols") if isinstance(given, QueryDict) else [given.get("cols", "")]
    keys = [key for part in sent for key in (part or "").split(",") if key in BY_KEY]
    chosen = tuple(column for column in COLUMNS if column.key in keys or column.key == "name") if keys else None
    start = given.get("from") or "0"
    query = ListQuery(
        text=(given.get("q") or "").replace("\x00", ""),
        sort=sort,
        group=group,
        start=int(start) if start.isascii() and start.isdigit() and len(start) < 10 else 0,
        problems=tuple(problems),
    )
    return query if chosen is None else replace(query, columns=chosen)


SHOWN_FIELDS = (
    "id", "name", "hypothesis", "description", "status", "problem", "verdict", "metric", "best_arm", "best_value",
    "best_low", "best_high", "standing", "training_mark", "n_tasks", "n_seeds", "n_arms", "n_runs", "n_errors",
    "cost_usd", "seconds", "spark", "model", "backend", "algorithm", "tags", "parent_experiment_id", "created", "ended",
    "updated",
)  # fmt: skip
"""What a row shows and a download has; the record is not among it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """A heading and how many rows are below it in all."""

    label: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """One page of a list."""

    query: ListQuery
    total: int
    """Experiments that the filter lets through."""
    rows: list[tuple[RowGroup | None, ExperimentRow]]
    """Each with its heading, where it is the first below one."""
    next_start: int | None = None
    problems: tuple[str, ...] = ()
    n_groups: int = 0


def find_experiments(project: Project, query: ListQuery) -> tuple[QuerySet[ExperimentRow], tuple[str, ...]]:
    """All experiments of the list in its order, and what of the filter was not understood."""
    found = read_filter(query.text)
    key = query.sort.lstrip("-")
    column, is_down = BY_KEY[key].sort, query.sort.startswith("-")
    rows = ExperimentRow.objects.filter(found.condition, project=project)
    if column == "created":  # never null: in these words the index gives the order
        rows = rows.order_by("-created" if is_down else "created", "id")
    else:
        # Experiments without a value come last in either direction.
        order = F(column).desc(nulls_last=True) if is_down else F(column).asc(nulls_last=True)
        rows = rows.order_by(order, "-created", "id")
    return rows.only(*SHOWN_FIELDS), (*query.problems, *found.problems)


def list_page(project: Project, query: ListQuery) -> ListPage:
    """The rows from `query.start` on."""
    found, problems = find_experiments(project, query)
    if query.group:
        return _grouped_page(found, query, problems)
    if query.text:
        # One search for both the number and the page: a filter reads the texts of every experiment.
        ids = list(found.values_list("id", flat=True))
        total, rows = len(ids), list(found.filter(pk__in=ids[query.start : query.start + PAGE]))
    else:
        total, rows = found.order_by().count(), list(found[query.start : query.start + PAGE])
    end = query.start + len(rows)
    return ListPage(
        query=query,
        total=total,
        rows=[(None, row) for row in rows],
        next_start=end if rows and end < total else None,
        problems=problems,
    )


def _grouped_page(found: QuerySet[ExperimentRow], query: ListQuery, problems: Sequence[str]) -> ListPage:
    """An experiment with two tags stands below both. Groups come in the order of their first row."""
    column = {"tag": "tags", "model": "model", "parent": "parent_experiment_id", "day": "created"}[query.group]
    groups: dict[str, list[str]] = {}
    total = 0
    if query.group == "tag":  # as JSON text: thousands of experiments have a few sets of tags, each parsed once
        found_tags = found.annotate(tags_text=Cast("tags", TextField()))
        sets: dict[str, list[str]] = {}
        for pk, text in found_tags.values_list("id", "tags_text"):
            total += 1
            if text not in sets:
                sets[text] = _labels(query.group, json.loads(text))
            for label in sets[text]:
                groups.setdefault(label, []).append(pk)
    else:
        for pk, value in found.values_list("id", column):
            total += 1
            for label in _labels(query.group, value):
                groups.setdefault(label, []).append(pk)
    pairs = [(label, pk) for label, ids in groups.items() for pk in ids]
    chosen = pairs[query.start : query.start + PAGE]
    # Whole rows of this page alone; the groups above needed ids and one column.
    by_id = {row.id: row for row in found.filter(pk__in={pk for _, pk in chosen})}
    rows: list[tuple[RowGroup | None, ExperimentRow]] = []
    before = pairs[query.start - 1][0] if query.start and query.start <= len(pairs) else None
    for label, pk in chosen:
        heading = RowGroup(label=label, count=len(groups[label])) if label != before else None
        if pk in by_id:  # it may have been deleted since
            rows.append((heading, by_id[pk]))
        before = label
    end = query.start + len(chosen)
    return ListPage(
        query=query,
        total=total,
        rows=rows,
        next_start=end if chosen and end < len(pairs) else None,
        problems=tuple(problems),
        n_groups=len(groups),
    )


def _labels(group: str, value: object) -> list[str]:
    if group == "tag":
        tags = [str(tag) for tag in value] if isinstance(value, list) else []
        return list(dict.fromkeys(tags)) or ["no tag"]
    if group == "day":
        try:
            return [(datetime.fromtimestamp(0, UTC) + timedelta(seconds=float(str(value)))).strftime("%Y-%m-%d")]
        except (OverflowError, ValueError):
            return ["?"]
    return [str(value) if value else f"no {group}"]
