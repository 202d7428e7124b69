"""What the first rows, a renderer's name and the vocabulary tell before anything is spent."""

from __future__ import annotations

import json
import sys

import pytest

from evsys_sandbox.sandbox import why_unavailable
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.checks import rows as early_checks
from evsys_sdk.checks.preflight import deep_problems
from evsys_sdk.cli.main import main
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.registry import algorithms, register_algorithm, register_transform, transforms

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
ASKED = {"messages": [{"role": "user", "content": "hi"}]}
TASK = {"instruction": "hi", "verifier": {"fn_name": "exact_match", "expected": "ho"}}
PAIR = {"prompt": "hi", "chosen": "ho", "rejected": "no"}
PLAIN = {"prompt": "hi", "completion": "ho"}
STEPS = {"max_steps": 1}


def of(*rows, **more):
    return {"source_kind": "in_memory", "rows": list(rows), **more}


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    for kinds in (algorithms, transforms):
        kinds.names()
        monkeypatch.setattr(kinds, "entries", dict(kinds.entries))


@pytest.fixture
def problems(tmp_path):
    def look(kind="sft", data=None, params=STEPS, **run):
        settings = {
            "name": "r",
            "data": data or of(CHAT),
            "model": {"name": "m"},
            "algorithm": {"kind": kind, "params": params},
            "backend": {"kind": "mock"},
            **run,
        }
        config = parse_config(Document(label="config", data={"name": "x", "run": settings}), folder=tmp_path)
        return [(problem.path.removeprefix("run."), problem.message) for problem in deep_problems(config)]

    return look


@pytest.mark.parametrize(
    ("kind", "good", "bad", "said"),
    [
        ("sft", CHAT, PLAIN, "sft needs chats: add the transform jsonl_to_chat to data.transforms"),
        ("sft", CHAT, ASKED, "no assistant message"),
        ("dpo", PAIR, CHAT, "dpo needs rows with `prompt`"),
        ("dpo", PAIR, {**PAIR, "rejected": "ho"}, "chosen and rejected are the same"),
        ("rl", TASK, CHAT, "rl needs tasks: add the transform to_harbor_task"),
        ("rl", TASK, {"instruction": "hi"}, "rl needs tasks"),
        ("rl", TASK, {**TASK, "verifier": {"fn_name": "exact_mach"}}, "closest: exact_match"),
        ("sdft", CHAT, ASKED, "shows no answer"),
    ],
)
def test_rows_that_the_algorithm_cannot_read_are_refused_with_what_it_needs(problems, kind, good, bad, said):
    if kind == "dpo":
        pytest.importorskip("torch")
    assert problems(kind, of(good, good)) == []
    [(path, message)] = problems(kind, of(good, bad))
    assert path == "data" and said in message and "\n" not in message


JUDGED = {**TASK, "verifier": {"kind": "llm_judge", "judge_model": "claude-opus-5", "rubric": "Is it polite?"}}
UNBUILT = {**TASK, "verifier": {"kind": "e2b", "dockerfile": "FROM debian\nCOPY a b\n", "test_sh": "exit 0\n"}}
MISFIT = {**TASK, "verifier": {"fn_name": "regex_match", "params": {"patern": "a"}}}


