"""The dashboard as a running server: one process, on one's own machine or for a team.

In: `ServerOptions` and a socket. Out: answers, until it is stopped. Tables are made or brought up to date at the start.
"""

from __future__ import annotations

import errno
import gc
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from evsys_dashboard.settings import LOOPBACK_HOSTS, ServerOptions, configure
from evsys_sdk.errors import EvsysError, need
from evsys_sdk.files import make_folder

DEFAULT_PORT = 8000
PORTS_TRIED = 100
KEEP_ALIVE_SECONDS = 75
"""Longer than the pauses between the batches of a client, which would otherwise connect anew for each."""
TEAM_PROJECT = "main"


def load_secret(database: Path) -> str:
    """The key that signs sessions, from the file beside the database; made at the first start."""
    path = database.with_name(f"{database.stem}.key")
    make_folder(path.parent)
    try:
        # 0600 from the first moment on: a file that is closed to others only afterwards was open for a while.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = path.read_text().strip()
        if len(found) < 32:
            raise EvsysError(f"{path} is damaged; delete it (everyone then logs in again)") from None
        return found
    except OSError as exc:
        raise EvsysError(f"cannot write {path}: {exc.strerror}") from exc
    text = secrets.token_urlsafe(48)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(text + "\n")
        handle.flush()
        os.fsync(descriptor)
    return text


def names_of(host: str, public_url: str = "") -> tuple[str, ...]:
    """The Host headers that a server at this address is reached by."""
    names = [*LOOPBACK_HOSTS, f"[{host}]" if ":" in host else host]
    if host in ("0.0.0.0", "::"):
        # Addresses of this machine, as far as its name and its default route give them.
        found = []
        with suppress(OSError):  # a machine whose name has no address
            found += [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None)]
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel only says which address it would send from
            found.append(probe.getsockname()[0])
        addresses = [address.partition("%")[0] for address in found]  # without the zone of an IPv6 address
        names += [socket.gethostname(), socket.getfqdn(), *(f"[{one}]" if ":" in one else one for one in addresses)]
    if public_url:
        names.append(urlsplit(public_url).hostname or "")
    return tuple(dict.fromkeys(name.lower() for name in names if name))


def listen(host: str, port: int | None) -> socket.socket:
    """A socket on `port`; without one, on the first free port from 8000 on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [port] if port is not None else list(range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED))
    for number in wanted:
        # The protocol is named because asyncio turns Nagle's algorithm off only on a socket that says TCP. With it on,
        # the body of each answer waited 40 ms until the client had acknowledged the headers.
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            # Listening from here on, so that a browser that is quicker than Django waits instead of failing.
            found.listen(2048)
            return found
        except OSError as exc:
            found.close()
            if exc.errno != errno.EADDRINUSE:
                raise EvsysError(f"cannot listen on {host} port {number}: {exc.strerror or exc}") from exc
    if port is not None:
        raise EvsysError(f"port {port} on {host} is in use; choose another with --port, or leave --port out")
    raise EvsysError(f"ports {wanted[0]} to {wanted[-1]} on {host} are all in use; choose one with --port")


def prepare(options: ServerOptions) -> None:
    """Configure Django and bring the tables up to date."""
    need("django", extra="dashboard")
    need("uvicorn", extra="dashboard")
    need("whitenoise", extra="dashboard")
    try:
        configure(options)
    except ValueError as exc:
        raise EvsysError(str(exc)) from exc
    from django.core.management import call_command
    from django.db import DatabaseError, connection

    if connection.vendor == "sqlite":
        # For its owner alone, as the files that SQLite makes beside it then are: it has people's transcripts.
        path = Path(connection.settings_dict["NAME"])
        try:
            make_folder(path.parent)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as exc:
            raise EvsysError(f"cannot write {path}: {exc.strerror}") from exc
    try:
        call_command("migrate", verbosity=0, interactive=False)
    except DatabaseError as exc:
        place = connection.settings_dict["NAME"]
        raise EvsysError(f"the dashboard's database {place} cannot be used: {exc}") from exc


def setup_link() -> str | None:
    """On a team's server that no one has logged in to with a password yet: the path of a link for its first owner."""
    from django.contrib.auth.models import User

    from evsys_dashboard import auth
    from evsys_dashboard.models import Membership, Project

    if any(user.has_usable_password() for user in User.objects.all().only("password")):
        return None
    project = Project.objects.get_or_create(pk=TEAM_PROJECT, defaults={"name": "Main", "created": time.time()})[0]
    waiting = Membership.objects.filter(project=project, is_owner=True).select_related("user").first()
    # The link of an earlier start was perhaps never used; its owner gets a new one, and not a second account.
    return auth.make_login_link(waiting.user) if waiting else auth.invite(project, is_owner=True)


def serve(sock: socket.socket, *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    import uvicorn
    from django.conf import settings

    from evsys_dashboard.asgi import Application

    import_module(settings.ROOT_URLCONF)  # else the first client or page waits for it
    # What is loaded by now stays. Looking through it again and again for garbage took a third of the time in which a
    # batch of points is written.
    gc.freeze()

    class StoppableServer(uvicorn.Server):
        """Ends after a signal as a command that has done its work; uvicorn's own raises the signal again."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return

            def stop(_: int, __: FrameType | None) -> None:
                self.force_exit = self.should_exit  # the second Ctrl-C does not wait for open requests
                self.should_exit = True

            before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for one, handler in before.items():
                    signal.signal(one, handler)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

    application = Application()
    config = uvicorn.Config(
        application,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=3,
        ws="none",
        backlog=2048,
    )
    try:
        StoppableServer(config).run(sockets=[sock])
    finally:
        application.close()
