"""`evsys eval model`: every flag of the reference, its artifacts, its exit codes, and where the model comes from."""

from __future__ import annotations

import json

import pytest

from evsys_sdk import run_experiment
from evsys_sdk.backends.mock import MockSamplingClient
from evsys_sdk.cli.main import main, parse

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
    given = parse(
        flags(
            *("--secondary-aliases", "s.json", "--adapter-path", "a", "--checkpoint-path", "c", "--max-tokens", 9),
            *("--temperature", 0.5, "--max-attempts", 2, "--batch-size", 3, "--fail-on-retries"),
        )
    ).params
    assert (given["secondary_aliases"], given["adapter_path"], given["checkpoint_path"]) == ("s.json", "a", "c")
    numbers = ("max_tokens", "temperature", "max_attempts", "batch_size")
    assert [given[name] for name in numbers] == [9, 0.5, 2, 3]
    assert given["fail_on_retries"] and given["kind"] == "mock" and given["model_name"] == "table"
    plain = parse(flags()).params
    assert [plain[name] for name in numbers] == [256, 0.0, 3, 16]
    assert main(["eval", "model", "--dataset", "rows.jsonl"]) == 1
    assert main([*flags()[:-4], "--inference-kind", "openai", "--model-name", "m"]) == 1


def test_a_checkpoint_is_scored_by_answer_alias_and_secondary_alias(trained, capsys, tmp_path):
    where = ["--checkpoint-path", str(trained.run_dir), "--secondary-aliases", "loose.json"]
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
    where = ["--checkpoint-path", str(trained.run_dir)]
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
    where = ["--checkpoint-path", str(trained.run_dir), "--batch-size", 1]
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
        (["--dataset", "none.jsonl"], "no such file"),
        (["--aliases", "none.json"], "none.json: No such file"),
        (["--secondary-aliases", "rows.jsonl"], "rows.jsonl: not valid JSON"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_and_leaves_nothing(more, message, capsys, tmp_path):
    assert main(flags(*more)) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused(trained, capsys):
    run_dir = str(trained.run_dir)
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


LONG = [
    "Which of the seven hills of the old town carries the lighthouse that the fishermen built in winter?",
    "How many barrels of salted herring left the northern harbour before the storm of that autumn began?",
]
NEW = "Why does the baker on the corner of the market square close his shop whenever the circus arrives?"


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run whose training rows are long enough to be told from others; its rows, and its directory."""
    folder = tmp_path_factory.mktemp("long")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": text, "tool_slug": "x"}) + "\n" for text in LONG))
    chat = {"kind": "jsonl_to_chat", "params": {"user_template": "{query}", "assistant_template": "{tool_slug}"}}
    run = {
        "name": "r0",
        "data": {"path": str(rows), "transforms": [chat]},
        "model": {"name": "table"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 2, "batch_size": 2}},
        "backend": {"kind": "mock"},
    }
    [result] = run_experiment({"name": "long", "output_dir": str(folder / "out"), "run": run})
    assert result.status == "completed", result.error
    return rows, result.run_dir


@pytest.mark.parametrize(
    ("questions", "mark", "line"),
    [
        (None, (True, 2), "**Scored on training rows:**"),
        ([*LONG[::-1]], (True, 2), "**Scored on training rows:**"),
        ([LONG[0], NEW], (False, 1), "**Scored on training rows (1 of 2):**"),
        ([NEW], (False, 0), None),
    ],
    ids=["the same file", "the same rows", "one of them", "new rows"],
)
def test_a_score_on_rows_that_the_weights_were_trained_on_is_marked(capsys, long_run, tmp_path, questions, mark, line):
    rows, run = long_run
    asked = [{"query": text, "tool_slug": "x"} for text in questions or []]
    text = rows.read_text() if questions is None else "".join(json.dumps(row) + "\n" for row in asked)
    (tmp_path / "rows.jsonl").write_text(text)
    for reused in (False, True):
        code, found = evaluate(capsys, "--checkpoint-path", run)
        assert code == 0 and found["reused"] is reused
        assert (found["on_training_rows"], found["n_training_rows"]) == mark
    assert main(flags("--checkpoint-path", run)) == 0
    for written in (tmp_path / "out/summary.md").read_text(), capsys.readouterr().out:
        assert (line in written) if line else ("training rows" not in written)
    _, base = evaluate(capsys, out="base")
    assert (base["on_training_rows"], base["n_training_rows"]) == (False, 0), "nothing is known of a base model"
