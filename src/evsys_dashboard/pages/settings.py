"""Settings of a project: its name, its people and its API keys.

In: a form of an owner. Out: the page. A new key is shown in the answer to the form that made it and never again. On
one's own machine there is one person and no list of people; on a team's server owners change things, members look.
"""

from __future__ import annotations

import re
import secrets
import time
from urllib.parse import quote

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseForbidden, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.urls import URLPattern, path
from django.views.decorators.http import require_POST, require_safe

from evsys_dashboard import auth
from evsys_dashboard.models import ApiKey, Membership, Project

FOR_A_TEAM = "This dashboard is for one person. For a team: evsys dashboard --help"
LONGEST_NAME = 100
LONGEST_PROJECT_NAME = 200


def _render(request: HttpRequest, project: Project, status: int = 200, **extra: object) -> HttpResponse:
    keys = project.keys.select_related("created_by").order_by("revoked", "-created")
    context = {
        "project": project,
        "section": "settings",
        "keys": keys,
        "scopes": ApiKey.Scope.choices,
        "is_owner": auth.is_owner(request, project),
        "is_team": not settings.EVSYS_IS_LOCAL,
        "members": project.memberships.select_related("user").order_by("user__username"),
        "projects": auth.projects_of(request)[:50],
        "server_url": f"{request.scheme}://{request.get_host()}",
        **extra,
    }
    return render(request, "dashboard/settings.html", context, status=status)


def _refuse_members(request: HttpRequest, project: Project) -> HttpResponse | None:
    """An answer for a member who is no owner; None for an owner."""
    if auth.is_owner(request, project):
        return None
    return HttpResponseForbidden("Only an owner of the project may do this.")


def _to(project: Project) -> HttpResponseRedirect:
    return HttpResponseRedirect(f"/p/{quote(project.id, safe='')}/settings")


@require_safe
@auth.page
def show(request: HttpRequest, project: str) -> HttpResponse:
    """The page."""
    return _render(request, auth.project_for(request, project))


@require_POST
@auth.page
def rename(request: HttpRequest, project: str) -> HttpResponse:
    """Give the project another name; its id, which clients use, stays."""
    found = auth.project_for(request, project)
    if (refusal := _refuse_members(request, found)) is not None:
        return refusal
    name = request.POST.get("name", "").strip().replace("\x00", "")
    if not name or len(name) > LONGEST_PROJECT_NAME:
        problem = f"A name has between 1 and {LONGEST_PROJECT_NAME} characters."
        return _render(request, found, 400, problem=problem)
    found.name = name
    found.save(update_fields=["name"])
    return _to(found)


@require_POST
@auth.page
def add_key(request: HttpRequest, project: str) -> HttpResponse:
    """Make a key and show it, this once."""
    found = auth.project_for(request, project)
    if (refusal := _refuse_members(request, found)) is not None:
        return refusal
    name, scope = request.POST.get("name", "").strip().replace("\x00", ""), request.POST.get("scope", "")
    if not name or len(name) > LONGEST_NAME:
        return _render(request, found, 400, problem=f"A key's name has between 1 and {LONGEST_NAME} characters.")
    if scope not in ApiKey.Scope.values:
        return _render(request, found, 400, problem=f"Choose a scope: {', '.join(ApiKey.Scope.values)}.")
    key, text = auth.make_key(found, name, scope, by=request.user if isinstance(request.user, auth.User) else None)
    # Shown in this answer, without a redirect: after one the key would have to be stored to be shown.
    return _render(request, found, 201, new_key=key, new_key_text=text)


@require_POST
@auth.page
def revoke(request: HttpRequest, project: str, key: int) -> HttpResponse:
    """From the next request on the key is refused."""
    found = auth.project_for(request, project)
    if (refusal := _refuse_members(request, found)) is not None:
        return refusal
    auth.revoke_key(get_object_or_404(ApiKey, pk=key, project=found))
    return _to(found)


@require_POST
@auth.page
def invite(request: HttpRequest, project: str) -> HttpResponse:
    """Add a person who has an account, by name; else a link by which a new person joins, shown this once."""
    found = auth.project_for(request, project)
    if (refusal := _refuse_members(request, found)) is not None:
        return refusal
    if settings.EVSYS_IS_LOCAL:
        return _render(request, found, 400, problem=FOR_A_TEAM)
    name = request.POST.get("username", "").strip().replace("\x00", "")
    if name:
        person = auth.User.objects.filter(username=name).first()
        if person is None or not person.has_usable_password():
            problem = f"No one here is called {name[:LONGEST_NAME]}. For a new person, make an invitation."
            return _render(request, found, 400, problem=problem)
        if found.memberships.filter(user=person).exists():
            return _render(request, found, 400, problem=f"{name} is a member already.")
        Membership.objects.create(project=found, user=person, is_owner=request.POST.get("owner") == "1")
        return _to(found)
    # A link instead of an account: the person chooses the password, and no other person has known it.
    link = auth.invite(found, is_owner=request.POST.get("owner") == "1")
    return _render(request, found, 201, invitation=request.build_absolute_uri(link))


@require_POST
@auth.page
def remove_member(request: HttpRequest, project: str, member: int) -> HttpResponse:
    """Take a person out of the project; the last owner stays."""
    found = auth.project_for(request, project)
    if (refusal := _refuse_members(request, found)) is not None:
        return refusal
    one = get_object_or_404(Membership, pk=member, project=found)
    # A project without an owner could be neither shared nor left by anyone again.
    if one.is_owner and not found.memberships.filter(is_owner=True).exclude(pk=one.pk).exists():
        return _render(request, found, 400, problem="The last owner of a project cannot be removed.")
    one.delete()
    return _to(found)


@require_POST
@auth.page
def add_project(request: HttpRequest, project: str) -> HttpResponse:
    """Make another project of this server; who makes it owns it."""
    found = auth.project_for(request, project)
    if (refusal := _refuse_members(request, found)) is not None:
        return refusal
    if settings.EVSYS_IS_LOCAL:
        return _render(request, found, 400, problem=FOR_A_TEAM)
    name = request.POST.get("name", "").strip().replace("\x00", "")
    if not name or len(name) > LONGEST_PROJECT_NAME:
        problem = f"A name has between 1 and {LONGEST_PROJECT_NAME} characters."
        return _render(request, found, 400, problem=problem)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "project"
    with transaction.atomic():
        if Project.objects.filter(pk=slug).exists():  # perhaps one that this person may not see
            slug += f"-{secrets.token_hex(3)}"
        made = Project.objects.create(pk=slug, name=name, created=time.time())
        Membership.objects.create(project=made, user_id=request.user.pk, is_owner=True)
    return _to(made)


urlpatterns: list[URLPattern] = [
    path("p/<str:project>/settings", show, name="settings"),
    path("p/<str:project>/settings/name", rename),
    path("p/<str:project>/settings/keys", add_key),
    path("p/<str:project>/settings/keys/<int:key>/revoke", revoke),
    path("p/<str:project>/settings/members", invite),
    path("p/<str:project>/settings/projects", add_project),
    path("p/<str:project>/settings/members/<int:member>/remove", remove_member),
]
