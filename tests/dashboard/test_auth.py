"""Who is let in: links that work once, passwords, keys; and who is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("django_ready")


def client(**how: Any) -> Any:
    from django.test import Client

    return Client(**how)


def request_of(user: object, **headers: str) -> Any:
    from django.test import RequestFactory

    request = RequestFactory().get("/", headers=headers)
    request.user = user
    return request


def test_a_login_link_lets_one_browser_in_and_no_second():
    from evsys_dashboard.auth import local_user, make_login_link

    link, first, second = make_login_link(local_user()), client(), client()
    assert first.get(link).status_code == 302
    assert "_auth_user_id" in first.session
    answer = second.get(link)
    assert answer.status_code == 403
    assert b"used before" in answer.content
    assert "_auth_user_id" not in second.session


def test_a_login_link_that_is_too_old_lets_no_one_in():
    from evsys_dashboard.auth import local_user, make_login_link

    browser = client()
    assert browser.get(make_login_link(local_user(), seconds=-1)).status_code == 403
    assert "_auth_user_id" not in browser.session


def test_a_page_sends_a_stranger_to_the_login_page_and_back():
    from django.contrib.auth.models import AnonymousUser
    from django.http import HttpResponse

    from evsys_dashboard.auth import page

    answer = page(lambda request: HttpResponse("secret"))(request_of(AnonymousUser()))
    assert (answer.status_code, answer["Location"]) == (302, "/login?next=%2F")


@pytest.mark.parametrize("target", ["https://elsewhere.example/", "//elsewhere.example", "javascript:alert(1)"])
@pytest.mark.usefixtures("team")
def test_the_login_page_sends_no_one_to_another_site(target):
    from django.contrib.auth.models import User

    User.objects.filter(username="redirected").delete()
    User.objects.create_user("redirected", password="a long password")
    answer = client().post("/login", {"username": "redirected", "password": "a long password", "next": target})
    assert (answer.status_code, answer["Location"]) == (302, "/")


@pytest.mark.usefixtures("team")
def test_wrong_passwords_are_refused_and_after_ten_the_name_has_to_wait():
    from django.contrib.auth.models import User

    User.objects.filter(username="guessed").delete()
    User.objects.create_user("guessed", password="a long password")
    answers = [client().post("/login", {"username": "guessed", "password": "wrong"}).status_code for _ in range(11)]
    assert answers == [403] * 10 + [429]
    assert client().post("/login", {"username": "guessed", "password": "a long password"}).status_code == 429


@pytest.mark.usefixtures("team")
def test_an_invited_person_chooses_a_password_before_anything_else(project):
    from django.contrib.auth.models import User

    from evsys_dashboard.auth import invite, project_for

    User.objects.filter(username="newcomer").delete()
    browser = client()
    assert browser.get(invite(project, is_owner=True))["Location"] == "/welcome"
    short = browser.post("/welcome", {"username": "newcomer", "password": "short"})
    assert b"at least 10 characters" in short.content
    assert browser.post("/welcome", {"username": "newcomer", "password": "a long password"})["Location"] == "/"
    user = User.objects.get(username="newcomer")
    assert project_for(request_of(user), project.pk) == project
    assert client().post("/login", {"username": "newcomer", "password": "a long password"}).status_code == 302


@pytest.mark.usefixtures("team")
def test_a_project_of_others_is_not_there(project):
    from django.contrib.auth.models import User
    from django.http import Http404

    from evsys_dashboard.auth import project_for

    User.objects.filter(username="outsider").delete()
    outsider = User.objects.create_user("outsider", password="a long password")
    with pytest.raises(Http404):
        project_for(request_of(outsider), project.pk)


def test_forms_without_a_csrf_token_are_refused(visitor):
    from django.test import Client

    strict = Client(enforce_csrf_checks=True)
    strict.cookies = visitor.cookies
    assert strict.post("/logout").status_code == 403
    assert strict.post("/login", {"username": "x", "password": "y"}).status_code == 403


def test_a_session_that_changes_something_through_the_api_needs_a_csrf_token(visitor, project, key):
    from django.http import JsonResponse
    from django.test import RequestFactory

    from evsys_dashboard.auth import api, local_user, visitor_for

    @api
    def change(request: Any) -> Any:
        visitor_for(request, project.pk)
        return JsonResponse({"done": True})

    def post(**headers: str) -> Any:
        request = RequestFactory().post("/", headers=headers)
        request.COOKIES = {name: morsel.value for name, morsel in visitor.cookies.items()}
        request.user = local_user()
        return change(request)

    assert post().status_code == 403
    assert post(Authorization=f"Bearer {key}").status_code == 200


def test_a_key_is_shown_once_and_only_its_hash_is_stored(project):
    from evsys_dashboard.auth import make_key
    from evsys_dashboard.models import ApiKey

    key, text = make_key(project, "laptop", "write")
    stored = ApiKey.objects.filter(pk=key.pk).values().get()
    assert text.startswith("evk_") and len(text) > 40
    assert text not in json.dumps(stored)


@pytest.mark.parametrize(
    ("case", "status", "reason"),
    [
        ("none", 401, "send an API key"),
        ("basic", 401, "send an API key"),
        ("unknown", 401, "not known"),
        ("revoked", 401, "revoked"),
        ("other project", 403, "does not belong"),
        ("read only", 403, "may only read"),
        ("right", 200, ""),
    ],
)
def test_a_key_has_to_be_known_and_of_the_project_and_allowed(project, case, status, reason):
    from django.contrib.auth.models import AnonymousUser

    from evsys_dashboard.auth import Refusal, key_for, make_key, revoke_key

    key, text = make_key(project, "k", "read" if case == "read only" else "write")
    if case == "revoked":
        revoke_key(key)
    header = {"none": "", "basic": f"Basic {text}", "unknown": "Bearer evk_unknown"}.get(case, f"Bearer {text}")
    other = "another" if case == "other project" else project.pk
    request = request_of(AnonymousUser(), **{"Authorization": header, "X-Evsys-Project": other})
    if status == 200:
        assert key_for(request, "write") == key
        return
    with pytest.raises(Refusal, match=reason) as refused:
        key_for(request, "write")
    assert refused.value.status == status


def test_an_agents_key_does_not_see_rows_of_a_test_split(project):
    from django.contrib.auth.models import AnonymousUser

    from evsys_dashboard.auth import make_key, visitor_for

    for scope, sees in [("agent", False), ("read", True), ("write", True)]:
        text = make_key(project, scope, scope)[1]
        request = request_of(AnonymousUser(), Authorization=f"Bearer {text}")
        assert visitor_for(request, project.pk).may_see_test_rows is sees
