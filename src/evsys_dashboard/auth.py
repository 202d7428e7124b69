"""Who is asking, and what they may see.

In: a request. Out: the project, the person or the key behind it; or a refusal. A person has a session cookie, from a
link that works once or from a password. A client has a key in the `Authorization` header, and then no cookie counts.
On one's own machine (`EVSYS_IS_LOCAL`) the one user sees every project; on a team's server those they are a member of.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlencode

from django.conf import settings
from django.contrib.auth import authenticate, get_user_model, login, logout
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import Error, IntegrityError, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.middleware.csrf import CsrfViewMiddleware
from django.shortcuts import render
from django.urls import path
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from evsys_dashboard.models import ApiKey, LoginLink, Membership, Project
from evsys_sdk.logs import get_logger
from evsys_sdk.record.dashboard.wire import PROJECT_HEADER

Right = Literal["read", "write"]
View = Callable[..., HttpResponse]

KEY_PREFIX = "evk_"
LOCAL_USER = "local"
LINK_SECONDS = 24 * 3600.0
MAX_FAILURES, FAILURE_SECONDS = 10, 300.0
"""So many wrong passwords for one name in this time; then the name has to wait."""
SAFE_METHODS = ("GET", "HEAD", "OPTIONS", "TRACE")
MAY_WRITE = (ApiKey.Scope.WRITE, ApiKey.Scope.AGENT)
LAST_USED_SECONDS = 60.0
"""How exact `ApiKey.last_used` is: a write per request would cost more than the request."""


class Refusal(Exception):
    """A request that is refused, with the status and the reason of the answer."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who asks the read API: a person or a key, in one project."""

    project: Project
    user: User | None = None
    key: ApiKey | None = None

    @property
    def may_see_test_rows(self) -> bool:
        """Rows of a test split are for people, never for an agent's key."""
        return self.key is None or self.key.scope != ApiKey.Scope.AGENT


def sha256_of(secret: str) -> str:
    # A plain hash is enough here: keys and links are 256 random bits, which nothing can try out. Passwords, which
    # people choose, go through scrypt (`settings`).
    return hashlib.sha256(secret.encode()).hexdigest()


# Keys.


def make_key(project: Project, name: str, scope: str, *, by: User | None = None) -> tuple[ApiKey, str]:
    """A new key of a project, and its text, which is stored nowhere."""
    text = KEY_PREFIX + secrets.token_urlsafe(32)
    key = ApiKey.objects.create(
        project=project,
        name=name,
        # `evk_` and six more: enough to recognise the key by, and over 200 bits stay unknown.
        prefix=text[:10],
        sha256=sha256_of(text),
        scope=scope,
        created=time.time(),
        created_by=by,
    )
    return key, text


def revoke_key(key: ApiKey) -> None:
    """From the next request on the key is refused."""
    if key.revoked is None:
        key.revoked = time.time()
        key.save(update_fields=["revoked"])


def check_key(authorization: str, project_id: str, right: Right) -> ApiKey:
    """The key in an `Authorization` header, for this project (empty: whichever it belongs to); else a Refusal."""
    kind, _, text = authorization.partition(" ")
    if kind.lower() != "bearer" or not text.strip():
        raise Refusal(401, "send an API key: `Authorization: Bearer evk_...` (Settings > API keys)")
    key = ApiKey.objects.select_related("project").filter(sha256=sha256_of(text.strip())).first()
    if key is None:
        raise Refusal(401, "this API key is not known here; make one under Settings > API keys")
    if key.revoked is not None:
        raise Refusal(401, "this API key was revoked; make a new one under Settings > API keys")
    if project_id and key.project_id != project_id:
        # Whether there is such a project is not this key's business.
        raise Refusal(403, f"this API key does not belong to the project {project_id!r}; see EVSYS_PROJECT_ID")
    if right == "write" and key.scope not in MAY_WRITE:
        raise Refusal(403, f"this API key may only read (its scope is {key.scope!r}); make one that may write")
    return key


def note_use(key: ApiKey) -> None:
    """Keep when a key was last used, about to the minute."""
    now = time.time()
    if key.last_used is None or now - key.last_used > LAST_USED_SECONDS:
        ApiKey.objects.filter(pk=key.pk).update(last_used=now)


def key_for(request: HttpRequest, right: Right) -> ApiKey:
    """The key of a request of a client, and with it the project (`key.project`); else a Refusal."""
    header = request.headers.get(PROJECT_HEADER, "")
    key = check_key(request.headers.get("Authorization", ""), header, right)
    note_use(key)
    return key


