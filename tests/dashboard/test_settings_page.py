"""Settings: keys that are shown once, the project's name, its people; and who may change them."""

from __future__ import annotations

import re

import pytest


def make_member(project, name: str, *, is_owner: bool = False):
    """A logged-in browser of a new member."""
    from django.contrib.auth.models import User
    from django.test import Client

    from evsys_dashboard.models import Membership

    user = User.objects.create_user(f"{name}-{project.id}", password="a good password")
    member = Membership.objects.create(project=project, user=user, is_owner=is_owner)
    browser = Client()
    browser.force_login(user)
    return browser, member


def test_a_key_is_shown_once_and_works(visitor, project):
    from django.test import Client

    answer = visitor.post(f"/p/{project.id}/settings/keys", {"name": "gpu", "scope": "write"})
    assert answer.status_code == 201
    text = re.search(r"EVSYS_API_KEY=(evk_[\w-]+)", answer.content.decode())[1]
    page = visitor.get(f"/p/{project.id}/settings").content.decode()
    assert text not in page
    assert text[:10] in page
    found = Client().get(f"/api/v1/projects/{project.id}/changes", headers={"Authorization": f"Bearer {text}"})
    assert found.status_code == 200
    assert project.keys.get().sha256 not in page


def test_a_revoked_key_is_refused(visitor, project, key):
    from django.test import Client

    one = project.keys.get()
    assert visitor.post(f"/p/{project.id}/settings/keys/{one.pk}/revoke").status_code == 302
    found = Client().get(f"/api/v1/projects/{project.id}/changes", headers={"Authorization": f"Bearer {key}"})
    assert found.status_code == 401
    assert "revoked" in visitor.get(f"/p/{project.id}/settings").content.decode()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"name": "", "scope": "write"}, "between 1 and 100"),
        ({"name": "x" * 101, "scope": "write"}, "between 1 and 100"),
        ({"name": "a", "scope": "admin"}, "Choose a scope"),
    ],
)
def test_a_key_needs_a_name_and_a_known_scope(visitor, project, form, said):
    answer = visitor.post(f"/p/{project.id}/settings/keys", form)
    assert answer.status_code == 400
    assert said in answer.content.decode()
    assert not project.keys.exists()


def test_a_form_without_a_csrf_token_changes_nothing(project):
    from django.test import Client

    from evsys_dashboard.auth import local_user

    browser = Client(enforce_csrf_checks=True)
    browser.force_login(local_user())
    for place, form in (("keys", {"name": "a", "scope": "write"}), ("name", {"name": "mine"}), ("members", {})):
        assert browser.post(f"/p/{project.id}/settings/{place}", form).status_code == 403
    project.refresh_from_db()
    assert not project.keys.exists()
    assert project.name != "mine"


def test_what_changes_something_is_no_get(visitor, project, key):
    one = project.keys.get()
    for place in ("keys", "name", "members", f"keys/{one.pk}/revoke"):
        assert visitor.get(f"/p/{project.id}/settings/{place}").status_code == 405


def test_the_project_is_renamed_and_hostile_names_are_only_shown(visitor, project, rows):
    for text in rows.HOSTILE:
        assert visitor.post(f"/p/{project.id}/settings/name", {"name": text[:200]}).status_code == 302
        visitor.post(f"/p/{project.id}/settings/keys", {"name": text[:100], "scope": "read"})
        for place in ("settings", "", "progress", "datasets"):
            page = visitor.get(f"/p/{project.id}/{place}").content.decode()
            assert "<script>alert" not in page
            assert "<img src=x" not in page
            assert "<svg onload" not in page
    assert visitor.post(f"/p/{project.id}/settings/name", {"name": "  "}).status_code == 400


def test_a_key_of_another_project_cannot_be_revoked_here(visitor, project, key):
    from evsys_dashboard.models import Project

    other = Project.objects.create(id=f"{project.id}-other", name="other", created=1.0)
    one = project.keys.get()
    assert visitor.post(f"/p/{other.id}/settings/keys/{one.pk}/revoke").status_code == 404
    one.refresh_from_db()
    assert one.revoked is None
    other.delete()


@pytest.mark.usefixtures("team")
def test_a_member_looks_and_only_an_owner_changes(project):
    owner, owner_row = make_member(project, "owner", is_owner=True)
    member, member_row = make_member(project, "member")
    page = member.get(f"/p/{project.id}/settings").content.decode()
    assert "Make a key" not in page
    assert owner_row.user.username in page
    forms = {"keys": {"name": "a", "scope": "write"}, "name": {"name": "mine"}, "members": {}}
    for place, form in forms.items():
        assert member.post(f"/p/{project.id}/settings/{place}", form).status_code == 403
    assert member.post(f"/p/{project.id}/settings/members/{owner_row.pk}/remove").status_code == 403
    assert owner.post(f"/p/{project.id}/settings/keys", forms["keys"]).status_code == 201
    assert owner.post(f"/p/{project.id}/settings/members/{member_row.pk}/remove").status_code == 302
    assert member.get(f"/p/{project.id}/settings").status_code == 404
    assert owner.post(f"/p/{project.id}/settings/members/{owner_row.pk}/remove").status_code == 400
    assert owner.get(f"/p/{project.id}/settings").status_code == 200


@pytest.mark.usefixtures("team")
def test_an_invitation_lets_one_new_person_into_the_project(project):
    from django.test import Client

    owner, _ = make_member(project, "owner", is_owner=True)
    answer = owner.post(f"/p/{project.id}/settings/members", {})
    link = re.search(r"http://testserver(/login/[\w-]+)", answer.content.decode())[1]
    guest = Client()
    assert guest.get(link)["Location"] == "/welcome"
    name = f"guest-{project.id}"
    assert guest.post("/welcome", {"username": name, "password": "long enough words"}).status_code == 302
    assert guest.get(f"/p/{project.id}/").status_code == 200
    assert name in owner.get(f"/p/{project.id}/settings").content.decode()


@pytest.mark.usefixtures("team")
def test_an_owner_makes_another_project_which_only_its_members_see(project):
    from evsys_dashboard.models import Project

    owner, owner_row = make_member(project, "owner", is_owner=True)
    member, member_row = make_member(project, "member")
    form = {"name": f"{project.id}: Räte & Tools"}
    assert member.post(f"/p/{project.id}/settings/projects", form).status_code == 403
    assert owner.post(f"/p/{project.id}/settings/projects", {"name": " "}).status_code == 400
    made = [owner.post(f"/p/{project.id}/settings/projects", form)["Location"] for _ in range(2)]
    ids = [re.fullmatch("/p/([a-z0-9-]+)/settings", place)[1] for place in made]
    assert ids[0] == f"{project.id}-r-te-tools" and ids[1].startswith(f"{ids[0]}-")
    assert f"/p/{ids[0]}/" in owner.get(f"/p/{project.id}/settings").content.decode()
    assert member.get(made[0]).status_code == 404
    for name, said in ((member_row.user.username, 302), (member_row.user.username, 400), ("no-such-person", 400)):
        assert owner.post(f"/p/{ids[0]}/settings/members", {"username": name}).status_code == said, name
    assert member.get(made[0]).status_code == 200
    assert member.get(made[1]).status_code == 404
    assert member.post(f"/p/{ids[0]}/settings/members", {"username": owner_row.user.username}).status_code == 403
    Project.objects.filter(pk__in=ids).delete()


def test_on_ones_own_machine_no_project_is_made_by_hand(visitor, project):
    assert visitor.post(f"/p/{project.id}/settings/projects", {"name": "other"}).status_code == 400
