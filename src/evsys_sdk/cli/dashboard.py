"""`evsys dashboard`: what was tried, in a browser; `evsys query`: by SQL; `evsys sync`: sent to a server."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evsys_sdk.cli.options import PORT, json_option, verb
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_dashboard.follow import Follower

DATABASE_VARIABLE = "EVSYS_DATABASE_URL"
PUBLIC_URL_VARIABLE = "EVSYS_DASHBOARD_URL"
LOOPBACK = "127.0.0.1"


@verb("dashboard")
@click.option(
    "--dir", "dirs", multiple=True, metavar="DIR", help="look through this folder instead of the project's; repeatable"
)
@click.option("--port", type=PORT, help="where to listen (default: the first free port from 8000 on)")
@click.option(
    "--host",
    metavar="ADDR",
    help="the server of a team, with users and keys, on this address (0.0.0.0: all; 127.0.0.1: behind a proxy here)",
)
@click.option("--no-browser", is_flag=True, help="print the link and open nothing")
@json_option
def dashboard(dirs: tuple[str, ...], port: int | None, host: str | None, no_browser: bool, as_json: bool) -> int:
    """Show everything that is on disk, finished or running, until Ctrl-C. The link it prints lets one browser in, once.
    With --host ADDR, the server of a team: records come over HTTP, into EVSYS_DATABASE_URL or
    .evsys/dashboard-team.sqlite."""
    from evsys_sdk.errors import EvsysError, need
    from evsys_sdk.logs import get_logger

    for module in ("django", "uvicorn", "whitenoise"):
        need(module, extra="dashboard")
    from evsys_dashboard.server import listen

    folders = [Path(folder) for folder in dirs]
    for folder in folders:
        if not folder.is_dir():
            raise EvsysError(f"--dir {folder} is not a folder")
    if folders and host is not None:
        raise EvsysError("--dir shows folders of this machine, and --host is a team's server; use one of them")
    with listen(host or LOOPBACK, port) as sock:
        # Any address makes it a team's server, 127.0.0.1 too: a proxy in front of it lets others in.
        if host is not None:
            return serve_team(sock, host, as_json=as_json)
        if os.environ.get(DATABASE_VARIABLE):
            text = "%s is for the server of a team (--host); the dashboard of this folder keeps its own database"
            get_logger(__name__).warning(text, DATABASE_VARIABLE)
        return serve_folder(sock, LOOPBACK, folders, opens_browser=not no_browser, as_json=as_json)


def serve_folder(sock: socket.socket, host: str, folders: list[Path], *, opens_browser: bool, as_json: bool) -> int:
    """One person's own dashboard, of what lies on this machine."""
    from evsys_dashboard.server import serve

    follower = open_folder(host, folders)
    project = follower.project
    from evsys_dashboard.auth import local_user, make_login_link

    link = f"{url_of(sock, host)}{make_login_link(local_user())}?next=/p/{project.pk}/"

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


def open_folder(host: str, folders: list[Path]) -> Follower:
    """The database of this folder's dashboard, and what brings it up to date."""
    from evsys_dashboard.server import load_secret, names_of, prepare
    from evsys_dashboard.settings import ServerOptions
    from evsys_sdk.config.project import project_root
    from evsys_sdk.constants import WORKSPACE_DIR
    from evsys_sdk.history.history import DEFAULT_OUTPUTS

    root = project_root(Path.cwd())
    database = root / WORKSPACE_DIR / "dashboard.sqlite"
    secret = load_secret(database)
    prepare(ServerOptions(database_url=f"sqlite://{database}", secret_key=secret, hosts=names_of(host)))
    from evsys_dashboard.follow import FollowedSource, Follower, project_of

    place = FollowedSource(workspace=root / WORKSPACE_DIR, outputs=Path.cwd() / DEFAULT_OUTPUTS, folders=tuple(folders))
    return Follower(project_of(place, root), place)


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


VIEW_HELP = "Views: experiments, runs, evals, metrics, rollouts (docs/dashboard.md has their columns)."


