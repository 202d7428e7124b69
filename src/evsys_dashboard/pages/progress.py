"""Progress: the best validated score over time, which settings mattered, and how well predictions came out.

In: a project (`leaderboards.study_of`). Out: the page, and the numbers of its charts as CSV.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from evsys_dashboard import auth
from evsys_dashboard.charts_progress import (
    CROWDED,
    MOST_AXES,
    calibration_chart,
    importance_chart,
    parallel_chart,
    progress_chart,
)
from evsys_dashboard.leaderboards import ENOUGH, NEWEST, Dot, Leaderboard, SettingImportance, study_of
from evsys_dashboard.spreadsheet import cell
from evsys_sdk.format import count, score_text, shown

SHOWN_LEADERBOARDS = 6
SHOWN_SETTINGS = 10
TABLE_ROWS = 200
"""Of a leaderboard's table on the page; the CSV has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardView:
    """A leaderboard with what the page draws of it."""

    leaderboard: Leaderboard
    number: int
    by_order: bool

    @property
    def chart(self) -> SafeString:
        return progress_chart(self.leaderboard, by_order=self.by_order)

    @property
    def best_text(self) -> str:
        best = self.leaderboard.best
        if best is None:
            return ""
        return score_text(
            best.score, best.low, best.high, counts=[count(best.n_seeds, "seed")], marks=[best.training_mark]
        )  # fmt: skip

    @property
    def noise_text(self) -> str:
        floor = self.leaderboard.noise_floor
        return "" if floor is None else shown(floor)

    @property
    def counts(self) -> str:
        """`3 kept, 2 discarded, 1 undecided`."""
        fates = [dot.fate for dot in self.leaderboard.dots]
        return ", ".join(f"{n} {fate}" for fate in ("kept", "discarded", "undecided") if (n := fates.count(fate)))

    @property
    def is_crowded(self) -> bool:
        return len(self.leaderboard.dots) > CROWDED

    @property
    def rows(self) -> list[DotRow]:
        return [DotRow(dot=dot) for dot in self.leaderboard.dots[: -TABLE_ROWS - 1 : -1]]

    @property
    def n_more(self) -> int:
        return max(0, len(self.leaderboard.dots) - TABLE_ROWS)

    @property
    def settings(self) -> list[SettingImportance]:
        return self.leaderboard.importance[:SHOWN_SETTINGS]

    @property
    def importance(self) -> SafeString:
        return importance_chart(self.settings)

    @property
    def parallel(self) -> SafeString:
        return parallel_chart(self.leaderboard.arms, self.leaderboard.importance[:MOST_AXES], self.leaderboard.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class DotRow:
    """A line of a leaderboard's table."""

    dot: Dot

    @property
    def score(self) -> str:
        dot = self.dot
        return score_text(
            dot.score, dot.low, dot.high, counts=[count(dot.n_seeds, "seed")], marks=[dot.training_mark]
        )  # fmt: skip

    @property
    def gain(self) -> str:
        return "" if self.dot.gain is None else shown(self.dot.gain, signed=True)

    @property
    def floor(self) -> str:
        return "not known" if self.dot.floor is None else shown(self.dot.floor)


@require_safe
@auth.page
def progress(request: HttpRequest, project: str) -> HttpResponse:
    """The page."""
    found = auth.project_for(request, project)
    study = study_of(found)
    by_order = request.GET.get("x") == "order"
    shows_all = request.GET.get("all") == "1"
    shown_leaderboards = study.leaderboards if shows_all else study.leaderboards[:SHOWN_LEADERBOARDS]
    views = [
        LeaderboardView(leaderboard=leaderboard, number=number, by_order=by_order)
        for number, leaderboard in enumerate(shown_leaderboards, start=1)
    ]
    context = {
        "project": found,
        "section": "progress",
        "study": study,
        "leaderboards": views,
        "n_hidden": len(study.leaderboards) - len(views),
        "by_order": by_order,
        "enough": ENOUGH,
        "newest": NEWEST,
        "calibration": study.calibration,
        "calibration_svg": calibration_chart(study.calibration) if study.calibration.n else "",
    }
    return render(request, "dashboard/progress.html", context)


@require_safe
@auth.page
def download_csv(request: HttpRequest, project: str) -> HttpResponse:
    """Every dot of every leaderboard."""
    study = study_of(auth.project_for(request, project))
    out = io.StringIO()
    writer = csv.writer(out)
    names = (
        "experiment_id",
        "name",
        "parent",
        "when",
        "fate",
        "score",
        "low",
        "high",
        "arm",
        "training_mark",
        "n_seeds",
        "gain",
        "floor",
    )
    writer.writerow(["leaderboard", *names])
    for leaderboard in study.leaderboards:
        for dot in leaderboard.dots:
            writer.writerow([cell(leaderboard.label), *(cell(getattr(dot, name)) for name in names)])
    answer = HttpResponse(out.getvalue(), content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = 'attachment; filename="progress.csv"'
    return answer


urlpatterns: list[URLPattern] = [
    path("p/<str:project>/progress", progress, name="progress"),
    path("p/<str:project>/progress.csv", download_csv, name="progress-csv"),
]