def visitor_for(request: HttpRequest, project_id: str, right: Right = "read") -> Visitor:
    """Who asks for something of this project by the API: a key, else the session; else a Refusal.

    A project that the visitor may not see is answered like one that does not exist."""
    if "Authorization" in request.headers:
        key = check_key(request.headers["Authorization"], "", right)
        if key.project_id != project_id:
            raise Refusal(404, f"there is no project {project_id!r} for this API key")
        note_use(key)
        return Visitor(project=key.project, key=key)
    if not isinstance(request.user, User):
        raise Refusal(401, "log in, or send an API key: `Authorization: Bearer evk_...`")
    try:
        return Visitor(project=project_for(request, project_id), user=request.user)
    except Http404 as exc:
        raise Refusal(404, str(exc)) from None


def api(view: View) -> View:
    """A route that answers in JSON, refusals too. A key needs no CSRF token; a session that changes something does."""

    @csrf_exempt
    @functools.wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            if "Authorization" not in request.headers and request.method not in SAFE_METHODS and has_session(request):
                refuse_forgery(request)
            return view(request, *args, **kwargs)
        except Refusal as exc:
            return refuse(exc.status, exc.reason)
        except Http404 as exc:
            return refuse(404, str(exc) or "not found")
        except Error as exc:  # a full disk, a database that is away: clients keep what they have and come again
            get_logger(__name__).error("%s %s: %s", request.method, request.path, exc)
            return refuse(503, f"the database cannot be used: {exc}")

    return answer


def refuse(status: int, reason: str) -> JsonResponse:
    return JsonResponse({"error": reason}, status=status)


def has_session(request: HttpRequest) -> bool:
    return settings.SESSION_COOKIE_NAME in request.COOKIES


def refuse_forgery(request: HttpRequest) -> None:
    """Refusal for a request that changes something and has no CSRF token."""
    # The decorator `csrf_exempt` is for the key routes; here the check is made after all, by Django's own code.
    check = CsrfViewMiddleware(lambda _: HttpResponse())
    check.process_request(request)
    if check.process_view(request, lambda *_: HttpResponse(), (), {}) is not None:
        raise Refusal(403, "the CSRF token is missing or wrong; reload the page")


# Pages.


def page(view: View) -> View:
    """A page for people: who is not logged in is sent to /login and back."""

    @never_cache
    @functools.wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return HttpResponseRedirect(f"/login?{urlencode({'next': request.get_full_path()})}")
        if needs_password(request):
            return HttpResponseRedirect("/welcome")
        return view(request, *args, **kwargs)

    return answer


def needs_password(request: HttpRequest) -> bool:
    """Whether the visitor came by a first link to a team's server, and has not chosen a password yet."""
    return not settings.EVSYS_IS_LOCAL and isinstance(request.user, User) and not request.user.has_usable_password()


def projects_of(request: HttpRequest) -> QuerySet[Project]:
    """What the visitor may see, newest first."""
    if not isinstance(request.user, User):
        return Project.objects.none()
    if settings.EVSYS_IS_LOCAL:
        return Project.objects.order_by("-created")
    return Project.objects.filter(memberships__user=request.user).order_by("-created")


def project_for(request: HttpRequest, project_id: str) -> Project:
    """The project; Http404 for one that the visitor may not see, as for one that does not exist."""
    found = projects_of(request).filter(pk=project_id).first()
    if found is None:
        raise Http404(f"there is no project {project_id!r} here")
    return found


def is_owner(request: HttpRequest, project: Project) -> bool:
    """Whether the visitor may add people to the project and make keys."""
    if settings.EVSYS_IS_LOCAL:
        return isinstance(request.user, User)
    return project.memberships.filter(user_id=request.user.pk, is_owner=True).exists()


# Links that let one browser in.


def make_login_link(user: User, *, seconds: float = LINK_SECONDS) -> str:
    """The path of a link that works once."""
    token = secrets.token_urlsafe(32)
    # Cleared where one is made, so that no job has to run for it.
    LoginLink.objects.filter(expires__lt=time.time()).delete()
    LoginLink.objects.create(sha256=sha256_of(token), user=user, expires=time.time() + seconds)
    return f"/login/{token}"


def local_user() -> User:
    """The one user of a dashboard on one's own machine."""
    return User.objects.get_or_create(username=LOCAL_USER, defaults={"password": "!"})[0]


def invite(project: Project, *, is_owner: bool = False, seconds: float = 7 * LINK_SECONDS) -> str:
    """The path of a link by which a new person joins the project and chooses a name and a password."""
    user = User(username=f"invited-{secrets.token_hex(6)}")
    user.set_unusable_password()
    with transaction.atomic():
        user.save()
        Membership.objects.create(project=project, user=user, is_owner=is_owner)
        return make_login_link(user, seconds=seconds)


