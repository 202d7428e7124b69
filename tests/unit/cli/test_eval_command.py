"""`evsys eval model`: every flag of the reference, its artifacts, its exit codes, and where the model comes from."""

from __future__ import annotations

import json

import pytest

from evsys_sdk import run_experiment
from evsys_sdk.backends.mock import MockSamplingClient
from evsys_sdk.cli.main import build_parser, main

ROWS = [
    {"id": "a", "prompt": "say red", "tool_slug": "red"},
    {"id": "b", "prompt": "say green", "tool_slug": "lime"},
    {"id": "c", "prompt": "say red", "tool_slug": "pink"},
    {"id": "d", "prompt": "say red", "tool_slug": "blue"},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the mock that has learnt to say red and green."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [{"prompt": f"say {word}", "completion": word} for word in ("red", "green")] * 2
    config = {
        "name": "colours",
        "output_dir": str(folder),
        "run": {
            "name": "r0",
            "data": {"source_kind": "in_memory", "rows": rows, "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "table"},
            "algorithm": {"kind": "sft", "params": {"max_steps": 40, "batch_size": 4, "learning_rate": 0.5}},
            "backend": {"kind": "mock"},
        },
    }
    result = run_experiment(config)[0]
    assert result.status == "completed", result.error
    return result


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "aliases.json").write_text(json.dumps({"lime": ["green"]}))
    (tmp_path / "loose.json").write_text(json.dumps([["pink", "red"]]))


def flags(*more, out="out"):
    return [
        *("eval", "model", "--dataset", "rows.jsonl", "--aliases", "aliases.json", "--output-dir", out),
        *("--inference-kind", "mock", "--model-name", "table", *map(str, more)),
    ]


def evaluate(capsys, *more, out="out"):
    """(exit code, the printed JSON)"""
    code = main(flags(*more, "--json", out=out))
    return code, json.loads(capsys.readouterr().out)


def test_every_flag_of_the_reference_is_understood():
    args = build_parser().parse_args(
        flags(
            *("--secondary-aliases", "s.json", "--adapter-path", "a", "--checkpoint-path", "c", "--max-tokens", 9),
            *("--temperature", 0.5, "--max-attempts", 2, "--batch-size", 3, "--fail-on-retries"),
        )
    )
    assert (args.secondary_aliases, args.adapter_path, args.checkpoint_path) == ("s.json", "a", "c")
    assert (args.max_tokens, args.temperature, args.max_attempts, args.batch_size) == (9, 0.5, 2, 3)
    assert args.fail_on_retries and args.inference_kind == "mock" and args.model_name == "table"
    plain = build_parser().parse_args(flags())
    assert (plain.max_tokens, plain.temperature, plain.max_attempts, plain.batch_size) == (256, 0.0, 3, 16)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["eval", "model", "--dataset", "rows.jsonl"])
    with pytest.raises(SystemExit):
        build_parser().parse_args([*flags()[:-4], "--inference-kind", "openai", "--model-name", "m"])


