"""A key that something echoes reaches no file and no terminal; escape sequences reach a terminal as text only."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
import yaml

BY_VALUE = "quite-plain-value-4711"
BY_SET = "given-by-set-0815"
AS_ENV_NAME = "zz9 given as env name"
IN_URL = "pa55word-in-url"
BY_SHAPE = "sk-proj-Abc123def456ghi789"
ALL = (BY_VALUE, BY_SET, AS_ENV_NAME, IN_URL, BY_SHAPE)

HOSTILE = '''
"""Everything here fails and says too much."""
from evsys_sdk import register_verifier

KEYS = {keys!r}

@register_verifier("leaky")
def leaky(completion, expected, **params):
    if expected == "red":
        raise RuntimeError("401 for " + " and ".join(KEYS))
    return 0.0
'''


def files_with(root: Path, words: tuple[str, ...], *, besides: tuple[str, ...] = ()) -> list[str]:
    """Every file below the output, hidden ones and databases included, that holds one of the words."""
    found = []
    for path in root.rglob("*"):
        if path.is_file() and path.name not in besides:
            content = path.read_bytes()
            found += [f"{path.relative_to(root)}: {word}" for word in words if word.encode() in content]
    return found


@pytest.fixture
def hostile(project: Any, minimal_run: Any) -> Path:
    (project.root / "leaky_code.py").write_text(HOSTILE.format(keys=list(ALL)))
    project.write_tasks(fn_name="leaky")
    run = minimal_run(eval__inference={"kind": "openai", "params": {
        "model": "m", "base_url": f"http://ann:{IN_URL}@127.0.0.1:9/v1", "api_key_env": "ODD_NAME", "max_retries": 0,
    }})  # fmt: skip
    run["eval"]["n_samples"] = 2
    entry = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val", "run_every": 6}
    config = {
        "version": 1,
        "name": "leaks",
        "output_dir": "./outputs",
        "imports": ["leaky_code"],
        "callbacks": [{"kind": "local_logger"}],
        "metadata": {"benchmark": [entry], "hypothesis": f"{BY_SHAPE} works \x1b[2J"},
        "run": run,
    }
    path: Path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_key_that_is_echoed_reaches_no_file_and_no_stream(project, hostile):
    environ = {"ODD_NAME": BY_VALUE, "PYTHONPATH": str(project.root), "EVSYS_LOGGING_LEVEL": "DEBUG"}
    settings = ("--set", f"metadata.api_key={BY_SET}", "--set", f"metadata.judge_key_env={AS_ENV_NAME}")
    done = project.evsys("run", hostile, *settings, **environ)
    assert "r0: completed" in done.stdout and (project.root / "outputs/leaks.experiment_result.json").is_file()
    assert not [word for word in ALL if word in done.stdout + done.stderr]
    leaked = files_with(project.root / "outputs", ALL) + files_with(project.root / ".evsys", ALL)
    assert leaked == []
    journal = (project.root / "outputs/leaks.journal.sqlite").read_bytes()
    assert b"401 for [redacted] and [redacted]" in journal
    for verb in (
        ("show", "leaks"),
        ("rollouts", "leaks", "--limit", "0"),
        ("status", "leaks"),
        ("context",),
        ("logs", "leaks"),
    ):
        told = project.evsys(*verb, **environ)
        assert not [word for word in ALL if word in told.stdout + told.stderr]
    again = project.evsys("run", hostile, *settings, **environ)  # the same settings are the same experiment
    assert "launched with other settings" not in again.stderr


class Echo(BaseHTTPRequestHandler):
    """Refuses every request and says back what it was sent, in several ways of writing; keeps the bodies it got."""

    bodies: ClassVar[list[bytes]] = []

    def answer(self) -> None:
        Echo.bodies.append(self.rfile.read(int(self.headers.get("content-length") or 0)))
        if "/chat/completions" not in self.path:
            return self.send(200, {})
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        user = base64.b64encode(f"ann:{IN_URL}".encode()).decode()
        wrapped = "\n".join(key[start : start + 5] for start in range(0, len(key), 5))
        forms = [dict(self.headers), key, f"Authorization: Basic {user}", user, quote(key, safe=""), wrapped,
                 base64.b64encode(f"x:{key}".encode()).decode(), TENANT, NUMBER]  # fmt: skip
        self.send(400, {"error": {"message": f"refused: {forms} {json.dumps(forms)} {wrapped}", "code": key}})

    def send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = answer

    def log_message(self, *_: Any) -> None: ...


ACCESS, TENANT, NUMBER = "plain%words/of access", "tenant-name-one", 314159265358979


@pytest.fixture
def echo() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    Echo.bodies.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_what_a_server_echoes_of_a_request_reaches_no_file_no_stream_and_no_wire(project, minimal_run, echo):
    project.write_tasks()
    run = minimal_run(eval__inference={"kind": "openai", "params": {
        "model": "m", "base_url": f"http://ann:{IN_URL}@127.0.0.1:{echo}/v1", "api_key_env": "MYSVC_ACCESS",
        "max_retries": 0,
    }})  # fmt: skip
    config = {
        "version": 1,
        "name": "echoes",
        "output_dir": "./outputs",
        "callbacks": [{"kind": "local_logger"}, {"kind": "evsys_logger"}, {"kind": "csv_metrics"}],
        "metadata": {
            "benchmark": [{"name": "tools", "path": "bench/tasks.jsonl", "split": "val"}],
            "headers": {"X-Tenant": TENANT, "Accept": "text/plain"},
            "private_key": NUMBER,
            "other_key_env": "AKIAIOSFODNN7EXAMPLE",
        },
        "run": run,
    }
    path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    environ = {
        "MYSVC_ACCESS": ACCESS, "EVSYS_LOGGING_LEVEL": "DEBUG", "EVSYS_API_KEY": "dash-board-key-1",
        "EVSYS_PROJECT_ID": "p", "EVSYS_API_URL": f"http://127.0.0.1:{echo}",
        "EVSYS_LOG_DIR": str(project.root / "mirror"),
    }  # fmt: skip
    done = project.evsys("run", path, **environ)
    assert (project.root / "outputs/echoes.experiment_result.json").is_file(), done.stderr
    user = base64.b64encode(f"ann:{IN_URL}".encode()).decode()
    in_header = base64.b64encode(f"x:{ACCESS}".encode()).decode()
    words = (ACCESS, quote(ACCESS, safe=""), user, user[4:-4], IN_URL, TENANT, str(NUMBER), "AKIAIOSFODNN7EXAMPLE",
             in_header[4:-4], ACCESS[5:10] + "\n", "dash-board-key-1")  # fmt: skip
    assert not [word for word in words if word in done.stdout + done.stderr]
    assert files_with(project.root, words, besides=("config.yaml",)) == []
    sent = b"".join(Echo.bodies).decode()
    assert b"[redacted]" in (project.root / "outputs/echoes.journal.sqlite").read_bytes()
    assert "echoes" in sent and not [word for word in words if word in sent]
    for verb in (("show", "echoes"), ("rollouts", "echoes", "--limit", "0"), ("rollouts", "--json"), ("logs",)):
        told = project.evsys(*verb, **environ)
        assert not [word for word in words if word in told.stdout + told.stderr], verb


def test_a_sweep_ends_with_a_table_of_its_arms_on_a_terminal(project, minimal_run):
    project.write_tasks()
    entry = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val"}
    config = {
        "version": 1,
        "name": "sweep",
        "output_dir": "./outputs",
        "metadata": {"benchmark": [entry], "success_metric": "val/tools/pass@1"},
        "base_run": minimal_run(eval__enabled=False),
        "matrix": {"axes": {"algorithm.params.learning_rate": [1e-5, 1e-2]}},
    }
    path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    told = re.sub("\x1b\\[[0-9;]*m", "", on_a_terminal(project, "run", str(path)))
    head, best, base = next(
        told.splitlines()[place : place + 3] for place, line in enumerate(told.splitlines()) if "vs baseline" in line
    )
    assert head.split() == ["arm", "pass@1", "[95", "%", "CI]", "vs", "baseline", "verdict", "seeds"]
    assert best.split()[:5] == ["*", "r0__learning_rate0p01", "1.000", "[0.510,", "1.000],"] and "+100.0 points" in best
    assert base.split()[:4] == ["r0__learning_rate1e-05", "0.000", "[0.000,", "0.490],"] and "baseline" in base
    assert "* best arm" in told and "next: evsys show sweep" in told


def on_a_terminal(project: Any, *arguments: str) -> str:
    """What the command writes to a terminal of its own."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "evsys_sdk.cli.main", *arguments],
        cwd=project.root, stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    process.wait(timeout=300)
    return shown.decode(errors="replace")


