"""`evsys dashboard`: what was tried, in a browser."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.options import json_option, verb
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_dashboard.follow import FollowedPlace

DATABASE_VARIABLE = "EVSYS_DATABASE_URL"
PUBLIC_URL_VARIABLE = "EVSYS_DASHBOARD_URL"


@verb("dashboard")
@click.option(
    "--dir", "dirs", multiple=True, metavar="DIR", help="look through this folder instead of the project's; repeatable"
)
@click.option("--port", type=int, help="where to listen (default: the first free port from 8000 on)")
@click.option(
    "--host",
    default="127.0.0.1",
    help="where to listen; beyond this machine it is a team's server, with users and keys",
)
@click.option("--no-browser", is_flag=True, help="print the link and open nothing")
@json_option
def dashboard(dirs: tuple[str, ...], port: int | None, host: str, no_browser: bool, as_json: bool) -> int:
    """Show everything that is on disk, finished or running, until Ctrl-C. The link it prints lets one browser in, once.
    With --host ADDR, the server of a team: records come over HTTP, into EVSYS_DATABASE_URL or
    .evsys/dashboard-team.sqlite."""
    from evsys_sdk.errors import EvsysError, need

    for module in ("django", "uvicorn", "whitenoise"):
        need(module, extra="dashboard")
    from evsys_dashboard.server import is_loopback, listen

    folders = [Path(folder) for folder in dirs]
    for folder in folders:
        if not folder.is_dir():
            raise EvsysError(f"--dir {folder} is not a folder")
    if folders and not is_loopback(host):
        raise EvsysError("--dir shows folders of this machine, and --host is a team's server; use one of them")
    sock = listen(host, port)
    with sock:
        if is_loopback(host):
            return serve_folder(sock, host, folders, opens_browser=not no_browser, as_json=as_json)
        return serve_team(sock, host, as_json=as_json)


def serve_folder(sock: socket.socket, host: str, folders: list[Path], *, opens_browser: bool, as_json: bool) -> int:
    """One person's own dashboard, of what lies on this machine."""
    from evsys_dashboard.server import load_secret, names_of, prepare, serve
    from evsys_dashboard.settings import ServerOptions
    from evsys_sdk.config.project import project_root
    from evsys_sdk.constants import WORKSPACE_DIR
    from evsys_sdk.history.history import DEFAULT_OUTPUTS

    root = project_root(Path.cwd())
    database = root / WORKSPACE_DIR / "dashboard.sqlite"
    secret = load_secret(database)
    prepare(ServerOptions(database_url=f"sqlite://{database}", secret_key=secret, hosts=names_of(host)))
    from evsys_dashboard.auth import local_user, make_login_link
    from evsys_dashboard.follow import FollowedPlace, Follower, project_of

    place: FollowedPlace = FollowedPlace(
        workspace=root / WORKSPACE_DIR, outputs=Path.cwd() / DEFAULT_OUTPUTS, folders=tuple(folders)
    )
    project = project_of(place, root)
    link = f"{url_of(sock, host)}{make_login_link(local_user())}?next=/p/{project.pk}/"
    follower = Follower(project, place)

    def announce() -> None:
        follower.start()
        say({"url": url_of(sock, host), "link": link, "project": project.pk}, f"dashboard: {link}", as_json=as_json)
        if opens_browser and has_display():
            import webbrowser

            webbrowser.open(link)

    try:
        serve(sock, on_ready=announce)
    finally:
        follower.stop()
    return EXIT_OK


def serve_team(sock: socket.socket, host: str, *, as_json: bool) -> int:
    """The server of a team."""
    from evsys_dashboard.server import load_secret, names_of, prepare, serve, setup_link
    from evsys_dashboard.settings import ServerOptions
    from evsys_sdk.config.project import project_root
    from evsys_sdk.constants import WORKSPACE_DIR

    database = project_root(Path.cwd()) / WORKSPACE_DIR / "dashboard-team.sqlite"
    public = os.environ.get(PUBLIC_URL_VARIABLE, "").rstrip("/")
    prepare(
        ServerOptions(
            database_url=os.environ.get(DATABASE_VARIABLE) or f"sqlite://{database}",
            secret_key=load_secret(database),
            hosts=names_of(host, public),
            is_local=False,
            public_url=public,
        )
    )
    url, setup = public or url_of(sock, host), setup_link()
    text = f"dashboard: {url}/"
    if setup is not None:
        text += f"\nfirst owner: {url}{setup} (choose a name and a password; the link works once)"
    record = {"url": url, **({"setup": f"{url}{setup}"} if setup else {})}
    serve(sock, on_ready=lambda: say(record, text, as_json=as_json))
    return EXIT_OK


def url_of(sock: socket.socket, host: str) -> str:

    # A browser cannot open 0.0.0.0 everywhere; this machine's name can be opened by others too.
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{sock.getsockname()[1]}"


def say(record: dict[str, str], text: str, *, as_json: bool) -> None:
    from evsys_sdk.files import plain_json

    print(plain_json(record) if as_json else text, flush=True)


def has_display() -> bool:
    """Whether a person sits at this terminal with a screen on which a browser can open."""
    has_screen = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return sys.stdout.isatty() and has_screen
