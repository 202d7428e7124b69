"""`evsys serve`: what it takes for a model, a run or weights, what it refuses, and a trained run that answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
import requests

from evsys_engine.http import HttpRequest
from evsys_sdk import run_experiment
from evsys_sdk.cli.main import main, parse
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import digest_weights

pytest.importorskip("uvicorn", reason="the endpoint needs uvicorn")

ROWS = [{"prompt": "say yes", "completion": "yes"}] * 4


class Opened(Exception):
    """`evsys serve` has come to opening the model; the argument is the target."""


def target(*words):
    """What `evsys serve` would open for these words."""

    def open_model(found):
        raise Opened(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evsys_sdk.run.open_model.open_model", open_model)
        with parse(["serve", *map(str, words)]) as ctx, pytest.raises(Opened) as opened:
            ctx.command.invoke(ctx)
    return opened.value.args[0]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """An experiment of one run on the mock that has learnt to say yes."""
    folder = tmp_path_factory.mktemp("serve")
    config = {
        "name": "yes",
        "output_dir": str(folder),
        "run": {
            "name": "r0",
            "data": {"source_kind": "in_memory", "rows": ROWS, "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "table"},
            "algorithm": {"kind": "sft", "params": {"max_steps": 30, "batch_size": 4, "learning_rate": 0.5}},
            "backend": {"kind": "mock", "params": {"latency_ms": 0}},
        },
    }
    result = run_experiment(config)[0]
    assert result.status == "completed", result.error
    return result


@pytest.fixture
def run_dir(experiment):
    return str(experiment.run_dir)


def test_a_run_is_served_as_its_record_says(experiment, run_dir):
    found = target(run_dir)
    assert (found.name, found.model, found.backend, found.backend_params) == ("r0", "table", "mock", {"latency_ms": 0})
    assert found.checkpoint == experiment.artifacts["final_sampler"]


def test_weights_in_a_run_know_their_model_and_backend(experiment, run_dir):
    found = target(experiment.artifacts["final_sampler"], "--name", "mine", "--set", "latency_ms=3")
    assert found.checkpoint == experiment.artifacts["final_sampler"]
    assert (found.name, found.model, found.backend, found.backend_params) == (
        "mine",
        "table",
        "mock",
        {"latency_ms": 3},
    )


def test_a_name_is_a_model_and_weights_elsewhere_name_theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (target("tiny-random").model, target("tiny-random").backend) == ("tiny-random", "local")
    assert target("org/name", "--backend", "mock").name == "name"
    moved = tmp_path / "moved"
    moved.mkdir()
    found = target("moved", "--model", "tiny-random")
    assert (found.checkpoint, found.model, found.backend) == (str(moved), "tiny-random", "local")
    hosted = target("tinker://abc/sampler_weights/final", "--model", "org/name")
    assert (hosted.checkpoint, hosted.backend) == ("tinker://abc/sampler_weights/final", "tinker")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/thing"], "no such file or directory"),
        (["tinker://abc/weights"], "--model"),
        (["{folder}"], "neither a run .* nor a model"),
        (["{experiment}"], "is an experiment; name one of its runs: .*r0"),
        (["{run}", "--backend", "local"], "made on backend 'mock'"),
        (["m", "--set", "latency"], "param=value"),
    ],
)
def test_what_cannot_be_served_says_why(run_dir, tmp_path, words, message):
    places = {"folder": tmp_path, "run": run_dir, "experiment": os.path.dirname(run_dir)}
    with pytest.raises(EvsysError, match=message):
        target(*(word.format(**places) for word in words))


def test_a_run_without_weights_says_so(tmp_path):
    record = {"run": "r0", "status": "failed", "hparams": {"model": {"name": "m"}}, "artifacts": {}}
    (tmp_path / "run_result.json").write_text(json.dumps(record))
    with pytest.raises(EvsysError, match=r"this run \(failed\) left no weights"):
        target(tmp_path)
    (tmp_path / "run_result.json").write_text("{half")
    with pytest.raises(EvsysError, match=r"run_result\.json cannot be read: Expecting property name"):
        target(tmp_path)


def test_a_wide_address_needs_a_key_and_a_named_key_must_be_there(capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert main(["serve", "m", "--backend", "mock", "--host", "0.0.0.0"]) == 1
    assert "give a key" in capsys.readouterr().err
    assert main(["serve", "m", "--backend", "mock", "--api-key-env", "NO_SUCH_KEY"]) == 1
    assert "NO_SUCH_KEY" in capsys.readouterr().err
    assert main(["serve", "m", "--backend", "mokc"]) == 1
    assert "closest: mock" in capsys.readouterr().err


def begin(*words, folder=None, **environ):
    command = [sys.executable, "-m", "evsys_sdk.cli.main", "serve", *map(str, words)]
    environ = {**os.environ, **environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environ)


def end(process):
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(300)
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()


def ask(url, **options):
    body = {"model": "r0", "messages": [{"role": "user", "content": "say yes"}], "temperature": 0, "max_tokens": 8}
    return requests.post(f"{url}/chat/completions", json=body, timeout=300, **options)


def test_a_trained_run_answers_until_it_is_stopped(run_dir):
    process = begin(run_dir, "--json")
    try:
        told = json.loads(process.stdout.readline())
        answer = ask(told["base_url"]).json()
    finally:
        code = end(process)
    assert answer["choices"][0]["message"]["content"] == "yes" and told["model"] == "r0" and told["backend"] == "mock"
    assert code == 0


def test_the_printed_curl_line_works_and_the_key_is_asked_for(run_dir):
    process = begin(run_dir, "--api-key-env", "MY_SERVE_KEY", MY_SERVE_KEY="s3cret")
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        url = first.split()[-1]
        refused = ask(url).status_code
        line = second.removeprefix("try: ").strip()
        curl = subprocess.run(
            ["sh", "-c", f"{line} --silent"],
            env={**os.environ, "MY_SERVE_KEY": "s3cret"},
            capture_output=True,
            timeout=30,
        )
    finally:
        end(process)
    assert refused == 401 and "s3cret" not in first + second
    if curl.returncode != 127:  # curl itself is not everywhere
        assert json.loads(curl.stdout)["object"] == "chat.completion"


ADMIN = {"Authorization": "Bearer admin-key-for-tests-only"}


@pytest.fixture
def policy(tmp_path):
    """Servers with admin routes, begun in one folder; `policy()` kills the last one and begins the next."""
    begun = []

    def kill():
        begun[-1].kill()  # SIGKILL
        begun[-1].wait(300)

    def start(*words):
        if begun:
            kill()
        words = (*(words or ("table",)), "--backend", "mock", "--name", "policy", "--admin-key-env", "K")
        begun.append(begin(*words, folder=tmp_path, K="admin-key-for-tests-only"))
        line = begun[-1].stdout.readline()
        return line.split()[-1].removesuffix("/v1") if line else begun[-1].stderr.read()

    yield start
    kill()
    for process in begun:
        process.stdout.close()
        process.stderr.close()


def deploy_by_hand(url, run):
    """What the deployer `serve` asks of a server: load, switch, unload."""
    weights = target(run.run_dir)
    body = {"name": "yes-1", "path": weights.checkpoint, "base_model": "table", "digest": digest_weights(weights)}
    first = admin(url)["models"][0]["name"]
    for route, sent in [("models", body), ("aliases", {"alias": "policy", "name": "yes-1"})]:
        assert requests.post(f"{url}/admin/{route}", json=sent, headers=ADMIN, timeout=300).status_code == 200
    assert requests.delete(f"{url}/admin/models/{first}", headers=ADMIN, timeout=300).status_code == 200
    return body["digest"]


def admin(url):
    return requests.get(f"{url}/admin/models", headers=ADMIN, timeout=300).json()


def answer_of(url):
    body = {"model": "policy", "messages": [{"role": "user", "content": "say yes"}], "temperature": 0, "max_tokens": 8}
    return requests.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()


def test_a_killed_server_begins_again_with_what_was_deployed(policy, experiment, tmp_path):
    url = policy()
    assert answer_of(url)["choices"][0]["message"]["content"] != "yes"
    digest = deploy_by_hand(url, experiment)
    before = admin(url)
    url = policy()
    answer = answer_of(url)
    assert answer["choices"][0]["message"]["content"] == "yes" and answer["system_fingerprint"] == digest
    assert admin(url) == before == {
        "base_model": "table", "models": [{"name": "yes-1", "digest": digest}], "aliases": {"policy": "yes-1"},
    }  # fmt: skip
    url = policy(experiment.run_dir)
    assert answer_of(url)["model"] == "policy" and admin(url)["models"][0]["name"].startswith("policy-"), (
        "other weights on the command line: another server"
    )


def test_deployed_weights_that_are_gone_stop_the_server_with_the_reason(policy, experiment, tmp_path):
    deploy_by_hand(policy(), experiment)
    file = tmp_path / ".evsys" / "serve" / "policy.json"
    state = json.loads(file.read_text())
    state["models"][0]["path"] = str(tmp_path / "gone")
    file.write_text(json.dumps(state))
    said = policy()
    assert "policy was served by yes-1, which cannot be loaded again" in said
    assert "delete .evsys/serve/policy.json to begin with those of the command line" in said
    file.write_text("{half")
    assert "cannot be read; delete it to begin anew" in policy()
    file.unlink()
    assert "yes-1" not in str(admin(policy()))


def test_one_name_is_served_by_one_server(policy, tmp_path):
    policy()
    second = begin(
        "table", "--backend", "mock", "--name", "policy", "--admin-key-env", "K", folder=tmp_path, K="key-two"
    )
    _, said = second.communicate(timeout=300)
    assert second.returncode == 1 and "is in use by process" in said and "give this server another --name" in said


@pytest.fixture
def served(monkeypatch):
    """`served(*words)`: the answer to one question of what the command serves, asked in this process."""
    from evsys_sdk import serving

    def ask_once(*words):
        told = {}

        def one_question(make, address, *, on_ready):
            async def main():
                endpoint = await make()
                on_ready(serving.RunningEndpoint("http://127.0.0.1:1", endpoint))
                name, model = next(iter(endpoint.models.items()))
                messages = [{"role": "user", "content": "hi"}]
                body = {"model": name, "messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True}
                answer = await endpoint(HttpRequest("POST", "/v1/chat/completions", {}, json.dumps(body).encode()))
                told.update(json.loads(answer.body), context_length=model.context_length)

            asyncio.run(main())

        monkeypatch.setattr(serving, "serve", one_question)
        assert main(["serve", *map(str, words)]) == 0
        return told

    return ask_once


def logprobs_of(answer):
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def test_a_real_model_and_what_a_run_made_of_it_are_served(served, capsys, tmp_path):
    pytest.importorskip("torch", reason="needs the extra local")
    base = served("tiny-random", "--set", "threads=1")
    assert 1 <= base["usage"]["completion_tokens"] <= 4 and base["context_length"] > 0
    assert "serving tiny-random on http://127.0.0.1:1/v1\ntry: curl" in capsys.readouterr().out
    run = {
        "name": "r0",
        "data": {"source_kind": "in_memory", "rows": ROWS, "transforms": [{"kind": "jsonl_to_chat"}]},
        "model": {"name": "tiny-random"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 1, "batch_size": 2, "learning_rate": 0.01}},
        "backend": {"kind": "local", "params": {"threads": 1}},
    }
    result = run_experiment({"name": "local", "output_dir": str(tmp_path), "run": run})[0]
    assert result.status == "completed", result.error
    of_run, of_weights = served(str(result.run_dir)), served(result.artifacts["final_sampler"])
    assert of_run["model"] == "r0" and logprobs_of(of_run) == logprobs_of(of_weights) != logprobs_of(base)


def test_a_model_on_a_tinker_server_is_served(served, tinker_server):
    answer = served("tiny-random", "--backend", "tinker", "--set", f"base_url={tinker_server.url}")
    assert 1 <= len(logprobs_of(answer)) <= 4