@never_cache
@require_GET
def use_login_link(request: HttpRequest, token: str) -> HttpResponse:
    with transaction.atomic():
        link = LoginLink.objects.select_related("user").filter(sha256=sha256_of(token)).first()
        # Of two browsers with the same link the one that deletes its row is let in.
        used = link is not None and LoginLink.objects.filter(pk=link.pk).delete()[0] == 1
    if link is None or not used or link.expires < time.time():
        text = "This link was used before or is too old. Start `evsys dashboard` again, or ask an owner for a new one."
        return render(request, "dashboard/login.html", {"problem": text, **login_context()}, status=403)
    login(request, link.user, backend="django.contrib.auth.backends.ModelBackend")
    return HttpResponseRedirect("/welcome" if needs_password(request) else safe_target(request.GET.get("next")))


def safe_target(target: str | None) -> str:
    """Where to go after the login: a page of ours, never an address elsewhere."""
    return target if target and url_has_allowed_host_and_scheme(target, allowed_hosts=None) else "/"


def login_context() -> dict[str, object]:
    return {"is_local": settings.EVSYS_IS_LOCAL}


class FailureLog:
    """Wrong passwords by name, in memory: it slows guessing down, and a restart forgives."""

    def __init__(self) -> None:
        self._lock, self._times = threading.Lock(), dict[str, deque[float]]()

    def is_blocked(self, name: str) -> bool:
        with self._lock:
            recent = self._recent(name)
            return len(recent) >= MAX_FAILURES

    def note(self, name: str) -> None:
        with self._lock:
            if len(self._times) > 10_000:  # names that never existed must not fill the memory
                self._times.clear()
            self._times.setdefault(name, deque(maxlen=MAX_FAILURES)).append(time.monotonic())

    def _recent(self, name: str) -> deque[float]:
        times = self._times.get(name) or deque()
        while times and times[0] < time.monotonic() - FAILURE_SECONDS:
            times.popleft()
        return times


failures = FailureLog()


@never_cache
@require_http_methods(["GET", "POST"])
def log_in(request: HttpRequest) -> HttpResponse:
    target = safe_target(request.GET.get("next") or request.POST.get("next"))
    context: dict[str, object] = {"next": target, **login_context()}
    if request.method == "GET" or settings.EVSYS_IS_LOCAL:
        if request.user.is_authenticated:
            return HttpResponseRedirect(target)
        return render(request, "dashboard/login.html", context, status=401 if settings.EVSYS_IS_LOCAL else 200)
    name, password = request.POST.get("username", ""), request.POST.get("password", "")
    context["username"] = name
    if failures.is_blocked(name):
        problem = f"Too many wrong passwords for this name. Try again in {FAILURE_SECONDS / 60:.0f} minutes."
        return render(request, "dashboard/login.html", context | {"problem": problem}, status=429)
    user = authenticate(request, username=name, password=password)
    if user is None:
        failures.note(name)
        return render(request, "dashboard/login.html", context | {"problem": "Wrong name or password."}, status=403)
    login(request, user)
    return HttpResponseRedirect(target)


@require_POST
def log_out(request: HttpRequest) -> HttpResponse:
    logout(request)
    return HttpResponseRedirect("/login")


@never_cache
@require_http_methods(["GET", "POST"])
def welcome(request: HttpRequest) -> HttpResponse:
    """The first visit of a person by a link: a name and a password."""
    if not isinstance(request.user, User):
        return HttpResponseRedirect("/login")
    if not needs_password(request):
        return HttpResponseRedirect("/")
    if request.method == "GET":
        return render(request, "dashboard/welcome.html")
    name, password = request.POST.get("username", "").strip(), request.POST.get("password", "")
    user = request.user
    try:
        User.username_validator(name)
        validate_password(password, user)
        if len(password) < 10:
            raise ValidationError("Choose a password of at least 10 characters.")
        user.username = name
        user.set_password(password)
        with transaction.atomic():
            user.save()
    except ValidationError as exc:
        return render(request, "dashboard/welcome.html", {"problem": " ".join(exc.messages), "username": name})
    except IntegrityError:
        text = f"The name {name} is taken."
        return render(request, "dashboard/welcome.html", {"problem": text, "username": name})
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    return HttpResponseRedirect("/")


assert get_user_model() is User

urlpatterns = [
    path("login", log_in),
    path("login/<str:token>", use_login_link),
    path("logout", log_out),
    path("welcome", welcome),
]
