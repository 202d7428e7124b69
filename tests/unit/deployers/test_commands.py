"""`ollama` and `fireworks`: their programs are called as their documents say, and what answers is compared."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from tests.unit.deployers.stubs import StubServer

from evsys_sdk.config.base import DeploySpec
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import build_deployer, deploy_artifact, find_shipped_run, make_artifact

pytest.importorskip("torch", reason="the local backend needs torch")

PROGRAM = """
import json, os, sys
with open({log!r}, "a") as file:
    file.write(json.dumps({{"words": sys.argv[1:], "cwd": os.getcwd(), "host": os.environ.get("OLLAMA_HOST")}}) + "\\n")
"""


@pytest.fixture(scope="module")
def artifact(tiny_trained):
    return make_artifact(tiny_trained.record, find_shipped_run(tiny_trained.record, tiny_trained.path))


class Program:
    """A stand-in for a target's program: it notes how it was called."""

    def __init__(self, folder):
        self.log, file = folder / "calls.jsonl", folder / "program.py"
        file.write_text(PROGRAM.format(log=str(self.log)))
        self.command = f"{sys.executable} {file}"

    @property
    def calls(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def ship(artifact, spec, place):
    return deploy_artifact(artifact, build_deployer(spec), spec, place / "x.experiment_result.json")


def ollama(artifact, program, *, wrong=False):
    """Ollama's HTTP routes: the models that its program made, and greedy completions."""

    def answer(method, path, body):
        if path == "/api/tags":
            digests = {"tiny": "tiny"}
            for words in (call["words"] for call in program.calls):
                if words[0] == "create":
                    digests[words[1]] = f"digest of {words[1]}"
                elif words[0] == "cp":
                    digests[words[2]] = digests[words[1]]
                else:
                    del digests[words[1]]
            return 200, {"models": [{"name": f"{name}:latest", "digest": one} for name, one in digests.items()]}
        assert path == "/api/generate" and body["raw"] and body["options"]["temperature"] == 0
        case = next(case for case in artifact.fingerprint.cases if case.text == body["prompt"])
        return 200, {"response": "something else" if wrong else case.greedy}

    return StubServer(answer)


def ollama_spec(stub, program, place, **more):
    params = {"url": stub.url, "command": program.command, "base": "tiny", "base_model": "tiny-random",
              "path": str(place / "models"), "alias_file": str(place / "alias.json"), **more}  # fmt: skip
    return DeploySpec(kind="ollama", params=params)


def test_ollama_gets_a_modelfile_and_its_completions_are_compared(artifact, tmp_path):
    program = Program(tmp_path)
    with ollama(artifact, program).running() as stub:
        spec = ollama_spec(stub, program, tmp_path)
        done = ship(artifact, spec, tmp_path)
        assert done.state == "deployed" and done.probe.compared == "tokens"
        assert "because it gives no log probabilities" in done.line
        assert ship(artifact, spec, tmp_path).state == "unchanged"
    create, copy = program.calls
    assert create["words"] == ["create", artifact.name, "-f", "Modelfile"] and create["host"] == stub.url
    assert create["cwd"] == str(tmp_path / "models" / artifact.name)
    assert (tmp_path / "models" / artifact.name / "Modelfile").read_text() == "FROM tiny\nADAPTER ./adapter.gguf\n"
    assert (tmp_path / "models" / artifact.name / "adapter.gguf").stat().st_size > 1000
    assert copy["words"] == ["cp", artifact.name, "policy"]


def test_an_ollama_alias_that_moved_without_a_note_is_deployed_again(artifact, tmp_path):
    program = Program(tmp_path)
    with ollama(artifact, program).running() as stub:
        spec = ollama_spec(stub, program, tmp_path)
        ship(artifact, spec, tmp_path)
        noted = (tmp_path / "alias.json").read_text()
        ship(replace(artifact, name="say-yes-other", digest="0" * 64), spec, tmp_path)
        (tmp_path / "alias.json").write_text(noted)  # as if killed between `cp` and the note
        again = ship(artifact, spec, tmp_path)
    assert again.state == "deployed", "the note names these weights, and the alias answers with others"
    assert program.calls[-1]["words"] == ["cp", artifact.name, "policy"]
    assert "rm" not in [call["words"][0] for call in program.calls], "the alias is never without a model"


def test_ollama_with_other_answers_is_rolled_back(artifact, tmp_path):
    program = Program(tmp_path)
    with ollama(artifact, program, wrong=True).running() as stub:
        done = ship(artifact, ollama_spec(stub, program, tmp_path), tmp_path)
    assert done.state == "rolled back" and "'something else'" in done.probe.detail
    assert [call["words"][0] for call in program.calls] == ["create", "rm"]


def test_ollama_refuses_another_base_model_and_a_missing_program(artifact, tmp_path):
    program = Program(tmp_path)
    with ollama(artifact, program).running() as stub:
        with pytest.raises(EvsysError, match="base_model is 'qwen', and the adapter was trained over 'tiny-random'"):
            ship(artifact, ollama_spec(stub, program, tmp_path, base_model="qwen"), tmp_path)
        with pytest.raises(EvsysError, match="has no model 'other'; try: ollama pull other"):
            ship(artifact, ollama_spec(stub, program, tmp_path, base="other"), tmp_path)
        with pytest.raises(EvsysError, match="the program no-such-ollama is not installed"):
            ship(artifact, ollama_spec(stub, program, tmp_path, command="no-such-ollama"), tmp_path)


def test_fireworks_is_given_the_adapter_and_asked_by_its_model_path(artifact, tmp_path, monkeypatch):
    monkeypatch.setenv("FIREWORKS_API_KEY", "fw-key-for-tests-only")
    program = Program(tmp_path)

    def answer(method, path, body):
        assert path == "/v1/completions" and body["model"].startswith("accounts/me/models/say-yes-")
        case = next(case for case in artifact.fingerprint.cases if list(case.tokens) == body["prompt"])
        return 200, {"choices": [{"logprobs": {"token_logprobs": [None, *case.logprobs, -1.0]}}]}

    with StubServer(answer).running() as stub:
        params = {"account": "me", "deployment": "d1", "base_model": "accounts/fireworks/models/tiny",
                  "trained_over": "tiny-random", "path": str(tmp_path / "up"), "url": stub.url,
                  "alias_file": str(tmp_path / "alias.json"), "command": program.command}  # fmt: skip
        spec = DeploySpec(kind="fireworks", params=params)
        done = ship(artifact, spec, tmp_path)
        assert done.state == "deployed" and done.probe.compared == "logprobs"
        assert stub.headers[0]["authorization"] == "Bearer fw-key-for-tests-only"
        second = ship(replace(artifact, name="say-yes-other", digest="0" * 64), spec, tmp_path)
        assert second.replaced == artifact.name
    words = [call["words"] for call in program.calls]
    folder = str(tmp_path / "up" / artifact.name)
    assert words[0] == ["model", "create", artifact.name, folder, "--base-model", "accounts/fireworks/models/tiny"]
    assert words[1] == ["model", "load-lora", artifact.name, "--deployment", "d1", "--wait"]
    assert words[-1] == ["model", "unload-lora", artifact.name, "--deployment", "d1"]
    alias = json.loads((tmp_path / "alias.json").read_text())
    assert alias["request"]["model"] == "accounts/me/models/say-yes-other"
    assert "fw-key" not in (tmp_path / "x.deployments.jsonl").read_text()