@verb("query", epilog=f"{VIEW_HELP} At most 5 s, 10,000 rows and 8 MB.")
@click.argument("sql", help="one SELECT")
@json_option
def query(sql: str, as_json: bool) -> int:
    """Ask the dashboard by SQL, read-only: the one that EVSYS_API_URL, EVSYS_API_KEY and EVSYS_PROJECT_ID name, else
    the database of this folder, which is brought up to date first."""
    from evsys_sdk.cli.output import print_json, print_table
    from evsys_sdk.data.remote import DashboardSource

    source = DashboardSource.from_environment()
    found = source.query(sql) if source else query_folder(sql)
    if as_json:
        print_json(found)
        return EXIT_OK
    texts = [["" if value is None else str(value) for value in row] for row in found["rows"]]
    if texts:
        print_table(found["columns"], texts)
    note = "; more were left out" if found["truncated"] else ""
    print(f"({len(texts)} row{'' if len(texts) == 1 else 's'}{note})")
    return EXIT_OK


def query_folder(sql: str) -> dict[str, Any]:
    """Run the SQL on this folder's own database."""
    from evsys_sdk.errors import EvsysError, need

    need("django", extra="dashboard")
    follower = open_folder(LOOPBACK, [])
    follower.update_all()
    from evsys_dashboard.api.query import QueryRefused, run_query

    try:
        found = run_query(follower.project.pk, sql, hide_test=False)
    except QueryRefused as exc:
        raise EvsysError(f"sql: {exc}") from None
    return asdict(found)


@verb("sync", epilog="Exit codes: 0 the server has every session, 1 bad input, 2 something was rejected or not sent.")
@click.option("--to", "url", metavar="URL", help="the server (default: EVSYS_API_URL)")
@click.option("--mirror", metavar="DIR", help="the mirror's folder (default: EVSYS_LOG_DIR, else .evsys/mirror)")
@click.option("--all", "anew", is_flag=True, help="send again what this server had taken: it lost its database")
@json_option
def sync(url: str | None, mirror: str | None, anew: bool, as_json: bool) -> int:
    """Replay the mirror into a server: sessions that were written offline, that another server has, or that were not
    sent to the end. Sending twice changes nothing, so this is the backup, and the move to another server or database.
    EVSYS_API_KEY and EVSYS_PROJECT_ID name the key and the project there."""
    from evsys_sdk.cli.output import print_json, short_path
    from evsys_sdk.constants import DEFAULT_LOG_DIR, ENV_API_URL, ENV_LOG_DIR, ENV_OFFLINE, EXIT_RUN_FAILED
    from evsys_sdk.data.remote import DashboardSource
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.record.dashboard.sender import Transport
    from evsys_sdk.record.dashboard.sync import find_sessions, sync_sessions

    target = DashboardSource.required({**os.environ, ENV_OFFLINE: "", **({ENV_API_URL: url} if url else {})})
    folder = Path(mirror or os.environ.get(ENV_LOG_DIR) or DEFAULT_LOG_DIR)
    if not folder.is_dir():
        raise EvsysError(f"{folder}: no such mirror folder; name it with --mirror DIR")
    sessions = find_sessions(folder)
    transport = Transport(target.api_url, target.api_key, target.project_id, timeout_seconds=60.0)
    found = []
    for one in sync_sessions(sessions, transport, project_id=target.project_id, anew=anew):
        found.append(one)
        if not as_json:
            counts = f"{one.records:,} records" + (f", {one.rejected:,} rejected" if one.rejected else "")
            print(
                f"{one.state}: {short_path(one.path)}" + (f" ({one.why or counts})" if one.state != "unchanged" else "")
            )
    left = len(sessions) - len(found)
    if as_json:
        print_json({"sessions": [{**asdict(one), "path": str(one.path)} for one in found], "not_tried": left})
    elif not sessions:
        print(f"{short_path(folder)} has no session")
    elif left:
        print(f"{left} more sessions were not tried")
    return EXIT_OK if not left and all(one.is_complete for one in found) else EXIT_RUN_FAILED
