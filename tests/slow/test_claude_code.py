"""The real Claude Code with our plugin: its own validation, and once around the research loop.

The binary comes from the npm package and is pointed at a Messages server on loopback, which plays a scripted model: it
asks for one tool call after another. No key and no model are needed. What is checked is what reached the model (skills,
refusals of the guard, news of finished runs) and what is on disk afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = "@anthropic-ai/claude-code@2.1.327"


@pytest.fixture(scope="module")
def claude(tmp_path_factory):
    """The installed binary, with a home folder and settings of its own."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("claude")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, PACKAGE], check=True)
    package = folder / "node_modules/@anthropic-ai/claude-code"
    # npm may not run a package's own install script, which puts the binary of this platform into its place.
    subprocess.run(["node", "install.cjs"], cwd=package, check=True)
    (folder / "home").mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ANTHROPIC_", "CLAUDE"))}
    environment = kept | {
        "HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ANTHROPIC_API_KEY": "stub",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }

    def run(*words: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "node_modules/.bin/claude"), *words]
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )

    return run


@pytest.mark.parametrize("part", [".", "skills", "agents"])
def test_claude_code_finds_the_plugin_valid(claude, part):
    # Pointed at the root, which also is a marketplace, it opens no skill and no agent: hence the other two.
    done = claude("plugin", "validate", str(ROOT / part), "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


class ScriptedMessages:
    """A Messages server on loopback that answers each turn with the next tool call of a script, then with `done`."""

    def __init__(self, script: list[tuple[str, dict[str, Any]]]):
        self.script = script
        self.turns: list[dict[str, Any]] = []
        """The requests of the conversation, in order."""
        served = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None: ...

            def do_HEAD(self) -> None:
                self.send_response(200)
                self.end_headers()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for kind, data in served.answer(body):
                    self.wfile.write(f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        results = tool_results(body)
        if body.get("tools"):
            self.turns.append(body)
        step = len(results)
        usage = {"input_tokens": 1, "output_tokens": 1}
        about = {"id": f"msg_{step}", "type": "message", "role": "assistant", "model": body["model"], "content": []}
        yield "message_start", {"message": {**about, "stop_reason": None, "stop_sequence": None, "usage": usage}}
        is_tool = bool(body.get("tools")) and step < len(self.script)
        if is_tool:
            name, given = self.script[step]
            block = {"type": "tool_use", "id": f"toolu_{step}", "name": name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(given)}
        else:
            block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": "done"}
        yield "content_block_start", {"index": 0, "content_block": block}
        yield "content_block_delta", {"index": 0, "delta": delta}
        yield "content_block_stop", {"index": 0}
        reason = "tool_use" if is_tool else "end_turn"
        yield "message_delta", {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
        yield "message_stop", {}


def tool_results(body: dict[str, Any]) -> list[str]:
    """What the model was told of each tool call, as text."""
    blocks = [
        block
        for message in body["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "tool_result"
    ]
    return [block["content"] if isinstance(block["content"], str) else json.dumps(block["content"]) for block in blocks]


def test_claude_code_goes_once_around_the_loop(claude, tmp_path):
    evsys = [sys.executable, "-m", "evsys_sdk.cli.main"]
    subprocess.run([*evsys, "init-project", "lab", "--date", "20260102"], cwd=tmp_path, check=True, capture_output=True)
    lab, test = tmp_path / "lab", "data/benchmark/requests_test/tasks.jsonl"
    first, second = "experiments/20260102_first_sft/config.yaml", "experiments/20260103_more_steps/config.yaml"
    (lab / first).write_text((lab / first).read_text().replace("kind: local }", "kind: mock }"))

    def shell(command: str) -> tuple[str, dict[str, Any]]:
        return "Bash", {"command": command, "description": "one step of the loop", "timeout": 300_000}

    steps = {
        "run": shell(f"evsys run {first} --quiet"),
        "context": shell("evsys context"),
        "read test": ("Read", {"file_path": str(lab / test)}),
        "cat test": shell("cd data/benchmark && cat requests_test/tasks.jsonl"),
        "new": shell(
            "evsys new-experiment more_steps --from first_sft --date 20260103 --hypothesis 'More steps help.'"
        ),
        "edit": shell(f"sed -i 's/max_steps: 16/max_steps: 48/' {second}"),
        "validate": shell(f"evsys validate {second} --json"),
        "launch": shell(f"evsys run {second} --quiet"),
        "show": shell("evsys show 20260103_more_steps --json"),
        "rollouts": shell("evsys rollouts 20260103_more_steps --failed --no-test --limit 1"),
        "conclude": shell("evsys conclude 20260103_more_steps --text 'More steps helped; try more data.'"),
    }
    server = ScriptedMessages(list(steps.values()))
    done = claude(
        *("-p", "Improve the model.", "--plugin-dir", str(ROOT), "--allowedTools", "Bash", "Read"),
        cwd=lab,
        ANTHROPIC_BASE_URL=server.url,
    )
    server.server.shutdown()
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stdout + done.stderr
    told = dict(zip(steps, tool_results(server.turns[-1]), strict=True))

    everything = json.dumps(server.turns[0])
    for name in ("set-up-research-project", "using-the-sdk", "diagnose-experiment", "design-a-benchmark"):
        assert f"evsys:{name}" in everything
    assert "evsys:training-decider" in everything
    for step in ("read test", "cat test"):
        assert "is closed to agents" in told[step] and "task_id" not in told[step]
    assert "20260102_first_sft" in told["context"] and '"ok": true' in told["validate"].replace('\\"', '"')
    assert "Run 20260103_more_steps/lora ended: completed, val/requests" in json.dumps(server.turns[-1])

    outputs = lab / ".evsys/outputs/20260103_more_steps"
    record = json.loads((outputs / "20260103_more_steps.experiment_result.json").read_text())
    assert record["status"] == "completed" and record["parent_experiment_id"] == "20260102_first_sft"
    assert "More steps helped" in (outputs / "20260103_more_steps.notes.jsonl").read_text()
