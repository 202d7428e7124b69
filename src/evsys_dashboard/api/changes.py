"""What changed since a page last asked: `/api/v1/projects/<project>/changes?since=<cursor>`.

In: the cursor of the answer before, or nothing. Out: the ids of experiments and runs that changed since, and the next
cursor. A change may be named twice and is never left out: the cursor lags behind the clock by more than a commit takes.
"""

from __future__ import annotations

import math
import time

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, path
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from evsys_dashboard import auth
from evsys_dashboard.models import Experiment, Generation

LAG = 2.0
"""Seconds. `updated` is the time before a commit; a commit that takes longer than this would be missed."""
MOST = 500
"""Ids of either kind in one answer; the next answer has the rest."""


def cursor_now() -> str:
    """Where a page that was made just now begins."""
    return repr(time.time() - LAG)


@never_cache
@require_safe
@auth.api
def changes(request: HttpRequest, project: str) -> HttpResponse:
    visitor = auth.visitor_for(request, project)
    now = time.time() - LAG
    given = request.GET.get("since") or ""
    if not given:
        return JsonResponse({"cursor": repr(now), "experiments": [], "runs": []})
    try:
        since = float(given)
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise auth.Refusal(400, f"since={given[:40]!r} is no cursor; leave it out to get one")
    since = min(since, now)  # the server's clock may have been set back
    cursor, found = now, {}
    for key, table in (("experiments", Experiment), ("runs", Generation)):
        rows = table.objects.filter(project=visitor.project, updated__gt=since).order_by("updated")
        newest = list(rows.values_list("id", "updated")[:MOST])
        if len(newest) == MOST:
            cursor = min(cursor, newest[-1][1])
        found[key] = [pk for pk, _ in newest]
    # Rows that share one time, more than an answer holds, must not be asked for again and again.
    return JsonResponse({"cursor": repr(cursor if cursor > since else math.nextafter(since, math.inf)), **found})


urlpatterns: list[URLPattern] = [path("api/v1/projects/<str:project>/changes", changes, name="changes")]
