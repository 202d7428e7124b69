"""`evsys validate` finds what would go wrong later, and says where it belongs."""

from __future__ import annotations

import json

import pytest

AGENT = """
from harbor.agents.base import BaseAgent


class Mine(BaseAgent):
    def __init__(self, *args, max_turns=3, style="short", **kwargs):
        super().__init__(*args, **kwargs)

    @staticmethod
    def name():
        return "mine"

    def version(self):
        return "1"

    async def setup(self, environment): ...

    async def run(self, instruction, environment, context): ...


class Looks(Mine):
    def __init__(self, *args, **kwargs):
        self.depth = kwargs.pop("depth", 1)
        super().__init__(*args, **kwargs)


def search(query: str) -> str:
    \"\"\"Look it up.\"\"\"
    return query
"""


def validate(project, *arguments, code, **top):
    done = project.evsys("validate", project.config(**top), *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_blocks_and_files_are_looked_at_by_default_and_not_with_shallow(project, minimal_run):
    wrong = minimal_run(algorithm__params={"learning_rat": 1}, data__path="data/nope.jsonl")
    for flags in ([], ["--deep"]):
        told = validate(project, *flags, code=1, run=wrong)
        assert "learning_rat = 1   unknown key; closest: learning_rate" in told and "data/nope.jsonl" in told
    assert "ok, 1 run" in validate(project, "--shallow", code=0, run=wrong)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("continual", "under `run`"),
        ("success_metric", "under `metadata`"),
        ("run_every", "under `metadata.benchmark[]`"),
        ("lora_rank", "under `run.algorithm.params`"),
    ],
)
def test_a_key_at_the_root_that_belongs_elsewhere_names_that_place(project, key, place):
    assert f"{key} = 1   unknown key here; it belongs {place}" in validate(project, code=1, **{key: 1})


def test_keys_in_other_wrong_places_are_told_theirs(project, minimal_run):
    run = minimal_run(n_repeats=3, algorithm__learning_rate=1.0, algorithm__params={"run_every": 5})
    told = validate(project, code=1, run=run)
    assert "run.n_repeats = 3   unknown key here; it belongs at the top level" in told
    assert "run.algorithm.learning_rate = 1.0   unknown key here; it belongs under `run.algorithm.params`" in told
    told = validate(project, code=1, run=minimal_run(algorithm__params={"run_every": 5}))
    assert "unknown key here; it belongs under `metadata.benchmark[]`" in told


@pytest.mark.parametrize(("line", "text"), [(150, '{"prompt": "a", '), (240, "[1]"), (199, "not json")])
def test_broken_json_far_into_a_data_file_is_found_with_its_line(project, line, text):
    rows = [json.dumps({"prompt": "say red", "completion": "red"})] * 240
    rows[line - 1] = text
    (project.root / "data/train.jsonl").write_text("\n".join(rows) + "\n")
    told = validate(project, code=1)
    assert "run.data.path" in told and f"train.jsonl:{line}:" in told


def test_a_tool_that_does_not_exist_is_found(project):
    project.write_tasks()
    (project.root / "mine.py").write_text(AGENT)

    def told(code, *tools):
        params = {"max_turns": 2, "tools": list(tools)}
        entry = {"name": "b", "path": "bench", "agent_import_path": "chat", "agent_params": params}
        return validate(project, code=code, metadata={"benchmark": entry}, imports=["mine"])

    assert "ok" in told(0, "mine.search", "bash")
    found = told(1, "mine.search", "mine.serch", "nowhere.tool")
    assert "tools[1]" in found and "closest: search" in found and "tools[2]" in found and "nowhere" in found


