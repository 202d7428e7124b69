"""Models and agents at the table: what they are told, what is read from them, and what they cannot do."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import pytest

from evsys_sdk.errors import Cancelled, EvsysError
from evsys_sdk.inference.base import AskingClient, Completion
from evsys_sdk.registry import inference
from evsys_sdk.research.proposers import command
from evsys_sdk.research.proposers.command import AgentSession, AgentUsage, CommandProposer, ProjectCopy
from evsys_sdk.research.proposers.llm import LlmProposer
from evsys_sdk.research.question import question_text, read_answer
from evsys_sdk.research.settings import Setting
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import Effect, Proposal, ResearchState, Trial

RECIPE = {"algorithm": {"kind": "sft", "params": {"learning_rate": 0.001}}}
GOOD = {"changes": {"algorithm.params.learning_rate": 0.01}, "claim": "Faster.", "confidence": 0.6}


def trial(number: int, *, decision="first", **more) -> Trial:
    proposal = Proposal(parent=0, changes=more.pop("changes", {}), claim="c", operator="config")
    return Trial(
        number=number, proposal=proposal, proposer="config", recipe=RECIPE, status="completed", score=0.5,
        decision=decision, **more,
    )  # fmt: skip


STATE = ResearchState(
    trials=[
        trial(0),
        trial(1, decision="discarded", changes={"algorithm.params.learning_rate": 0.5}, why="worse",
              effect=Effect(difference=-0.2)),
    ],
    metric="val.pass@1", direction="max", context="# What was tried here\n",
)  # fmt: skip
RATE = Setting(path="algorithm.params.learning_rate", low=1e-5, high=1.0, log=True)
SPACE = Space(base=RECIPE, settings=(RATE,), free=frozenset(["algorithm.params.learning_rate"]))


def test_a_question_has_recipe_bounds_history_and_decisions():
    text = question_text(STATE, SPACE, random.Random(0))
    for part in ('"learning_rate": 0.001', "1e-05 to 1, on a logarithmic scale", "What was tried here",
                 '{"algorithm.params.learning_rate": 0.5}: discarded', "worse"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("I give up.", "no JSON object"),
        ('{"changes": {}, "claim": "x"}', "changes"),
        (json.dumps({"changes": {"model.name": "gpt"}, "claim": "x"}), "is not in research.space"),
        (json.dumps({**GOOD, "confidence": 3}), "confidence"),
    ],
)
def test_an_answer_that_is_no_legal_proposal_is_refused_with_its_reason(text, told):
    with pytest.raises(EvsysError, match=told):
        read_answer(text, RECIPE, SPACE)


def test_an_answer_is_found_among_other_text():
    found = read_answer(f"Thinking {{about}} it...\n```json\n{json.dumps(GOOD)}\n```", RECIPE, SPACE)
    assert found.changes == GOOD["changes"] and found.confidence == 0.6


@pytest.fixture
def scripted_client(monkeypatch):
    asked = []

    class Client(AskingClient):
        answers: tuple[str, ...] = ()

        async def _ask(self, question):
            asked.append(question.messages)
            return Completion(text=self.answers[len(asked) - 1], input_tokens=100, output_tokens=10, cost_usd=0.5)

    monkeypatch.setattr(inference, "entries", dict(inference.entries))
    inference.register("scripted_answers")(Client)
    Client.asked = asked
    return Client


def test_an_illegal_answer_is_shown_its_problems_once_and_both_are_paid_for(scripted_client):
    scripted_client.answers = (
        '{"changes": {"model.name": "x"}, "claim": "y"}',
        json.dumps(GOOD),
    )
    proposal = LlmProposer(inference={"kind": "scripted_answers"}).propose(STATE, SPACE, random.Random(0))
    assert proposal.changes == GOOD["changes"]
    assert (proposal.tokens, proposal.usd, proposal.operator) == (220, 1.0, "agent")
    assert "is not in research.space" in scripted_client.asked[1][-1]["content"]


def test_a_model_that_answers_rubbish_twice_has_proposed_nothing(scripted_client):
    scripted_client.answers = (
        "no",
        "no",
        "no",
    )
    proposal = LlmProposer(inference={"kind": "scripted_answers"}).propose(STATE, SPACE, random.Random(0))
    assert proposal.changes == {} and proposal.tokens == 220 and len(scripted_client.asked) == 2


def test_the_mock_client_proposes_something_legal():
    proposal = LlmProposer(inference={"kind": "mock"}).propose(STATE, SPACE, random.Random(0))
    assert list(proposal.changes) == ["algorithm.params.learning_rate"]


def agent(tmp_path: Path, body: str, **params) -> CommandProposer:
    """A coding agent made of Python; `QUESTION` is what it read from stdin."""
    script = tmp_path / "agent.py"
    head = "import json, os, sys, time, subprocess\nfrom pathlib import Path\nQUESTION = sys.stdin.read()\n"
    script.write_text(head + f"GOOD = {GOOD!r}\n" + body)
    proposer = CommandProposer(argv=[sys.executable, str(script)], **params)
    root = tmp_path / "project"
    (root / "data/test").mkdir(parents=True)
    (root / "data/test/tasks.jsonl").write_text("secret answers")
    (root / "data/train.jsonl").write_text("rows")
    (root / ".env").write_text("OPENAI_API_KEY=sk-1")
    (root / "link").symlink_to(root / "data/test")
    proposer.attach(ProjectCopy(root=root, hidden=(root / "data/test",)), lambda: False)
    return proposer


WRITES = "Path('proposal.json').write_text(json.dumps(GOOD))\n"


def test_an_agent_reads_the_question_and_writes_its_proposal(tmp_path):
    usage = "print(json.dumps({'usage': {'input_tokens': 7, 'output_tokens': 3}, 'total_cost_usd': 0.25}))\n"
    proposer = agent(tmp_path, "assert 'training recipe' in QUESTION\n" + WRITES + usage)
    proposal = proposer.propose(STATE, SPACE, random.Random(0))
    assert proposal.changes == GOOD["changes"]
    assert (proposal.tokens, proposal.usd) == (10, 0.25)


def test_an_agent_sees_no_test_tasks_and_no_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    body = """
seen = [str(path) for path in Path('.').rglob('*')] + list(os.environ)
GOOD['claim'] = json.dumps([s for s in seen if 'test' in s or 'KEY' in s or '.env' in s or 'link' in s])
assert Path('data/train.jsonl').exists()
"""
    proposal = agent(tmp_path, body + WRITES).propose(STATE, SPACE, random.Random(0))
    assert proposal.claim == "[]"


def test_what_an_agent_changes_in_the_project_has_no_effect(tmp_path):
    body = "Path('data/train.jsonl').write_text('poisoned')\n" + WRITES
    agent(tmp_path, body).propose(STATE, SPACE, random.Random(0))
    assert (tmp_path / "project/data/train.jsonl").read_text() == "rows"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("", "wrote no proposal.json"),
        ("Path('proposal.json').write_text('rubbish')", "no JSON object"),
        ("Path('proposal.json').symlink_to('/etc/passwd')", "wrote no proposal.json"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_rubbish_is_no_proposal(tmp_path, body, told):
    proposal = agent(tmp_path, body).propose(STATE, SPACE, random.Random(0))
    assert proposal.changes == {} and told in proposal.claim


def test_a_hanging_agent_is_ended_with_all_its_processes(tmp_path):
    body = f"""
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    proposal = agent(tmp_path, body, time_limit=3.0).propose(STATE, SPACE, random.Random(0))
    assert "was ended after 3 seconds" in proposal.claim
    assert _is_gone(int((tmp_path / "pid").read_text()))