def test_a_checkpoint_is_scored_by_answer_alias_and_secondary_alias(trained, capsys, tmp_path):
    where = ["--checkpoint-path", trained.extras["run_dir"], "--secondary-aliases", "loose.json"]
    code, found = evaluate(capsys, *where)
    assert code == 0
    assert found["metrics"] == {"exact_pass@1": 0.25, "alias_pass@1": 0.5, "secondary_alias_pass@1": 0.75}
    assert {"predictions.jsonl", "retry_report.json", "summary.json", "summary.md"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert main(flags(*where)) == 0
    out = capsys.readouterr().out
    assert "| alias_pass@1 | 0.5000 |" in out and "artifacts: out (finished before; --fresh scores it anew)" in out


def test_the_weights_themselves_may_be_named(trained, capsys):
    assert (
        evaluate(capsys, "--checkpoint-path", trained.artifacts["final_sampler"])[1]["metrics"]["alias_pass@1"] == 0.5
    )


def test_other_aliases_fold_the_same_answers_again(trained, capsys, tmp_path, monkeypatch):
    where = ["--checkpoint-path", trained.extras["run_dir"]]
    evaluate(capsys, *where)
    (tmp_path / "aliases.json").write_text(json.dumps({"lime": ["green"], "blue": ["red"]}))

    def never(*args, **kwargs):
        raise AssertionError("nothing has to be asked again")

    monkeypatch.setattr(MockSamplingClient, "sample", never)
    code, found = evaluate(capsys, *where)
    assert (code, found["reused"], found["metrics"]["alias_pass@1"]) == (0, False, 0.75)


def test_a_call_that_fails_for_good_fails_the_command_only_when_told_to(trained, capsys, monkeypatch):
    real, calls = MockSamplingClient.sample, []

    def flaky(self, prompt, *args, **kwargs):
        calls.append(prompt)
        if len(calls) <= 1:
            raise OSError("lost")
        return real(self, prompt, *args, **kwargs)

    monkeypatch.setattr(MockSamplingClient, "sample", flaky)
    where = ["--checkpoint-path", trained.extras["run_dir"], "--batch-size", 1]
    code, found = evaluate(capsys, *where, "--max-attempts", 1)
    assert (code, found["retry_report"]["total_failures"], found["scores"][0]["n_errors"]) == (0, 1, 1)
    assert found["retry_report"]["failures"][0]["error"] == "OSError: lost"
    assert evaluate(capsys, *where, "--max-attempts", 1, "--fail-on-retries")[0] == 2
    assert len(calls) == 4, "a finished evaluation is read, not repeated"
    code, found = evaluate(capsys, *where, "--fail-on-retries", "--retry-errors")
    assert (code, found["retry_report"]["total_failures"], len(calls)) == (0, 0, 5)


def test_samples_of_one_row_differ_and_repeat_with_the_seed(capsys, tmp_path):
    def said(out, *more):
        evaluate(capsys, "--num-samples", 3, "--temperature", 1, "--max-tokens", 12, *more, out=out)
        return [json.loads(line)["completion"] for line in (tmp_path / out / "predictions.jsonl").open()]

    first = said("a")
    assert len(first) == 12 and len(set(first[:3])) == 3
    assert said("b") == first != said("c", "--seed", 7)


def test_a_query_is_put_behind_the_system_prompt(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "hi", "tool_slug": "A"}) + "\n")

    def asked(out, *more):
        evaluate(capsys, *more, out=out)
        return json.loads((tmp_path / out / "predictions.jsonl").read_text())["prompt"]

    assert asked("a")[0]["role"] == "system"
    assert asked("b", "--system-prompt", "Choose.")[0]["content"] == "Choose."
    assert [message["role"] for message in asked("c", "--system-prompt", "")] == ["user"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--adapter-path", "a", "--checkpoint-path", "b"], "keep one"),
        (["--adapter-path", "a"], "say --checkpoint-path"),
        (["--set", "latency"], "param=value"),
        (["--set", "latncy_ms=1"], "latency_ms"),
        (["--dataset", "none.jsonl"], "there is no such file"),
        (["--aliases", "none.json"], "none.json: No such file"),
        (["--secondary-aliases", "rows.jsonl"], "rows.jsonl: not valid JSON"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_and_leaves_nothing(more, message, capsys, tmp_path):
    assert main(flags(*more)) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused(trained, capsys):
    run_dir = trained.extras["run_dir"]
    assert main([*flags()[:-1], "other", "--checkpoint-path", run_dir]) == 1
    assert "belong to model 'table', not to 'other'" in capsys.readouterr().err


def test_an_adapter_of_the_local_engine_is_evaluated(tiny_engine, tmp_path, capsys):
    from evsys_engine.types import LoraSettings

    adapter = tiny_engine.create_adapter(LoraSettings(rank=2, seed=0))
    adapter.save_weights(tmp_path / "adapter")
    more = ["--inference-kind", "local", "--model-name", "tiny-random", "--adapter-path", "adapter", "--max-tokens", 4]
    code, found = evaluate(capsys, *more)
    assert (code, found["n_rows"], found["retry_report"]["total_calls"]) == (0, 4, 4)
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["subject"]["model"]["checkpoint"] == str(tmp_path / "adapter")


def test_a_model_on_a_tinker_server_is_evaluated(tinker_server, capsys, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    more = ["--inference-kind", "tinker", "--model-name", "tiny-random", "--max-tokens", 4]
    code, found = evaluate(capsys, *more, "--set", f"base_url={tinker_server.url}")
    assert (code, found["retry_report"]["total_calls"], found["scores"][0]["n_errors"]) == (0, 4, 0)