@pytest.mark.parametrize(
    ("bad", "said"),
    [(JUDGED, "ANTHROPIC_API_KEY"), (UNBUILT, "COPY"), (MISFIT, "patern")],
    ids=["judge", "e2b", "params"],
)
def test_tasks_that_could_not_be_graded_here_are_refused_as_a_benchmarks_are(problems, monkeypatch, bad, said):
    for key in ("ANTHROPIC_API_KEY", "E2B_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    if bad is UNBUILT and why_unavailable():
        said = "sandbox"
    [(path, message)] = problems("rl", of(TASK, bad, bad))
    assert path == "data" and message.startswith("row 1: task ") and said in message, message
    assert message.endswith("(and another task)")
    draw = {"kind": "sample", "params": {"n": 1, "seed": 0}}
    assert problems("rl", of(TASK, bad, transforms=[draw])) == []
    assert problems("distill", of(TASK, bad), params={**STEPS, "teacher": {"model": "m"}}) == []


def test_each_phase_of_a_combo_is_shown_its_own_rows(problems):
    phases = [{"algorithm": {"kind": "sft", "params": STEPS}}, {"algorithm": {"kind": "rl", "params": STEPS}}]
    [(path, message)] = problems("combo", params={"phases": phases})
    assert path == "data" and "rl needs tasks" in message
    phases[1]["data"] = of(TASK)
    assert problems("combo", params={"phases": phases}) == []
    phases[0]["data"] = of(PLAIN)
    assert [path for path, _ in problems("combo", params={"phases": phases})] == ["algorithm.params.phases[0].data"]


def test_each_stage_of_a_chain_is_looked_at(problems):
    stages = [{"name": "a", "data": of(CHAT)}, {"name": "b", "data": of(PLAIN)}]
    assert [path for path, _ in problems(continual={"stages": stages})] == ["continual.stages[1].data"]


def test_rows_are_looked_at_as_the_transforms_leave_them(problems):
    to_chat = {"kind": "jsonl_to_chat"}
    assert problems(data=of(PLAIN, transforms=[to_chat])) == []
    [(path, message)] = problems(data=of(PLAIN, {"prompt": "hi"}, transforms=[to_chat]))
    assert path == "data" and "jsonl_to_chat: row 1 (counting from 0) has no answer" in message
    keep = {"kind": "filter", "params": {"key": "completion", "exists": True}}
    assert problems(data=of(PLAIN, {"prompt": "hi"}, transforms=[keep, to_chat])) == []


def test_a_row_that_may_not_be_chosen_is_no_reason_to_refuse(problems):
    draw = {"kind": "sample", "params": {"n": 1, "seed": 0}}
    assert problems(data=of(CHAT, PLAIN, transforms=[draw])) == []
    assert problems(data=of(PLAIN, {"prompt": "hi"}, transforms=[draw, {"kind": "jsonl_to_chat"}])) == []
    assert [path for path, _ in problems(data=of(PLAIN, PLAIN, transforms=[draw]))] == ["data"]
    assert [path for path, _ in problems(data=of(CHAT, PLAIN, transforms=[{"kind": "shuffle"}]))] == ["data"]


def test_somebodys_own_transform_is_not_run_for_a_look(problems):
    ran = []

    @register_transform("costly")
    class Costly:
        def stream(self, rows):
            ran.append(1)
            yield from rows

        def __call__(self, rows):
            return list(self.stream(rows))

    assert problems(data=of(PLAIN, transforms=[{"kind": "costly"}])) == [] and not ran


def test_a_file_is_read_no_further_than_its_first_rows(problems, tmp_path):
    lines = [json.dumps(CHAT)] * early_checks.FIRST + ["{broken"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert problems(data={"path": "rows.jsonl"}) == []
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[1:]))
    [(path, message)] = problems(data={"path": "rows.jsonl"})
    assert path == "data" and "rows.jsonl:100" in message


