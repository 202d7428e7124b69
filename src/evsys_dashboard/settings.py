"""Django's settings, made from what the server was started with.

In: `ServerOptions`. Out: a configured Django. Nothing is read from a settings module, so that a test and the command
line configure the server the same way.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Of a request, as it comes and unpacked. A batch of a client has about 2 MB; a record with figures may have more."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")

# Texts of models, tasks and strangers stand on these pages. Should an escape be missing, the browser still runs no
# script of theirs and asks no other host for anything.
SECURE_CSP: dict[str, list[str]] = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "img-src": ["'self'", "data:"],
    "font-src": ["'self'"],
    "connect-src": ["'self'"],
    "form-action": ["'self'"],
    "frame-ancestors": ["'none'"],
    "base-uri": ["'none'"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a server is started with."""

    database_url: str
    """`sqlite:///path` or `postgresql://user:password@host:port/name`."""
    secret_key: str
    """Signs sessions; kept beside the database, so that a restart logs no user out."""
    hosts: tuple[str, ...] = LOOPBACK_HOSTS
    """Host headers that are answered."""
    is_local: bool = True
    """One person on this machine, let in by a link; otherwise a team with users and passwords."""
    public_url: str = ""
    """Where browsers reach a server behind a proxy; with https://, cookies are sent over nothing else."""

    @property
    def is_https(self) -> bool:
        return self.public_url.startswith("https://")


def database_settings(url: str) -> dict[str, object]:
    """Django's DATABASES entry for a URL."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        # Autocommit reads see what the writer thread committed; `BEGIN IMMEDIATE` because a transaction that starts
        # with a read and then writes cannot wait for another writer in WAL mode, it fails at once.
        options = {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA cache_size=-16000;",
        }
        # Threads live as long as the server (`asgi`), so each keeps its connection.
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": unquote(parts.path),
            "OPTIONS": options,
            "CONN_MAX_AGE": None,
        }
    if parts.scheme not in ("postgres", "postgresql"):
        raise ValueError(f"{parts.scheme}:// is no database the dashboard knows: use sqlite:/// or postgresql://")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": dict(parse_qsl(parts.query)),
        # A PostgreSQL that was restarted leaves dead connections: each is tried before a request uses it.
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
    }


def django_settings(options: ServerOptions) -> Mapping[str, object]:
    here = Path(__file__).parent
    return {
        "SECRET_KEY": options.secret_key,
        "DEBUG": False,
        "ALLOWED_HOSTS": list(options.hosts),
        "DATABASES": {"default": database_settings(options.database_url)},
        "INSTALLED_APPS": [
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "evsys_dashboard.apps.DashboardConfig",
        ],
        "MIDDLEWARE": [
            "django.middleware.security.SecurityMiddleware",
            "whitenoise.middleware.WhiteNoiseMiddleware",
            "django.middleware.csp.ContentSecurityPolicyMiddleware",
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.common.CommonMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.middleware.clickjacking.XFrameOptionsMiddleware",
        ],
        "ROOT_URLCONF": "evsys_dashboard.urls",
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "DIRS": [here / "templates"],
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                    ],
                    "builtins": ["evsys_dashboard.templatetags"],
                },
            }
        ],
        "STATIC_URL": "/static/",
        "STATIC_ROOT": here / "static",
        "WHITENOISE_USE_FINDERS": False,
        "USE_TZ": True,
        "TIME_ZONE": "UTC",
        "USE_I18N": False,
        # A redirect to the path with a slash would lose the body of a client's POST.
        "APPEND_SLASH": False,
        "LOGIN_URL": "/login",
        "SECURE_CSP": SECURE_CSP,
        "X_FRAME_OPTIONS": "DENY",
        "SECURE_REFERRER_POLICY": "same-origin",
        # Browsers keep one set of cookies for all ports of a host: two dashboards must not log each other out.
        "SESSION_COOKIE_NAME": f"evsys_{hashlib.sha256(options.secret_key.encode()).hexdigest()[:12]}",
        "SESSION_COOKIE_SAMESITE": "Lax",
        "SESSION_COOKIE_HTTPONLY": True,
        "SESSION_COOKIE_SECURE": options.is_https,
        "CSRF_COOKIE_SECURE": options.is_https,
        "CSRF_COOKIE_SAMESITE": "Lax",
        "CSRF_TRUSTED_ORIGINS": [options.public_url] if options.public_url else [],
        # Scrypt needs memory to guess (RFC 7914) and no package beside the standard library.
        "PASSWORD_HASHERS": ["django.contrib.auth.hashers.ScryptPasswordHasher"],
        # Django's own limit of 2.5 MB would refuse a batch of rollouts.
        "DATA_UPLOAD_MAX_MEMORY_SIZE": MAX_BODY_BYTES,
        "EVSYS_IS_LOCAL": options.is_local,
        "LOGGING_CONFIG": None,
    }


def configure(options: ServerOptions) -> None:
    """Set Django up in this process, once."""
    import django
    from django.conf import settings

    settings.configure(**django_settings(options))
    django.setup()
    for name in ("django.request", "django.security"):  # a stranger who is refused is no event for the terminal
        logging.getLogger(name).setLevel(logging.ERROR)
