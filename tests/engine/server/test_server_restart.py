"""The command itself: started, killed without warning, started again on the same folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

tinker = pytest.importorskip("tinker")
types = tinker.types

PROMPT = [10, 20, 30, 40, 50]


@contextmanager
def command(*options):
    process = subprocess.Popen(
        [sys.executable, "-m", "evsys_sdk.cli.main", "engine", "serve", "--json", "--threads", "1", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        process.told = json.loads(line)
        yield process
    finally:
        process.kill()
        process.wait()


def logprobs_of(training):
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]),
        loss_fn_inputs={"target_tokens": PROMPT[1:], "weights": [1.0] * 4},
    )
    return training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist(), datum


def step(training, datum):
    training.forward_backward([datum], "cross_entropy")
    return training.optim_step(types.AdamParams(learning_rate=0.01)).result()


def test_checkpoints_and_samplers_survive_a_kill(model_dirs, tmp_path, connect):
    options = ["--model", str(model_dirs["llama"]), "--checkpoints", str(tmp_path / "checkpoints")]
    prompt = types.ModelInput.from_ints(PROMPT)
    with command(*options) as process:
        client = connect(SimpleNamespace(url=process.told["url"]))
        training = client.create_lora_training_client(base_model=str(model_dirs["llama"]), rank=4, seed=1)
        _, datum = logprobs_of(training)
        for _ in range(3):
            step(training, datum)
        state = training.save_state("three").result().path
        path = training.save_weights_for_sampler("three").result().path
        sampled = client.create_sampling_client(model_path=path).compute_logprobs(prompt).result()
        trained, _ = logprobs_of(training)
        step(training, datum)
        after, _ = logprobs_of(training)
        process.kill()
    with command(*options) as process:
        client = connect(SimpleNamespace(url=process.told["url"]))
        assert client.create_sampling_client(model_path=path).compute_logprobs(prompt).result() == sampled
        resumed = client.create_training_client_from_state_with_optimizer(state)
        assert logprobs_of(resumed)[0] == trained
        step(resumed, datum)
        assert logprobs_of(resumed)[0] == after  # the optimiser went on where it was
        client.close("success").result()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
