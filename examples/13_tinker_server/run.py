"""Start our Tinker-protocol server on this machine, train over it, and stop it: config.yaml, with the server's address.

The server is a separate process, as it would be on another machine: the run sees nothing of it but its address.
"""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from evsys_sdk import Experiment, load_yaml

CONFIG = Path(__file__).resolve().parent / "config.yaml"


@contextmanager
def tinker_server(model):
    """The address of `evsys engine serve` on a free port."""
    evsys = [sys.executable, "-m", "evsys_sdk.cli.main"]
    with subprocess.Popen([*evsys, "engine", "serve", "--model", model, "--json"], stdout=subprocess.PIPE) as server:
        try:
            yield json.loads(server.stdout.readline())["url"]  # the one line that it prints when it is ready
        finally:
            server.terminate()


def run(*overrides):
    """`overrides` are those of `evsys run --set`."""
    model = load_yaml(CONFIG, overrides=overrides).run.model.name
    with tinker_server(model) as url:
        at = f"run.backend.params.base_url={url}"
        return Experiment.from_yaml(CONFIG, overrides=[*overrides, at]).run()


if __name__ == "__main__":
    print(run(*sys.argv[1:]).conclusion.text)
