"""The pages that walk through a whole sitting: their commands run as printed, and print the lines that they show.

All `bash` blocks of a page are one shell session in an empty folder, into which the blocks that begin `# file: name`
are written first. Every line of a `text` block must be among what the session printed, up to "..." on the page.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def session(page: Path, folder: Path) -> str:
    """Run the page; returns what its commands printed."""
    text = page.read_text().replace("/path/to/evsys-sdk", str(ROOT))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        text = text.replace("8765", str(free.getsockname()[1]))
    lines = ["set -euo pipefail"]
    for language, block in BLOCK.findall(text):
        named = re.match(r"# file: (\S+)\n", block)
        if named:
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
        elif language == "bash":
            lines.append(block)
    own = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": own, "EVSYS_OFFLINE": "1", "COLUMNS": "400"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=folder, env=environ, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["tutorial", "walkthrough"])
def test_a_walk_prints_what_its_page_shows(name, tmp_path):
    page = ROOT / f"docs/{name}.md"
    said = session(page, tmp_path)
    shown = [
        line for language, block in BLOCK.findall(page.read_text()) if language == "text" for line in block.splitlines()
    ]
    assert len(shown) >= 8
    for line in shown:
        for part in line.split("..."):
            assert part.strip() in said, f"{page.name} shows {line!r}; the session printed:\n{said}"
