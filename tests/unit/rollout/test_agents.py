"""Which class an agent's name stands for, and what its constructor gets."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")

from harbor.agents.base import BaseAgent
from harbor.agents.options import AgentOptions

from evsys_sdk.checks.benchmarks import agent_problems
from evsys_sdk.errors import ConfigError, EvsysError, MissingDependency, UnknownKind
from evsys_sdk.protocols import AgentSpec
from evsys_sdk.registry import agents, register_agent
from evsys_sdk.rollout.agents import find_agent
from evsys_sdk.rollout.chat_agent import ChatAgent, PolicyAgent


class Mine(PolicyAgent):
    def __init__(self, *args, depth: int = 1, **kwargs):
        super().__init__(*args, **kwargs)

    async def run(self, instruction, environment, context): ...


class Bare(BaseAgent):
    """Takes what harbor gives, and nothing else."""

    def __init__(self, logs_dir, model_name=None):
        super().__init__(logs_dir, model_name)

    @staticmethod
    def name():
        return "bare"

    def version(self):
        return "1"

    async def setup(self, environment): ...
    async def run(self, instruction, environment, context): ...


class Strict(Bare):
    class Options(AgentOptions):
        depth: int = 1

    options_model = Options

    def __init__(self, logs_dir, model_name=None, **kwargs):
        BaseAgent.__init__(self, logs_dir, model_name, **kwargs)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    agents.names()
    monkeypatch.setattr(agents, "entries", dict(agents.entries))


@pytest.fixture
def project(monkeypatch):
    module = ModuleType("my_project_agents")
    module.Mine, Mine.__module__ = Mine, "my_project_agents"
    monkeypatch.setitem(sys.modules, "my_project_agents", module)
    yield
    Mine.__module__ = __name__


@pytest.mark.parametrize("path", ["my_project_agents.Mine", "my_project_agents:Mine"])
def test_a_class_is_found_by_its_path_with_dot_or_colon(project, path):
    found = find_agent(AgentSpec(kind=path, params={"depth": 3, "model_name": "m"}))
    assert found.cls is Mine and found.import_path == "my_project_agents:Mine"
    assert found.model_name == "m"
    assert found.arguments("p1") == {"depth": 3, "policy": "p1"}


def test_a_registered_agent_keeps_harbors_name_method():
    register_agent("mine")(Mine)
    assert find_agent(AgentSpec(kind="mine")).cls is Mine
    assert Mine.name() == "evsys-policy"


def test_the_chat_agent_is_there_by_name_and_its_settings_are_listed():
    assert find_agent(AgentSpec(kind="chat")).cls is ChatAgent
    assert set(agents.schema("chat")["properties"]) == {"max_turns", "tools", "bash_output_chars"}


def test_harbors_own_agents_are_known_by_their_names_and_are_not_told_of_a_policy():
    found = find_agent(AgentSpec(kind="oracle"))
    assert found.cls.__name__ == "OracleAgent" and "policy" not in found.arguments("p")


@pytest.mark.parametrize(("cls", "told"), [(Mine, True), (Bare, False), (Strict, False)])
def test_only_an_agent_that_can_take_it_is_told_of_the_policy(cls, told):
    register_agent("one")(cls)
    assert ("policy" in find_agent(AgentSpec(kind="one")).arguments("p")) == told


def test_a_class_that_no_import_finds_has_an_address_all_the_same():
    from harbor.utils.import_path import import_class

    class Here(Mine):
        pass

    register_agent("here")(Here)
    found = find_agent(AgentSpec(kind="here"))
    assert import_class(found.import_path) is Here


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("chatt", "closest: chat"),
        ("evsys_sdk.rollout.chat_agent.ChatAgnt", "closest: ChatAgent"),
        ("no_such_package.Agent", "no_such_package"),
        ("evsys_sdk.protocols.AgentSpec", "has no run"),
    ],
)
def test_an_agent_that_is_not_there_is_answered_with_the_nearest(kind, message):
    with pytest.raises(EvsysError, match=message):
        find_agent(AgentSpec(kind=kind))
    assert issubclass(UnknownKind, EvsysError)


def test_params_that_the_agent_does_not_know_are_refused_before_any_rollout():
    register_agent("strict")(Strict)
    with pytest.raises(ConfigError, match=r"deph.*unknown key; closest: depth"):
        find_agent(AgentSpec(kind="strict", params={"deph": 2}))


@pytest.mark.parametrize("kind", ["terminus-2", "harbor.agents.terminus_2:Terminus2"])
def test_a_wrong_param_of_harbors_own_agent_is_placed_and_said_in_our_words(kind):
    params = {"max_turnz": 3, "temperature": "warm"}
    problems = {problem.path: problem for problem in agent_problems(kind, params, "metadata.benchmark[0]")}
    assert sorted(problems) == [f"metadata.benchmark[0].agent_params.{name}" for name in ("max_turnz", "temperature")]
    unknown = problems["metadata.benchmark[0].agent_params.max_turnz"]
    assert (unknown.value, unknown.message) == (3, "unknown key; closest: max_turns")
    assert not any("harbor" in problem.message or "\n" in problem.message for problem in problems.values())


def test_a_misspelt_setting_of_the_chat_agent_is_answered_with_the_right_word():
    with pytest.raises(ConfigError, match="closest: max_turns"):
        find_agent(AgentSpec(kind="chat", params={"max_turn": 2}))


def test_without_harbor_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "harbor", None)
    with pytest.raises(MissingDependency, match=r"evsys-sdk\[harbor\]"):
        find_agent(AgentSpec(kind="chat"))
