"""`evaluate_model`: scores by exact answer and by alias, retries, artifacts, and nothing that is asked twice."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.errors import DataError, EvsysAuthError, EvsysError
from evsys_sdk.eval import (
    DEFAULT_SYSTEM,
    AliasMatcher,
    EvalArtifacts,
    EvalSummary,
    ModelEvalConfig,
    aevaluate_model,
    evaluate_model,
    format_summary_markdown,
    load_eval_dataset,
)
from evsys_sdk.stats.intervals import wilson_interval

ROWS = [
    {"id": "a", "prompt": "mail", "tool_slug": "SEND_MAIL"},
    {"id": "b", "prompt": "post", "tool_slug": "SEND_MAIL"},
    {"id": "c", "prompt": "write", "tool_slug": "SEND_MAIL"},
    {"id": "d", "prompt": "read", "tool_slug": "READ_MAIL"},
]
SAYS = {
    "mail": "<answer>SEND_MAIL</answer>",
    "post": "<answer>MAIL_SEND</answer>",
    "write": "<answer>WRITE_MAIL</answer>",
    "read": "I looked.\nI do not know.",
}
MATCHER = AliasMatcher({"SEND_MAIL": ["MAIL_SEND"]}, secondary={"SEND_MAIL": ["WRITE_MAIL"]})


async def no_pause(seconds):
    pass


QUICK = ModelEvalConfig(max_attempts=2, sleep=no_pause, model_name="m")


class Client:
    """An InferenceClient that inherits nothing; `broken` prompts fail the given number of times."""

    def __init__(self, broken=None):
        self.broken, self.asked = dict(broken or {}), []

    def generate(self, *, prompt, max_tokens, temperature, stop):
        self.asked.append((prompt, max_tokens, temperature, stop))
        if self.broken.get(prompt, 0) > 0:
            self.broken[prompt] -= 1
            raise OSError("lost")
        return SAYS[prompt]


def values(found: EvalArtifacts):
    return {score.metric: score.value for score in found.summary.scores}


def test_answers_are_scored_exactly_by_alias_and_by_secondary_alias():
    found = evaluate_model(Client(), ROWS, matcher=MATCHER, config=QUICK)
    assert values(found) == {"exact_pass@1": 0.25, "alias_pass@1": 0.5, "secondary_alias_pass@1": 0.75}
    exact = found.summary.scores[0]
    assert (exact.low, exact.high) == pytest.approx(wilson_interval(1, 4))
    assert (exact.n_tasks, exact.n_rollouts, exact.n_errors) == (4, 4, 0)
    assert [rollout.metadata["match"] for rollout in found.rollouts] == ["exact", "alias", "secondary", None]
    assert (found.summary.n_unreadable, found.summary.error) == (1, None)
    assert found.summary.metrics == values(found)


def test_without_secondary_aliases_there_is_no_secondary_score():
    found = evaluate_model(Client(), ROWS, config=QUICK)
    assert values(found) == {"exact_pass@1": 0.25, "alias_pass@1": 0.25}


def test_a_client_is_asked_with_the_settings():
    client = Client()
    evaluate_model(client, ROWS[:1], config=ModelEvalConfig(max_tokens=9, temperature=0.5, stop=("END",)))
    assert client.asked == [("mail", 9, 0.5, ["END"])]


def test_a_call_that_fails_once_is_tried_again_and_one_that_fails_for_good_is_no_wrong_answer():
    found = evaluate_model(Client({"mail": 1, "post": 9}), ROWS, matcher=MATCHER, config=QUICK)
    report = found.summary.retry_report
    assert (report.total_calls, report.total_retries, report.total_failures) == (4, 2, 1)
    assert (report.failures[0].key, report.failures[0].error) == ("row 1 (b)", "OSError: lost")
    lost = found.rollouts[1]
    assert (lost.status, lost.reward) == ("infra_error", None)
    alias = found.summary.scores[1]
    assert (alias.value, alias.n_errors) == (0.25, 1)
    assert found.summary.n_unreadable == 1


def test_when_every_call_fails_there_is_no_score():
    found = evaluate_model(Client({row["prompt"]: 9 for row in ROWS}), ROWS, config=QUICK)
    assert [score.value for score in found.summary.scores] == [None, None]
    assert found.summary.error.startswith("invalid: all 4 rollouts errored")


def test_a_refused_key_ends_the_evaluation_and_is_not_wrapped():
    class Refused:
        def generate(self, **settings):
            raise EvsysAuthError("the key was refused")

    with pytest.raises(EvsysAuthError):
        evaluate_model(Refused(), ROWS, config=QUICK)


def test_pass_at_k_is_over_the_samples_of_a_row():
    class Turns:
        """Right every other time."""

        def __init__(self):
            self.calls = 0

        async def agenerate(self, *, prompt, max_tokens, temperature, stop):
            self.calls += 1
            return "SEND_MAIL" if self.calls % 2 else "OTHER"

    config = ModelEvalConfig(num_samples=2, batch_size=1)
    found = evaluate_model(Turns(), ROWS[:2], config=config)
    assert values(found) == {
        "exact_pass@1": 0.5, "exact_pass@2": 1.0, "alias_pass@1": 0.5, "alias_pass@2": 1.0,
    }  # fmt: skip


def test_the_artifacts_lie_in_the_output_directory(tmp_path):
    found = evaluate_model(Client({"post": 9}), ROWS, matcher=MATCHER, output_dir=tmp_path / "out", config=QUICK)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "predictions.jsonl", "retry_report.json", "summary.json", "summary.md",
    ]  # fmt: skip
    lines = [json.loads(line) for line in found.predictions_path.read_text().splitlines()]
    assert [(line["predicted"], line["match"], line["correct"]) for line in lines] == [
        ("SEND_MAIL", "exact", True), (None, None, None), ("WRITE_MAIL", "secondary", False), (None, None, False),
    ]  # fmt: skip
    assert json.loads(found.retry_report_path.read_text())["failures"][0]["key"] == "row 1 (b)"
    assert EvalSummary.from_dict(json.loads(found.summary_path.read_text())).scores == found.summary.scores
    assert found.markdown_path.read_text() == format_summary_markdown(found.summary, title="Evaluation of m")


def test_the_markdown_says_scores_intervals_denominators_and_failures():
    found = evaluate_model(Client({"post": 9}), ROWS, matcher=MATCHER, config=QUICK)
    text = format_summary_markdown(found.summary, title="Ours")
    assert text.startswith("# Ours\n")
    assert "| exact_pass@1 | 0.2500 | 0.0456 to 0.6994 | 4 | 4 | 1 |" in text
    assert "- `row 1 (b)` after 2 tries: OSError: lost" in text
    assert "failed for good: 1." in text
    invalid = evaluate_model(Client({"mail": 9}), ROWS[:1], config=QUICK)
    assert "| exact_pass@1 | - | - | 1 | 1 | 1 |" in format_summary_markdown(invalid.summary)
    assert "**No valid score:**" in format_summary_markdown(invalid.summary)


class Kept(dict):
    def find(self, task_id, sample):
        return self.get((task_id, sample))

    def add(self, task_id, sample, rollout):
        if rollout.status == "ok":
            self[task_id, sample] = rollout


async def test_what_was_answered_before_is_not_asked_again_and_is_in_the_report():
    kept, second = Kept(), Client()
    await aevaluate_model(Client({"mail": 1, "read": 9}), ROWS, matcher=MATCHER, config=QUICK, finished=kept)
    found = await aevaluate_model(second, ROWS, matcher=MATCHER, config=QUICK, finished=kept)
    assert [prompt for prompt, *_ in second.asked] == ["read"]
    assert values(found)["alias_pass@1"] == 0.5
    assert (found.summary.retry_report.total_calls, found.summary.retry_report.total_retries) == (4, 1)


def test_a_dataset_puts_a_query_behind_the_system_prompt_and_leaves_other_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"query": "mail Bob", "tool_slug": "A"}, {"prompt": "mail", "query": "x", "answer": "B"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = load_eval_dataset(path)
    assert first["prompt"] == [{"role": "system", "content": DEFAULT_SYSTEM}, {"role": "user", "content": "mail Bob"}]
    assert second["prompt"] == "mail"
    assert load_eval_dataset(path, system=None)[0]["prompt"] == [{"role": "user", "content": "mail Bob"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert load_eval_dataset(tmp_path / "rows.json") == [first, second]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"query": "x", "tool_slug": "A"}\n{"query": "x"}\n', r"a\.jsonl:2: .*has no target"),
        ("a.jsonl", "", "has no rows"),
        ("a.json", '{"query": "x"}', "expected a list of objects"),
    ],
)
def test_a_dataset_that_cannot_be_asked_says_where(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_eval_dataset(tmp_path / name)


def test_rows_that_share_an_id_stay_distinct():
    tasks = [
        {"task_id": "t", "instruction": word, "verifier": {"fn_name": "exact_match", "expected": "SEND_MAIL"}}
        for word in ("mail", "post")
    ]
    found = evaluate_model(Client(), tasks, matcher=MATCHER, config=QUICK)
    assert len({rollout.task_id for rollout in found.rollouts}) == 2


def test_a_setting_that_makes_no_sense_is_refused():
    with pytest.raises(EvsysError, match="batch_size is at least 1"):
        ModelEvalConfig(batch_size=0)
    with pytest.raises(DataError, match="no rows"):
        evaluate_model(Client(), [])
