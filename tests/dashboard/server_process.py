"""A dashboard server for tests, as a process of its own: `python server_process.py '{"database_url": ..., ...}'`.

It makes the projects, prints a line of JSON (port, a key per project) and serves until it is ended. With `keys`, the
database is one that an earlier process made.
"""

from __future__ import annotations

import json
import sys
import time


def main(text: str) -> None:
    given = json.loads(text)
    from evsys_dashboard.server import listen, prepare, serve
    from evsys_dashboard.settings import ServerOptions

    sock = listen("127.0.0.1", given.get("port", 0))
    prepare(
        ServerOptions(
            database_url=given["database_url"],
            secret_key="x" * 40,
            hosts=("127.0.0.1",),
            is_local=given.get("local", True),
        )
    )
    from evsys_dashboard.auth import local_user, make_key, make_login_link
    from evsys_dashboard.models import Project

    keys = given.get("keys")
    if keys is None:
        keys = {}
        for name in given.get("projects", ["p1"]):
            project = Project.objects.create(pk=name, name=name, created=time.time())
            keys[name] = make_key(project, "test", "write")[1]
    link = make_login_link(local_user()) if given.get("local", True) else ""
    ready = json.dumps({"port": sock.getsockname()[1], "keys": keys, "link": link})
    serve(sock, on_ready=lambda: print(ready, flush=True))


if __name__ == "__main__":
    main(sys.argv[1])