def test_misspelt_params_of_an_agent_are_found(project):
    project.write_tasks()
    (project.root / "mine.py").write_text(AGENT)

    def told(code, agent, **params):
        entry = {"name": "b", "path": "bench", "agent_import_path": f"mine.{agent}", "agent_params": params}
        return validate(project, code=code, metadata={"benchmark": entry}, imports=["mine"])

    assert "ok" in told(0, "Mine", max_turns=4, style="long", model_name="m")
    found = told(1, "Mine", max_turn=4)
    assert "max_turn = 4   unknown key; closest: max_turns" in found
    assert "ok" in told(0, "Looks", depth=4, whatever=1), "it looks into its arguments itself"


def test_a_tinker_backend_without_key_or_address_is_found(project, minimal_run):
    config = project.config(run=minimal_run(backend={"kind": "tinker"}, eval={"enabled": False}))
    done = project.evsys("validate", config, TINKER_API_KEY="")
    assert done.returncode == 1 and "run.backend" in done.stderr
    assert "set TINKER_API_KEY, or name a server of your own with base_url" in done.stderr
    assert project.evsys("validate", config, TINKER_API_KEY="tml-x").returncode == 0
    local = "run.backend.params={base_url: 'http://127.0.0.1:9'}"
    assert project.evsys("validate", config, "--set", local, TINKER_API_KEY="").returncode == 0
    wrong = project.evsys("validate", config, "--set", "run.backend.params={base_url: localhost}", TINKER_API_KEY="k")
    assert wrong.returncode == 1 and "is no address" in wrong.stderr


def test_a_system_prompt_on_one_side_only_is_warned_of_with_both_prompts(project, minimal_run):
    project.write_tasks()
    run = minimal_run()
    run["data"]["transforms"] = [{"kind": "jsonl_to_chat", "params": {"system_prompt": "You are terse."}}]
    told = validate(project, code=0, run=run, metadata={"benchmark": {"path": "bench"}})
    assert "warning: " in told and "only the training prompts have a system prompt" in told
    assert "[system] You are terse. [user] say red" in told and "test/bench asks '[user] say red'" in told


def test_a_text_around_the_question_on_one_side_only_is_warned_of(project, minimal_run):
    project.write_tasks()
    run = minimal_run()
    run["data"]["transforms"] = [{"kind": "jsonl_to_chat", "params": {"user_template": "Query: {prompt}"}}]
    told = validate(project, code=0, run=run, metadata={"benchmark": {"path": "bench"}})
    assert "only the training prompts have the text 'Query:' around the question" in told
    words = ("red", "green", "blue", "black")
    plan = {"kind": "in_process", "fn_name": "exact_match"}
    tasks = [{"instruction": f"Task:\nsay {w}", "verifier": {**plan, "expected": w}} for w in words]
    project.write_rows("bench/tasks.jsonl", tasks)
    told = validate(project, code=0, run=minimal_run(), metadata={"benchmark": {"path": "bench"}})
    assert "only the benchmark's prompts have the text 'Task:' around the question" in told


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("Q {prompt} A", "'Q' and 'A'"),
        ("{prompt}?", "'?'"),
        ("> {prompt}", "'>'"),
        ("{prompt} -> {completion}", "'->'"),
        ("{{{prompt}}}", "'{' and '}'"),
    ],
)
def test_a_short_template_is_a_text_around_the_question(project, minimal_run, template, words):
    project.write_tasks()
    run = minimal_run()
    run["data"]["transforms"] = [{"kind": "jsonl_to_chat", "params": {"user_template": template}}]
    warned = validate(project, code=0, run=run, metadata={"benchmark": {"path": "bench"}})
    assert f"only the training prompts have the text {words} around the question" in warned


def test_prompts_that_agree_are_not_warned_of(project, minimal_run):
    project.write_tasks()
    told = validate(project, code=0, run=minimal_run(), metadata={"benchmark": {"path": "bench"}})
    assert "warning" not in told or ("around the question" not in told and "system prompt" not in told)