def test_a_source_without_rows_is_refused(problems, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    assert problems(data={"path": "rows.jsonl"}) == [("data", "there are no training rows in it")]


def test_a_dataset_of_the_workspace_is_looked_at(problems, tmp_path):
    (tmp_path / ".evsys").mkdir()
    (tmp_path / "rows.jsonl").write_text(json.dumps(PLAIN) + "\n")
    Workspace.find(tmp_path).add(tmp_path / "rows.jsonl", name="words")
    assert [path for path, _ in problems(data={"dataset_name": "words"})] == ["data"]


def test_a_subclass_that_reads_rows_its_own_way_is_not_judged_by_ours(problems):
    @register_algorithm("my_sft")
    class MySFT(SFT):
        async def setup(self, ctx, backend):
            ctx.extras["train_rows"] = [CHAT]
            await super().setup(ctx, backend)

    assert problems("my_sft", of(PLAIN)) == []

    @register_algorithm("my_strict_sft")
    class Strict(MySFT):
        def check_rows(self, rows):
            raise RuntimeError("never")

    assert problems("my_strict_sft", of(PLAIN)) == [
        ("data", "looking at the first rows failed: RuntimeError: never"),
    ]


def test_an_algorithm_of_somebody_elses_that_says_nothing_is_not_asked(problems):
    @register_algorithm("anything_goes")
    class Anything:
        def train(self, ctx): ...

    assert problems("anything_goes", of(PLAIN), params={}) == []


@pytest.mark.parametrize(("kind", "backend"), [("mock", {}), ("local", {"model": {"name": "tiny-random"}})])
def test_top_k_above_the_vocabulary_is_refused(problems, kind, backend):
    if kind == "local":
        pytest.importorskip("torch")
        from evsys_engine.models import find_model

        find_model("tiny-random")
    run = {"backend": {"kind": kind}, **backend}
    assert problems("sdft", params={**STEPS, "top_k": 50}, **run) == []
    [(path, message)] = problems("sdft", params={**STEPS, "top_k": 1_000_000}, **run)
    assert path == "algorithm.params.top_k" and "top_k is at most that" in message
    phases = [{"algorithm": {"kind": "sdft", "params": {**STEPS, "top_k": 1_000_000}}}]
    [(path, _)] = problems("combo", params={"phases": phases}, **run)
    assert path == "algorithm.params.phases[0].algorithm.params.top_k"


def test_a_vocabulary_that_is_not_known_is_no_reason_to_refuse(problems):
    pytest.importorskip("torch")
    run = {"backend": {"kind": "local"}, "model": {"name": "Some/Model"}}
    assert problems("sdft", params={**STEPS, "top_k": 1_000_000}, **run) == []


def test_a_renderer_that_nobody_has_is_refused_and_the_mock_reads_none(problems):
    pytest.importorskip("tinker_cookbook")
    local = {"backend": {"kind": "local"}}
    assert problems(model={"name": "tiny-random", "renderer_name": "qwen3"}, **local) == []
    [(path, message)] = problems(model={"name": "tiny-random", "renderer_name": "qwen33"}, **local)
    assert path == "model.renderer_name"
    assert message.startswith("'qwen33' is not a renderer of tinker-cookbook; closest: qwen3;")
    assert problems(model={"name": "m", "renderer_name": "qwen33"}) == []


def test_a_known_renderer_is_recognised_without_loading_the_cookbook(problems, monkeypatch):
    pytest.importorskip("tinker_cookbook")
    monkeypatch.setattr("evsys_sdk.training.rendering.renderer_problem", lambda name: pytest.fail("it was asked"))
    assert problems(model={"name": "tiny-random", "renderer_name": "role_colon"}, backend={"kind": "local"}) == []


def test_without_the_cookbook_a_renderer_is_refused_with_the_remedy(problems, monkeypatch):
    monkeypatch.setattr(early_checks, "COOKBOOK", "no_such_cookbook")
    monkeypatch.setitem(sys.modules, "tinker_cookbook.renderers", None)
    [(path, message)] = problems(model={"name": "tiny-random", "renderer_name": "qwen3"}, backend={"kind": "local"})
    assert path == "model.renderer_name"
    assert "pip install 'evsys-sdk[tinker]'" in message and "or leave it out" in message


def test_the_command_line_shows_the_line_and_spends_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(PLAIN) + "\n")
    (tmp_path / "config.yaml").write_text(
        "name: x\nrun:\n  name: r\n  model: {name: m}\n  backend: {kind: mock}\n  algorithm: {kind: sft}\n"
        "  data:\n    path: rows.jsonl\n"
    )
    for command in (["validate", "--deep", "config.yaml"], ["run", "config.yaml"]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert "config.yaml:7" in said and "run.data" in said and "sft needs chats" in said
    assert not (tmp_path / "outputs").exists()