CLEAR = "\x1b[2J\x1b]0;owned\x07"


def test_escape_sequences_of_others_reach_a_terminal_as_text(project, minimal_run):
    rows = [{"prompt": f"say {word}", "completion": f"{CLEAR}{word}"} for word in ("red", "blue")] * 12
    project.write_rows("data/train.jsonl", rows)
    task = {"task_id": f"red{CLEAR}", "instruction": f"say {CLEAR} red", "metadata": {"kind": CLEAR},
            "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": f"{CLEAR}red"}}  # fmt: skip
    project.write_rows("bench/tasks.jsonl", [task])
    entry = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val", "breakdown_keys": ["kind"]}
    config = {
        "version": 1,
        "name": "escapes",
        "output_dir": "./outputs",
        "metadata": {"benchmark": [entry], "hypothesis": f"it works {CLEAR}", "tags": [CLEAR]},
        "run": minimal_run(eval__enabled=False, algorithm__params__num_epochs=12),
    }
    path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    attacks = ("\x1b[2J", "\x1b]0;", "\x07")
    for verb in (("run", str(path)), ("show",), ("rollouts",), ("rollouts", "--json"), ("history",), ("context",),
                 ("status", "escapes"), ("logs", "escapes"), ("data", "preview", "data/train.jsonl"),
                 ("rollouts", "--task", CLEAR), ("run", f"no{CLEAR}such.yaml"), (f"ve{CLEAR}rb",)):  # fmt: skip
        told = on_a_terminal(project, *verb)
        assert not [attack for attack in attacks if attack in told], verb
    assert "\\u001b[2J\\u001b]0;owned\\u0007red" in on_a_terminal(project, "rollouts")