def test_validation_runs_the_projects_code_and_with_no_code_none_of_it(project, minimal_run):
    project.write_tasks(fn_name="own_check")
    tasks = (project.root / "bench/tasks.jsonl").read_text()
    row = json.loads(tasks.splitlines()[0])
    parts = {"fn_name": "weighted", "params": {"parts": [{"fn_name": "own_check"}]}}
    weighted = row | {"task_id": "weighted", "verifier": row["verifier"] | parts}
    (project.root / "bench/tasks.jsonl").write_text(f"{tasks.rstrip()}\n{json.dumps(weighted)}\n")
    (project.root / "src").mkdir()
    (project.root / "src/__init__.py").write_text(
        "open('ran.txt', 'w').write('x')\n"
        "from evsys_sdk import register_transform, register_verifier\n"
        "@register_transform('own_rows')\n"
        "class Own:\n"
        "    def __call__(self, rows): return rows\n"
        "@register_verifier('own_check')\n"
        "def own_check(model_output, expected, params): return 1.0\n"
    )
    (project.root / "own_agent.py").write_text("open('agent_ran.txt', 'w').write('x')\n")
    run = minimal_run()
    run["data"]["transforms"].append({"kind": "own_rows"})
    entries = [
        {"name": "b", "path": "bench"},
        {"name": "c", "path": "bench", "agent_import_path": "own_agent.Agent"},
    ]
    path = project.config(run=run, metadata={"benchmark": entries})
    done = project.evsys("validate", path, "--no-code")
    assert done.returncode == 0, done.stderr
    assert "the project's code (src, own_agent.Agent) was not run" in done.stderr
    assert not (project.root / "ran.txt").exists() and not (project.root / "agent_ran.txt").exists()
    wrong = project.evsys("validate", path, "--no-code", "--set", "run.algorithm.params.learning_rat=1")
    assert wrong.returncode == 1 and "closest: learning_rate" in wrong.stderr
    assert project.evsys("validate", path).returncode == 1, "its agent has no class"
    assert (project.root / "ran.txt").exists() and (project.root / "agent_ran.txt").exists()


def test_without_code_of_its_own_no_code_finds_unknown_kinds(project, minimal_run):
    run = minimal_run(algorithm={"kind": "stf"})
    assert "closest: sft" in validate(project, "--no-code", code=1, run=run)


@pytest.mark.parametrize(
    "verifier", [{"fn_name": "regex_match", "expected": "a(b"}, {"fn_name": "exact_match", "expected": ""}]
)
def test_verifiers_that_can_never_grade_are_refused_in_benchmarks_and_in_training(project, minimal_run, verifier):
    bad = {"task_id": "bad", "instruction": "say it", "verifier": {"kind": "in_process", **verifier}}
    good = {"task_id": "good", "instruction": "say x", "verifier": {**bad["verifier"], "expected": "x"}}
    project.write_rows("bench/tasks.jsonl", [good, bad])
    told = validate(project, code=1, metadata={"benchmark": {"path": "bench"}})
    assert "tasks.jsonl:2: task 'bad'" in told and verifier["fn_name"] in told
    run = minimal_run(algorithm={"kind": "rl", "params": {"max_steps": 1}}, data={"path": "bench/tasks.jsonl"})
    told = validate(project, code=1, run=run)
    assert "run.data" in told and "task 'bad'" in told and verifier["fn_name"] in told


def test_a_broken_line_of_a_file_that_several_runs_read_is_one_problem(project, minimal_run):
    with (project.root / "data/train.jsonl").open("a") as file:
        file.write('{"prompt": "x", "completion": \n')
    runs = [minimal_run(name=f"r{n}") for n in range(3)]
    for run in runs:
        run["algorithm"] = {"kind": "sft", "params": {"learning_rate": 0.001, "max_steps": 2}}
    path = project.config(runs=runs, run=None)
    done = project.evsys("validate", path)
    assert done.returncode == 1 and ": 1 problem\n" in done.stderr, done.stderr
    assert done.stderr.count("not valid JSON (Expecting value at column 30)") == 1