def test_an_agent_over_its_token_limit_is_ended(tmp_path):
    body = "print(json.dumps({'usage': {'input_tokens': 900, 'output_tokens': 300}}), flush=True)\ntime.sleep(600)\n"
    proposal = agent(tmp_path, body, token_limit=1000).propose(STATE, SPACE, random.Random(0))
    assert "1,200 tokens" in proposal.claim and proposal.tokens == 1200


def test_a_stopped_research_ends_its_agent(tmp_path):
    proposer = agent(tmp_path, "time.sleep(600)")
    proposer.is_stopped = lambda: True
    with pytest.raises(Cancelled):
        proposer.propose(STATE, SPACE, random.Random(0))


def _is_gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("text", ['{"changes": ' + "[" * 9_000, '{"a": ' * 3_000, "{" * 20_000, '{"a": "' * 3_000])
def test_an_answer_without_end_is_no_proposal(text):
    with pytest.raises(EvsysError, match="no JSON object with changes"):
        read_answer(text, RECIPE, SPACE)


@pytest.mark.parametrize("amount", ["NaN", "-5", '"x"', "true", "1e999", "[" * 90_000])
def test_what_is_no_amount_gives_no_budget_back(amount):
    usage = AgentUsage()
    usage.read(f'{{"usage": {{"input_tokens": {amount}, "output_tokens": 10}}, "total_cost_usd": {amount}}}')
    assert (usage.tokens, usage.usd) in ((10, 0.0), (0, 0.0))


def test_an_agent_that_prints_without_end_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LONGEST_LINE", 1000)
    sizes = []
    monkeypatch.setattr(AgentUsage, "read", lambda self, line: sizes.append(len(line)))
    (tmp_path / "agent.py").write_text("print('x' * 1_000_000)")
    session = AgentSession(argv=[sys.executable, str(tmp_path / "agent.py")], folder=tmp_path, environment={},
                           time_limit=60, token_limit=None)  # fmt: skip
    assert session.run("", lambda: False) == ""
    assert sum(sizes) == 1_000_001 and max(sizes) == 1000