DRIVES_A_TERMINAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HOSTILE_TEXT = (
    f"{CLEAR}\x9b31m\u202e\x85 [red]bad[/red] <script>x()</script> ![p](http://e.example/p.png) [l](http://e)"
)


def test_files_that_people_print_drive_no_terminal_and_no_browser(project, minimal_run):
    """Every file that a run and its loggers leave, but for databases, weights and pictures."""
    task = {"task_id": f"red {HOSTILE_TEXT}", "instruction": f"say {HOSTILE_TEXT} red",
            "metadata": {"kind": HOSTILE_TEXT},
            "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": "red"}}  # fmt: skip
    project.write_rows("bench/tasks.jsonl", [task, {**task, "task_id": "b", "verifier": {
        "kind": "in_process", "fn_name": "shouts", "expected": "red"}}])  # fmt: skip
    (project.root / "shouting.py").write_text(
        "from evsys_sdk import register_verifier\n\n"
        f"@register_verifier('shouts')\ndef shouts(completion, expected, **params):\n"
        f"    raise RuntimeError({HOSTILE_TEXT!r})\n"
    )
    entry = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val", "breakdown_keys": ["kind"]}
    config = {
        "version": 1,
        "name": "pages",
        "output_dir": "./outputs",
        "imports": ["shouting"],
        "description": f"What we try.\n\n# Verdict\n> quoted {HOSTILE_TEXT}\n[l]: http://e.example\n",
        "callbacks": [{"kind": "local_logger"}, {"kind": "csv_metrics"}],
        "metadata": {
            "benchmark": [entry],
            "hypothesis": f"it works {HOSTILE_TEXT}\n## Scores\n",
            "tags": [HOSTILE_TEXT],
            "success_metric": "val/tools/pass@1",
        },
        "base_run": minimal_run(eval__enabled=False),
        "matrix": {"axes": {"algorithm.params.learning_rate": [1e-5, 1e-2]}},
    }
    path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    done = project.evsys("run", path, PYTHONPATH=str(project.root))
    page = (project.root / "outputs/pages.experiment.md").read_text()
    read = 0
    for file in (project.root / "outputs").rglob("*"):
        if file.is_file() and file.suffix in (".md", ".csv", ".json", ".jsonl", ".svg", ".log", ".txt", ".yaml"):
            read += 1
            assert not DRIVES_A_TERMINAL.search(file.read_text()), file
        if file.suffix == ".md":
            assert "<script>" not in file.read_text() and "](http" not in file.read_text(), file
    assert read > 10 and not DRIVES_A_TERMINAL.search(done.stdout + done.stderr)
    assert "\\u001b[2J" in page and "[red]bad[/red] &lt;script>x()&lt;/script> !\\[p]\\(http://e.example/p.png)" in page
    headings = re.findall("(?m)^## .*", page)
    assert "\\# Verdict" in page and "\\## Scores" in page and len(headings) == len(set(headings))
    assert not re.search(r"(?m)^(>|\[l\]:)", page)
    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", on_a_terminal(project, "rollouts", "pages"))
    assert "[red]bad[/red]" in shown
