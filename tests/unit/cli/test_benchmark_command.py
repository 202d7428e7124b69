"""`evsys benchmark run`: a table with intervals and denominators, a record on disk, reuse, hosted models, refusals."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evsys_sdk import run_experiment
from evsys_sdk.cli.main import main
from evsys_sdk.registry import inference, verifiers
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.stats.intervals import wilson_interval

WORDS = ("red", "green", "blue", "black")


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    """An empty folder with a suite of four tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    monkeypatch.setattr(inference, "entries", dict(inference.entries))
    write_suite("bench")


def write_suite(name, words=WORDS, **task):
    from pathlib import Path

    rows = [
        {
            "task_id": word,
            "instruction": f"say {word}",
            "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": word},
            "metadata": {"length": len(word)},
            **task,
        }
        for word in words
    ]
    Path(name).mkdir()
    (Path(name) / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
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
    return str(result.run_dir)


def score(capsys, *flags):
    """(exit code, the printed JSON)"""
    code = main(["benchmark", "run", *map(str, flags), "--json"])
    return code, json.loads(capsys.readouterr().out)


def refusal(capsys, *flags):
    assert main(["benchmark", "run", *map(str, flags)]) == 1
    return capsys.readouterr().err


class Provider:
    """A stand-in for OpenAI's API: says the last word of the question; `fails` has words it answers with 400."""

    def __init__(self):
        self.asked, self.fails = [], set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def flags(self):
        address = f"http://127.0.0.1:{self.server.server_port}/v1"
        return ["--path", "bench", "--inference", "openai", "--model", "gpt-5", "--set", f"base_url={address}"]

    def _handler(provider):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args): ...

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                word = body["messages"][-1]["content"].split()[-1]
                provider.asked.append(word)
                message = {"role": "assistant", "content": word}
                answer = {
                    "id": "c", "object": "chat.completion", "created": 1, "model": "gpt-5",
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                    "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
                }  # fmt: skip
                failed = word in provider.fails
                raw = json.dumps({"error": {"message": "no"}} if failed else answer).encode()
                self.send_response(400 if failed else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        return Handler


@pytest.fixture
def provider():
    pytest.importorskip("openai", reason="needs the extra openai")
    made = Provider()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_run_is_scored_with_intervals_denominators_and_breakdowns(run_dir, capsys):
    flags = ["--path", "bench", "--model", run_dir, "--metrics", "pass@1", "pass@2", "--breakdown-keys", "length"]
    code, found = score(capsys, *flags, "--temperature", "0", "--output-dir", "out")
    assert code == 0
    one = found["scores"][0]
    assert (one["metric"], one["value"], one["n_tasks"], one["n_rollouts"], one["n_errors"]) == ("pass@1", 0.5, 4, 8, 0)
    assert (one["low"], one["high"]) == pytest.approx(wilson_interval(2, 4))
    assert {key: part[0]["value"] for key, part in found["breakdown"]["length"].items()} == {"3": 1, "4": 0, "5": 0.5}
    assert main(["benchmark", "run", *flags, "--temperature", "0", "--output-dir", "out"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all", "pass@1", "0.500", "[0.150,", "0.850]", "4", "8", "0"] in lines
    # One task has no interval.
    assert ["length", "=", "3", "pass@2", "1.000", "[0.207,", "1.000]", "1", "2", "0"] not in lines
    assert ["length", "=", "3", "pass@2", "1.000", "-", "1", "2", "0"] in lines


def test_templates_named_by_a_metadata_key_are_the_units_of_intervals(run_dir, capsys):
    flags = ["--path", "bench", "--model", run_dir, "--temperature", "0"]
    _, plain = score(capsys, *flags, "--output-dir", "plain")
    _, found = score(capsys, *flags, "--cluster-key", "length", "--output-dir", "out")
    assert plain["clusters"]["count"] == 0 and found["clusters"] == {"count": 3, "found_by": "metadata key length"}
    [before], [after] = plain["scores"], found["scores"]
    assert before["value"] == after["value"] and (before["low"], before["high"]) != (after["low"], after["high"])
    assert main(["benchmark", "run", *flags, "--cluster-key", "length", "--output-dir", "out"]) == 0
    told = "tasks come from 3 templates (metadata key length): intervals count templates, not tasks"
    assert told in capsys.readouterr().out
    assert main(["benchmark", "run", *flags, "--cluster-key", "lenght", "--output-dir", "third"]) != 0
    assert "--cluster-key: " in capsys.readouterr().err


def test_the_record_is_on_disk_in_the_form_of_a_runs_logs(run_dir, capsys, tmp_path):
    _, found = score(capsys, "--path", "bench", "--model", run_dir, "--output-dir", "out")
    record = json.loads((tmp_path / "out" / "result.json").read_text())
    assert record["scores"] == found["scores"]
    assert record["model"]["checkpoint"].endswith("sampler.npz")
    assert record["environment"]["packages"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [line["task_id"] for line in lines] == list(WORDS)
    assert {"step", "eval", "completion", "turns", "reward", "status", "error", "seconds"} <= set(lines[0])
    assert lines[0]["turns"][0]["completion_tokens"]


def test_a_finished_one_is_reused_and_fresh_scores_it_anew(run_dir, capsys, tmp_path):
    flags = ["--path", "bench", "--model", run_dir, "--output-dir", "out"]
    _, first = score(capsys, *flags)
    _, again = score(capsys, *flags)
    assert (first["reused"], again["reused"], again["ts"]) == (False, True, first["ts"])
    assert main(["benchmark", "run", *flags]) == 0
    assert "finished before; --fresh scores it anew" in capsys.readouterr().out
    _, anew = score(capsys, *flags, "--fresh")
    assert (anew["reused"], anew["scores"]) == (False, first["scores"])
    assert (tmp_path / "out" / "attempts" / "1" / "result.json").is_file()


@pytest.mark.parametrize(
    "other",
    [["--temperature", "0.5"], ["--seed", "7"], ["--max-tokens", "9"], ["--num-samples", "2"]],
    ids=lambda f: f[0],
)
def test_without_an_output_dir_each_way_of_sampling_has_its_own(run_dir, capsys, other):
    flags = ["--path", "bench", "--model", run_dir]
    one, same, apart = (score(capsys, *flags, *more)[1] for more in ([], ["--metrics", "mean_reward"], other))
    assert one["output_dir"].startswith("outputs/benchmarks/bench/r0-")
    assert one["output_dir"] == same["output_dir"] != apart["output_dir"]


def test_another_seed_draws_other_completions_and_the_same_seed_the_same(capsys, tmp_path):
    def drawn(folder, *flags):
        score(capsys, "--path", "bench", "--model", "m", "--backend", "mock", "--output-dir", folder, *flags)
        return [json.loads(line)["completion"] for line in (tmp_path / folder / "rollouts.jsonl").open()]

    assert drawn("a") == drawn("b", "--seed", "42") != drawn("c", "--seed", "7")


def test_a_hosted_model_is_scored_with_its_cost(provider, capsys):
    code, found = score(capsys, *provider.flags, "--metrics", "pass@1", "cost", "--limit", "3")
    assert code == 0
    assert [one["value"] for one in found["scores"]] == [1.0, pytest.approx((7 * 1.25 + 5 * 10) / 1e6)]
    assert found["usage"]["input_tokens"] == 21
    assert found["model"] == {"kind": "openai", "name": "gpt-5", "params": {"base_url": provider.flags[-1][9:]}}


def test_the_errors_of_a_finished_one_can_be_tried_again_alone(provider, capsys):
    provider.fails = {"blue"}
    code, found = score(capsys, *provider.flags)
    assert (code, found["scores"][0]["value"], found["scores"][0]["n_errors"]) == (0, 0.75, 1)
    assert list(found["errors"].values()) == [1]
    _, reused = score(capsys, *provider.flags)
    assert reused["reused"] and len(provider.asked) == 4
    provider.fails = set()
    _, whole = score(capsys, *provider.flags, "--retry-errors")
    assert provider.asked[4:] == ["blue"]
    assert (whole["scores"][0]["value"], whole["errors"]) == (1.0, {})


def test_when_everything_errors_there_is_no_score_and_exit_code_2(provider, capsys):
    provider.fails = set(WORDS)
    code, found = score(capsys, *provider.flags)
    assert (code, found["scores"][0]["value"]) == (2, None)
    assert main(["benchmark", "run", *provider.flags]) == 2
    out = capsys.readouterr().out
    assert "invalid: all 4 rollouts errored" in out and "error, 4 times: openai (gpt-5) failed" in out


def test_a_model_works_inside_an_agent(run_dir, capsys):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    flags = ["--path", "bench", "--model", run_dir, "--temperature", "0", "--agent", "chat"]
    code, found = score(capsys, *flags, "--agent-set", "max_turns=2")
    assert (code, found["scores"][0]["value"]) == (0, 0.5)
    assert found["settings"]["subject"]["agent"] == {"kind": "chat", "params": {"max_turns": 2}}


def test_extensions_of_the_project_are_imported(capsys, tmp_path):
    (tmp_path / "own.py").write_text(
        "from evsys_sdk import register_inference, register_verifier\n"
        "@register_inference('parrot')\n"
        "class Parrot:\n"
        "    def generate(self, *, prompt, max_tokens, temperature, stop):\n"
        "        return prompt\n"
        "@register_verifier('own_echo')\n"
        "def own_echo(model_output, expected, params):\n"
        "    return float(expected in model_output)\n"
    )
    write_suite("echo", verifier={"kind": "in_process", "fn_name": "own_echo", "expected": "say"})
    code, found = score(capsys, "--path", "echo", "--inference", "parrot", "--model", "polly", "--import", "own")
    assert (code, found["scores"][0]["value"]) == (0, 1.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--path", "bench/none", "--model", "m"], "is not a benchmark"),
        (["--path", "bench", "--model", "/no/such"], "no such file or directory"),
        (["--path", "bench", "--model", "tinker://a/b"], "with --base-model"),
        (["--path", "bench", "--model", "m", "--backend", "mokc"], "closest: mock"),
        (["--path", "bench", "--model", "m", "--metrics", "pas@1"], "is not a metric"),
        (["--path", "bench", "--model", "m", "--metrics", "pass@3", "--num-samples", "2"], "num_samples of at least 3"),
        (["--path", "bench", "--model", "m", "--agent-set", "a=1"], "no --agent"),
        (["--path", "bench", "--model", "m", "--set", "latency"], "param=value"),
        (["--path", "bench", "--model", "m", "--inference", "opnai"], "closest: openai"),
        (["--path", "bench", "--model", "m", "--inference", "local"], "say --backend local"),
        (["--path", "bench", "--model", "m", "--inference", "openai", "--seed", "1"], "no use for --seed"),
        (["--path", "bench", "--model", "m", "--environment", "dokcer"], "closest: docker"),
        (["--path", "bench", "--model", "m", "--inference", "openai", "--environment", "docker"], "no use for --env"),
        (["--path", "bench", "--model", "m", "--inference", "openai"], "needs a key: set OPENAI_API_KEY"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_reason_and_leaves_nothing(flags, message, capsys, tmp_path):
    assert message in refusal(capsys, *flags)
    assert not (tmp_path / "outputs").exists()


def test_tasks_are_worked_on_in_the_environment_that_is_named(run_dir, capsys, monkeypatch):
    """The rollouts ask for it, and those of another environment are others."""
    asked = []
    score_suite_on = HarborRolloutEngine.roll_out

    def roll_out(self, *args, **kwargs):
        asked.append(self.settings.environment.kind)
        return score_suite_on(self, *args, **kwargs)

    monkeypatch.setattr(HarborRolloutEngine, "roll_out", roll_out)
    monkeypatch.setattr("evsys_sdk.experiment.standalone.kind_problem", lambda kind: None)
    folders = []
    for flags in ([], ["--environment", "docker"]):
        code, found = score(capsys, "--path", "bench", "--model", run_dir, *flags)
        assert code == 0
        folders.append(found["output_dir"])
    assert asked[0] == "sandbox" and asked[-1] == "docker" and folders[0] != folders[1]


def test_a_task_whose_verifier_is_not_known_is_refused_before_the_model_is_asked(provider, capsys):
    write_suite("odd", verifier={"kind": "in_process", "fn_name": "exact_mach", "expected": "x"})
    assert "closest: exact_match" in refusal(capsys, "--path", "odd", *provider.flags[2:])
    write_suite("env", metadata={"environment": {"files": {}}})
    assert "needs an environment" in refusal(capsys, "--path", "env", *provider.flags[2:])
    assert provider.asked == []


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run whose training rows are long enough to be told from others, in a file beside its config."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": text, "completion": "x"}) + "\n" for text in LONG))
    config = {
        "name": "long",
        "output_dir": str(folder / "out"),
        "run": {
            "name": "r0",
            "data": {"path": str(folder / "rows.jsonl"), "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "table"},
            "algorithm": {"kind": "sft", "params": {"max_steps": 2, "batch_size": 2}},
            "backend": {"kind": "mock"},
        },
    }
    [result] = run_experiment(config)
    assert result.status == "completed", result.error
    return folder, str(result.run_dir)


LONG = [
    "Which of the seven hills of the old town carries the lighthouse that the fishermen built in winter?",
    "How many barrels of salted herring left the northern harbour before the storm of that autumn began?",
]
NEW = "Why does the baker on the corner of the market square close his shop whenever the circus arrives?"


def write_questions(name, questions):
    from pathlib import Path

    verifier = {"kind": "in_process", "fn_name": "exact_match", "expected": "x"}
    tasks = [{"task_id": f"t{n}", "instruction": text, "verifier": verifier} for n, text in enumerate(questions)]
    Path(name).mkdir()
    (Path(name) / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


@pytest.mark.parametrize(
    ("questions", "mark", "line"),
    [
        (LONG, (True, 2), "scored on training rows: it shows what was memorised"),
        ([*LONG[:1], NEW], (False, 1), "scored with 1 task in training rows"),
        ([NEW], (False, 0), None),
    ],
)
def test_a_score_on_rows_that_the_run_was_trained_on_is_marked(capsys, long_run, questions, mark, line):
    write_questions("asked", questions)
    code, found = score(capsys, "--path", "asked", "--model", long_run[1])
    assert code == 0 and (found["on_training_rows"], found["n_training_tasks"]) == mark
    assert main(["benchmark", "run", "--path", "asked", "--model", long_run[1]]) == 0
    printed = capsys.readouterr().out
    assert (line in printed) if line else ("training rows" not in printed)


def test_where_the_training_rows_are_gone_the_score_is_there_and_a_warning_says_so(capsys, long_run):
    folder, run = long_run
    write_questions("asked", LONG)
    (folder / "rows.jsonl").rename(folder / "moved.jsonl")
    try:
        assert main(["benchmark", "run", "--path", "asked", "--model", run]) == 0
    finally:
        (folder / "moved.jsonl").rename(folder / "rows.jsonl")
    seen = capsys.readouterr()
    assert "training rows of r0 cannot be read, so scores on them are not marked" in seen.err
    assert "pass@1" in seen.out and "training rows" not in seen.out
