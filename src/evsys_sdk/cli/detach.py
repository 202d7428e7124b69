"""`evsys run --detach`: the same command in a process of its own.

In: a command line. Out: the launch record, as soon as that process has the experiment; or what it said when it was
refused, and its exit code. It is in a session of its own: neither a closed terminal nor the end of this process
reaches it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evsys_sdk.cli.experiments import short
from evsys_sdk.constants import ENV_LAUNCH_FD, EXIT_OK, EXIT_RUN_FAILED


def run_detached(argv: Sequence[str], *, as_json: bool) -> int:
    """Start `evsys` with these words and wait until it is launched, or has ended."""
    reader, writer = os.pipe()
    # -P: as for the `evsys` script, the current folder is no place to import from.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "evsys_sdk.cli.main", *argv],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[writer],
        env={**os.environ, ENV_LAUNCH_FD: str(writer)},
    )
    os.close(writer)
    try:
        from evsys_sdk.record.launch_record import reference_of  # while the other process starts

        with os.fdopen(reader) as news:
            told = news.read()
    except KeyboardInterrupt:
        child.terminate()
        raise
    if not told and child.wait() > 0:
        return child.returncode
    if not told:
        print(f"the process ended before it was launched (signal {-child.returncode})", file=sys.stderr)
        return EXIT_RUN_FAILED
    launch = json.loads(told)
    _print(launch, reference_of(launch["experiment"], Path(launch["record"])), as_json=as_json)
    return EXIT_OK


def starter_of_this() -> int | None:
    """The descriptor that a detached process was given; None for any other. What it starts itself is not given it."""
    told = os.environ.pop(ENV_LAUNCH_FD, None)
    if told is None:
        return None
    os.set_inheritable(int(told), False)
    return int(told)


def _print(launch: dict[str, Any], ref: str, *, as_json: bool) -> None:
    from evsys_sdk.cli.data import print_json

    if as_json:
        print_json(launch)
        return
    print(f"{launch['experiment']}: launched as process {launch['pid']}")
    if launch["log"]:
        print(f"log: {short(Path(launch['log']))}")
    print(f"next: evsys status {ref}, evsys logs {ref} -f, evsys stop {ref}")
