"""Prompt search with a scripted model and a scripted reflector: decisions, budget, resume, and gepa's known traps."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evsys_sdk import registry, run_experiment
from evsys_sdk.algorithms.gepa_prompt import GepaPrompt
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.constants import CALLS_FILE
from evsys_sdk.data_types import with_system_prompt
from evsys_sdk.errors import BackendError, ConfigError, DataError
from evsys_sdk.inference.base import AskingClient, Completion
from evsys_sdk.record.models import ExperimentRecord
from evsys_sdk.report.figures import totals
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import training_context
from evsys_sdk.training.prompt_search import PROMPT_FILE, copied_share

CITIES = {
    "France": "PARIS", "Italy": "ROME", "Peru": "LIMA", "Norway": "OSLO",
    "Japan": "TOKYO", "Egypt": "CAIRO", "Cuba": "HAVANA", "Iran": "TEHRAN",
}  # fmt: skip
GOOD = "Answer with the city alone, in capital letters."
SEED = "Answer the user."
ROWS = [{"inputs": {"question": f"Capital of {land}?"}, "expected": city} for land, city in CITIES.items()]


class Capitals(AskingClient):
    """Knows every city, and writes capitals only where the prompt says so."""

    calls: ClassVar[Counter[str]] = Counter()
    fail_after: int | None = None
    error: BaseException = KeyboardInterrupt()

    async def _ask(self, question):
        cls = type(self)
        if cls.fail_after is not None and sum(cls.calls.values()) >= cls.fail_after:
            raise cls.error
        cls.calls[json.dumps(question.messages)] += 1
        return Completion(text=self.answer(question.messages), cost_usd=0.001)

    def answer(self, messages):
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        city = CITIES[messages[-1]["content"].removeprefix("Capital of ").removesuffix("?")]
        return city if "capital letters" in system else city.lower()


class Reflector(Capitals):
    """Writes a useless prompt, then the good one, and shares the count of calls with `Capitals`."""

    proposals: tuple[str, ...] = ("Think about it.", GOOD)
    seen: ClassVar[list[str]] = []

    def answer(self, messages):
        Reflector.seen.append(messages[-1]["content"])
        return f"```\n{self.proposals[(len(Reflector.seen) - 1) % len(self.proposals)]}\n```"


@pytest.fixture(autouse=True)
def clients(monkeypatch):
    """Clients that a test registers do not outlive it."""
    registry.load_all()
    before = dict(registry.inference.entries)
    monkeypatch.setattr(Capitals, "calls", Counter())
    monkeypatch.setattr(Capitals, "fail_after", None)
    monkeypatch.setattr(Reflector, "seen", [])
    registry.register_inference("capitals")(Capitals)
    registry.register_inference("reflector")(Reflector)
    yield
    registry.inference.entries.clear()
    registry.inference.entries.update(before)


def answer_with(client):
    """The settings that make this class the task model."""
    registry.register_inference("another")(client)
    return {"task_model": {"kind": "another"}}


def search(folder, *, rows=ROWS, resume=False, seed=7, **params):
    settings = {
        "max_metric_calls": 80,
        "task_model": {"kind": "capitals"},
        "reflection_model": {"kind": "reflector"},
        **params,
    }
    ctx = training_context(folder, rows, rollouts=InProcessRolloutEngine(), seed=seed, resume=resume)
    return GepaPrompt(**settings).train(ctx)


def test_the_search_finds_the_prompt_that_solves_the_rows(tmp_path):
    result = search(tmp_path)
    assert result.status == "completed"
    assert json.loads((tmp_path / PROMPT_FILE).read_text())["system_prompt"] == GOOD
    assert result.extras["prompt"] == GOOD
    assert result.metrics["seed_score"] == 0.0 and result.metrics["prompt_score"] == 1.0
    assert result.extras["prompt_search"]["outcome"] == "a finalist scored better than the seed prompt"
    assert result.metrics["cost_usd"] == pytest.approx(0.001 * sum(Capitals.calls.values()))
    assert result.artifacts == {"prompt": str(tmp_path / PROMPT_FILE)}, "a hosted model leaves no weights"


def test_the_weights_of_the_run_answer_where_no_task_model_is_named(tmp_path):
    chats = [
        {"messages": [*system, {"role": "user", "content": f"Capital of {land}?"}], "target_assistant": said}
        for land, city in list(CITIES.items())[:4]
        for system, said in (([{"role": "system", "content": GOOD}], city), ([], city.lower()))
    ]
    taught = SFT(num_epochs=40, learning_rate=1e-3).train(training_context(tmp_path / "taught", chats))
    rows = ROWS[:4]
    ctx = training_context(
        tmp_path / "search", rows, rollouts=InProcessRolloutEngine(), start_from=taught.artifacts["final_checkpoint"]
    )
    result = GepaPrompt(max_metric_calls=80, max_tokens=12, reflection_model={"kind": "reflector"}).train(ctx)
    assert result.extras["prompt"] == GOOD and result.metrics["prompt_score"] == 1.0
    assert {"final_checkpoint", "final_sampler", "prompt"} <= result.artifacts.keys()


def spend(folder, usd):
    """The search as an experiment that may spend so many dollars: its record, and the dollars that were charged."""
    config = {
        "name": "capitals",
        "output_dir": str(folder),
        "budget": {"usd": usd},
        "run": {
            "name": "r0",
            "data": {"source_kind": "in_memory", "rows": ROWS},
            "model": {"name": "table"},
            "algorithm": {
                "kind": "gepa_prompt",
                "params": {
                    "max_metric_calls": 80,
                    "task_model": {"kind": "capitals"},
                    "reflection_model": {"kind": "reflector"},
                },
            },
            "backend": {"kind": "mock", "params": {"latency_ms": 0}},
        },
    }
    before = sum(Capitals.calls.values())
    run_experiment(config)
    path = folder / "capitals.experiment_result.json"
    return path, ExperimentRecord.load(path), 0.001 * (sum(Capitals.calls.values()) - before)


def test_what_a_search_costs_is_the_budget_s_and_the_record_s(tmp_path):
    path, record, charged = spend(tmp_path, 10.0)
    assert record.status == "completed" and charged > 0.02
    assert record.budget["spent"]["usd"] == pytest.approx(charged)
    assert totals(path.with_name("capitals.journal.sqlite"), {"capitals/r0"}).usd == pytest.approx(charged)


def test_a_spent_budget_stops_the_search_with_a_record_and_a_larger_one_goes_on_from_there(tmp_path):
    whole, _, total = spend(tmp_path / "whole", 10.0)
    Reflector.seen.clear()
    path, record, first = spend(tmp_path / "cut", 0.01)
    assert record.status == "cancelled" and "the budget is spent: 0.01" in record.runs[0].error
    assert 0.01 <= first < total and record.budget["spent"]["usd"] == pytest.approx(first)
    _, record, more = spend(tmp_path / "cut", 0.01)
    assert more == 0 and record.status == "cancelled", "the budget is the experiment's, over all of its processes"
    path, record, more = spend(tmp_path / "cut", 10.0)
    assert record.status == "completed" and first + more == pytest.approx(total), "nothing is paid for twice"
    assert record.budget["spent"]["usd"] == pytest.approx(total)
    assert totals(path.with_name("capitals.journal.sqlite"), {"capitals/r0"}).usd == pytest.approx(total)
    prompts = [(folder.parent / "r0" / PROMPT_FILE).read_text() for folder in (whole, path)]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BackendError("the server is gone")], ids=["kill", "outage"])
def test_a_search_that_was_stopped_at_any_call_decides_the_same_and_asks_nothing_twice(tmp_path, monkeypatch, error):
    whole = search(tmp_path / "whole")
    asked, total = Capitals.calls.copy(), sum(Capitals.calls.values())
    assert total > 20
    for stop in range(0, total, 3):
        folder = tmp_path / str(stop)
        monkeypatch.setattr(Capitals, "calls", Counter())
        monkeypatch.setattr(Reflector, "seen", [])
        monkeypatch.setattr(Capitals, "error", error)
        monkeypatch.setattr(Capitals, "fail_after", stop)
        with pytest.raises(type(error)):
            search(folder)
        monkeypatch.setattr(Capitals, "fail_after", None)
        # The reflector's script follows from what it wrote before: those answers are in the journal.
        lines = (folder / CALLS_FILE).read_text().splitlines()
        Reflector.seen[:] = [line for line in lines if "```" in line]
        again = search(folder, resume=True)
        assert again.metrics == pytest.approx(whole.metrics) and again.extras == whole.extras
        # A kill loses the answers that are under way: at most one batch of 4 rows x 2 samples. An outage loses none.
        repeated = sum((Capitals.calls - asked).values())
        assert repeated <= (8 if isinstance(error, KeyboardInterrupt) else 0), f"stopped after {stop} calls"


def test_half_a_line_at_the_end_of_the_journal_is_asked_again(tmp_path):
    whole = search(tmp_path / "a")
    before = sum(Capitals.calls.values())
    path = tmp_path / "a" / CALLS_FILE
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 20])
    Reflector.seen[:] = [line for line in path.read_text().splitlines() if "```" in line]
    again = search(tmp_path / "a", resume=True)
    assert again.extras == whole.extras
    assert sum(Capitals.calls.values()) - before == 1
    assert len(path.read_bytes()) == len(content)


def test_an_outage_ends_the_search_and_is_not_a_wrong_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(Capitals, "fail_after", 0)
    monkeypatch.setattr(Capitals, "error", BackendError("503 from the server"))
    with pytest.raises(BackendError, match=r"got no answer .infra_error.: .*503 from the server"):
        search(tmp_path)


def test_an_outage_of_the_reflecting_model_ends_the_search(tmp_path, monkeypatch):
    async def broken(self, question):
        raise BackendError("no reflection today")

    monkeypatch.setattr(Reflector, "_ask", broken)
    with pytest.raises(BackendError, match="no reflection today"):
        search(tmp_path)


def test_a_perfect_seed_is_reported_as_saturated(tmp_path):
    result = search(tmp_path, seed_prompt=GOOD)
    assert result.extras["prompt"] == GOOD and result.metrics["reflections"] == 0
    assert result.extras["prompt_search"]["outcome"].startswith("saturated: ")


def test_the_seed_stays_where_no_finalist_is_better_on_new_samples(tmp_path):
    class Lucky(Capitals):
        """Right on its first answer to every chat, wrong afterwards: every prompt but the seed looks good once."""

        def answer(self, messages):
            first = Capitals.calls[json.dumps(messages)] == 1
            city = CITIES[messages[-1]["content"].removeprefix("Capital of ").removesuffix("?")]
            return city if first and messages[0]["content"] != SEED else city.lower()

    result = search(tmp_path, **answer_with(Lucky))
    table = result.extras["prompt_search"]["finalists"]
    assert max(one["search_score"] for one in table) == 1.0, "the search believed in a prompt"
    assert result.extras["prompt"] == SEED and result.metrics["prompt_score"] == 0.0
    assert result.extras["prompt_search"]["outcome"] == "no finalist scored better than the seed"


def test_with_several_samples_a_gain_within_the_scatter_of_a_row_is_not_accepted(tmp_path, monkeypatch):
    class Coin(Capitals):
        """Each answer to a chat is right every other time, whatever the prompt; the first for a new prompt is right."""

        def answer(self, messages):
            city = CITIES[messages[-1]["content"].removeprefix("Capital of ").removesuffix("?")]
            turn = Capitals.calls[json.dumps(messages)] + (messages[0]["content"] == SEED)
            return city if turn % 3 == 1 else city.lower()

    several = {"num_samples": 2, "max_metric_calls": 120, **answer_with(Coin)}
    lenient = search(tmp_path / "lenient", acceptance_z=0, **several)
    monkeypatch.setattr(Capitals, "calls", Counter())
    strict = search(tmp_path / "strict", acceptance_z=4, **several)
    assert strict.metrics["prompts_kept"] == 1 < lenient.metrics["prompts_kept"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(1, 120), rows=st.integers(2, 8), batch=st.integers(1, 4), samples=st.integers(1, 2),
    fraction=st.floats(0.1, 0.9),
)  # fmt: skip
def test_the_search_never_asks_for_more_than_its_budget(tmp_path_factory, budget, rows, batch, samples, fraction):
    Capitals.calls.clear()
    Reflector.seen.clear()
    folder, given = tmp_path_factory.mktemp("budget"), {"num_samples": samples, "val_fraction": fraction}
    val = min(max(1, round(rows * fraction)), rows - 1)
    if budget < 2 * samples * (val + batch):
        with pytest.raises(DataError, match="raise it, or take fewer validation rows"):
            search(folder, rows=ROWS[:rows], max_metric_calls=budget, minibatch_size=batch, **given)
        assert not Capitals.calls, "refused before anything was asked"
        return
    result = search(folder, rows=ROWS[:rows], max_metric_calls=budget, minibatch_size=batch, **given)
    assert result.metrics["metric_calls"] <= budget
    asked = sum(Capitals.calls.values()) - len(Reflector.seen)
    assert asked == result.metrics["metric_calls"] + result.metrics["finalist_calls"]


def test_what_the_reflecting_model_sees_is_cut(tmp_path):
    long = [{"inputs": {"question": "Capital of France?", "notes": "x" * 50_000}, "expected": "PARIS"}] * 4

    class Talkative(Capitals):
        def answer(self, messages):
            return "no" * 20_000

    search(tmp_path, rows=long, feedback_chars=400, max_metric_calls=20, **answer_with(Talkative))
    assert Reflector.seen and max(map(len, Reflector.seen)) < 10_000


def test_a_prompt_that_copies_training_rows_is_named(tmp_path, monkeypatch, caplog):
    rows = [
        {"inputs": {"q": f"Capital of {land}? " + "one two three four five six seven eight nine ten"}, "expected": city}
        for land, city in CITIES.items()
    ]
    copied = "In capital letters: one two three four five six seven eight nine ten"

    class Knows(Capitals):
        def answer(self, messages):
            land = messages[-1]["content"].split("?")[0].removeprefix("Capital of ")
            return CITIES[land] if "capital letters" in messages[0]["content"] else "?"

    monkeypatch.setattr(Reflector, "proposals", (copied,))
    with caplog.at_level(logging.WARNING):
        result = search(tmp_path, rows=rows, **answer_with(Knows))
    assert result.extras["prompt"] == copied and result.metrics["copied_share"] > 0.2
    assert "copied from training rows" in caplog.text


def test_copied_share_counts_sequences_of_words():
    words = " ".join(f"w{n}" for n in range(16))
    assert copied_share(words, [words]) == 1.0
    assert copied_share("short prompt", [words]) == 0.0
    assert copied_share(f"{words} and eight more words that no row has at all", [words]) == pytest.approx(9 / 19)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_metric_calls": 3}, "one round with 4 validation rows takes 14; raise it"),
        ({"template": "{nothing}"}, "row 0: template does not fit its inputs .question.: KeyError"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_asked(tmp_path, params, message):
    with pytest.raises(DataError, match=message):
        search(tmp_path, **params)
    assert not Capitals.calls


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"reflection_model": {"kind": "nobody"}}, "nobody"),
        ({"reflection_model": {"kind": "reflector", "params": {"max_token": 3}}}, "max_token.*closest: max_tokens"),
        ({"verifier": {"kind": "exact_mtch"}}, "exact_match"),
    ],
)
def test_a_wrong_client_or_verifier_is_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        registry.algorithms.build(
            "gepa_prompt", {"max_metric_calls": 9, "reflection_model": {"kind": "reflector"}, **params}
        )


@pytest.mark.parametrize(
    "row", [{"inputs": {"question": "?"}}, {"messages": [{"role": "user", "content": "hi"}]}], ids=["inputs", "chat"]
)
def test_a_row_without_an_answer_is_refused_with_its_number(tmp_path, row):
    with pytest.raises(DataError, match=r"row 1: it .*so no answer to it can be graded"):
        search(tmp_path, rows=[ROWS[0], row])


def test_a_system_prompt_stands_before_the_chat_and_keeps_what_was_there():
    user = {"role": "user", "content": "hi", "tools": [{"name": "t"}]}
    assert with_system_prompt([user], None) == [user]
    first, second = with_system_prompt([user], "P")
    assert first == {"role": "system", "content": "P", "tools": [{"name": "t"}]} and "tools" not in second
    own = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    assert with_system_prompt(own, "P")[0] == {"role": "system", "content": "P\n\nS"}
