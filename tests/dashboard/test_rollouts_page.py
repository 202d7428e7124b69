"""What the model said: filters, transcripts, and the same task across arms and steps."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("django_ready")


@pytest.fixture
def evaluation(project: Any) -> Any:
    from evsys_dashboard.models import EvalRow, ExperimentRow, GenerationRow

    row = ExperimentRow.objects.create(id=f"e-{project.pk}", project=project, name="exp", created=1.0, updated=1.0)
    run = GenerationRow.objects.create(
        id=f"g-{project.pk}", project=project, experiment=row, name="a__s1", arm="a", created=1.0, updated=1.0
    )
    return EvalRow.objects.create(
        id=f"v-{project.pk}", project=project, generation=run, name="words", split="val", created=1.0, n_rollouts=1
    )


def add(one: Any, task: str, **fields: Any) -> Any:
    from evsys_dashboard.models import PredictionRow

    given = {"reward": 1.0, "status": "ok", "completion": "", "body": {}, "created": 1.0} | fields
    return PredictionRow.objects.create(
        id=f"{one.pk}-{task}", project=one.project, generation=one.generation, eval=one, task_id=task, **given
    )


def page_of(visitor: Any, one: Any, **query: str) -> str:
    answer = visitor.get(f"/p/{one.project_id}/rollouts", {"run": one.generation_id, **query})
    assert answer.status_code == 200
    return answer.content.decode()


def tasks_on(text: str) -> list[str]:
    import re

    return re.findall(r'data-rollout="[^"]*"[^>]*><span class="clip">([^<]*)<', text)


@pytest.mark.parametrize(
    ("query", "tasks"),
    [
        ({}, ["errs", "fails", "none", "passes"]),
        ({"passed": "1"}, ["passes"]),
        ({"passed": "0"}, ["errs", "fails", "none"]),
        ({"status": "infra_error"}, ["errs"]),
        ({"key": "topic:sums"}, ["fails", "passes"]),
        ({"key": "topic:sums", "passed": "0"}, ["fails"]),
        ({"q": "PINEAPPLE"}, ["fails"]),
        ({"q": "käse"}, ["passes"]),
        ({"task": "none"}, ["none"]),
        ({"q": "100%"}, []),
        ({"key": "a'); DROP TABLE dashboard_prediction; --:x"}, []),
    ],
)
def test_filters_are_in_the_url(visitor, evaluation, query, tasks):
    add(evaluation, "passes", body={"metadata": {"topic": "sums"}, "turns": ["Käse"]})
    add(evaluation, "fails", reward=0.0, completion="a pineapple", body={"metadata": {"topic": "sums"}})
    add(evaluation, "errs", reward=None, status="infra_error", body={"error": "no answer"})
    add(evaluation, "none", reward=None)
    assert tasks_on(page_of(visitor, evaluation, **query)) == tasks


def test_a_transcript_has_roles_calls_tokens_reward_reasons_and_the_expected_answer(visitor, evaluation):
    call = '<tool_call>{"name": "search", "arguments": {"q": "moon"}}</tool_call>'
    body = {
        "question": {"messages": [{"role": "system", "text": "Be brief."}, {"role": "user", "text": "How far?"}],
                     "expected": "384,400 km"},
        "turns": [{"role": "assistant", "text": call, "prompt_tokens": 20, "completion_tokens": 9},
                  {"role": "tool", "content": "384 thousand"}, {"role": "assistant", "text": "Far."}],
        "metadata": {"verifier": {"reason": "no number found"}, "sample": 2},
        "error": "agent ran out of turns", "seconds": 2.5, "cost_usd": 0.004,
    }  # fmt: skip
    add(evaluation, "moon", reward=0.25, status="agent_error", body=body)
    text = page_of(visitor, evaluation)
    for words in ("Be brief.", "How far?", "384,400 km", "<strong>search</strong>", "&quot;moon&quot;", "384 thousand",
                  "20 tokens read", "9 tokens written", "no number found", "agent ran out of turns", "0.250",
                  'class="turn tool"', "$0.004", "agent_error"):  # fmt: skip
        assert words in text, words


def test_a_text_of_a_megabyte_is_folded_and_cut_and_whole_in_the_download(visitor, evaluation):
    add(evaluation, "long", body={"turns": ["x" * 1_000_000 + "END"]})
    text = page_of(visitor, evaluation)
    assert len(text) < 200_000 and "98,000 more characters" in text and "900,003 characters more" in text
    whole = visitor.get(f"/p/{evaluation.project_id}/rollouts/{evaluation.pk}-long.txt").content
    assert whole.rstrip().endswith(b"END") and len(whole) > 1_000_000


def test_pictures_are_offered_behind_a_click_and_nothing_is_fetched_from_elsewhere(visitor, evaluation):
    good = "data:image/png;base64,iVBORw0KGgo="
    urls = [good, "https://elsewhere.example/x.png", "data:text/html;base64,PGI+", "data:image/svg+xml;base64,PHN2Zz4="]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    add(evaluation, "picture", body={"question": {"messages": [{"role": "user", "content": content}]}})
    text = page_of(visitor, evaluation)
    assert text.count("data-picture=") == 1 and f'data-picture="{good}"' in text
    assert "<img" not in text and "[image: https://elsewhere.example/x.png]" in text


def test_next_and_previous_follow_the_filter(visitor, evaluation):
    for name in "abc":
        add(evaluation, name, reward=0.0 if name != "b" else 1.0)
    text = page_of(visitor, evaluation, passed="0")
    assert tasks_on(text) == ["a", "c"]
    assert f"rollout={evaluation.pk}-c" in text.partition("data-next")[0].rpartition("href=")[2]
    assert "data-previous" not in text


def test_a_task_is_shown_across_arms_and_steps(visitor, sweep):
    row = sweep["sweep"]
    run = row.generations.get(name="half__s42")
    one = run.evals.get(step=30)
    query = {"run": run.pk, "eval": one.pk, "task": "god", "side": "1"}
    text = visitor.get(f"/p/{row.project_id}/rollouts", query).content.decode()
    assert text.count('class="turn assistant"') == 24  # 2 arms x 3 seeds x 4 steps
    assert "half__s44" in text and "all__s43" in text and "untrained" in text and "step 20" in text


def test_a_run_that_was_not_scored_and_a_filter_without_a_match_say_so(visitor, evaluation):
    assert "No rollouts are stored" in page_of(visitor, evaluation)
    add(evaluation, "a")
    assert "None of the 1 rollout fits" in page_of(visitor, evaluation, q="nothing like it")
    evaluation.predictions.all().delete()
    evaluation.delete()
    answer = visitor.get(f"/p/{evaluation.project_id}/rollouts", {"run": evaluation.generation_id})
    assert b"No evaluation yet" in answer.content


def test_the_page_without_a_run_offers_the_runs(visitor, sweep):
    text = visitor.get(f"/p/{sweep['sweep'].project_id}/rollouts").content.decode()
    assert "sweep / half__s42" in text


@pytest.fixture
def stranger(evaluation: Any) -> Any:
    """Another project, whose client sent a rollout that names the evaluation of this one."""
    from evsys_dashboard.models import ExperimentRow, GenerationRow, PredictionRow, Project

    other = Project.objects.create(id=f"other-{evaluation.project_id}", name="Other", created=1.0)
    row = ExperimentRow.objects.create(id=f"e-{other.pk}", project=other, name="exp", created=1.0, updated=1.0)
    run = GenerationRow.objects.create(
        id=f"g-{other.pk}", project=other, experiment=row, name="b__s1", arm="b", created=1.0, updated=1.0
    )
    PredictionRow.objects.create(
        id=f"p-{other.pk}", project=other, generation=run, eval=evaluation, task_id="shared", reward=1.0, status="ok",
        completion="of a stranger", created=1.0,
    )  # fmt: skip
    yield run
    other.delete()


def test_an_evaluation_of_another_project_is_shown_nowhere(visitor, evaluation, stranger):
    from evsys_dashboard.models import EvalRow

    evaluation.step = 4321
    evaluation.save()
    own = EvalRow.objects.create(
        id=f"v-{stranger.pk}", project=stranger.project, generation=stranger, name="words", split="val", created=1.0,
        n_rollouts=1, step=7,
    )  # fmt: skip
    add(own, "shared", completion="of the project")
    query = {"run": stranger.pk, "task": "shared", "rollout": f"p-{stranger.project_id}"}
    for more in ({}, {"side": "1"}, {"eval": evaluation.pk}, {"eval": evaluation.pk, "side": "1"}):
        text = visitor.get(f"/p/{stranger.project_id}/rollouts", query | more).content.decode()
        assert "of the project" in text and "step 7" in text, more
        assert "4,321" not in text and "of a stranger" not in text, more


def test_a_rollout_of_another_project_does_not_count_in_a_comparison(evaluation, stranger):
    from evsys_dashboard.pages.compare import stored_eval

    add(evaluation, "own")
    assert [one.task_id for one in stored_eval(evaluation, "a__s1").rollouts] == ["own"]


def test_scores_are_broken_down_by_what_tasks_say_and_rollouts_filtered_by_it(visitor, sweep):
    row = sweep["sweep"]
    run = row.generations.get(name="half__s42")
    one = run.evals.get(step=30)
    one.breakdown = {"first": {"b": [{"metric": "pass@1", "value": 1.0}]}}
    one.save()
    query = {"run": run.pk, "eval": one.pk}
    text = visitor.get(f"/p/{row.project_id}/rollouts", query).content.decode()
    assert '<option value="first:b">' in text and "key=first%3Ab" in text  # among the filters, and as a link
    text = visitor.get(f"/p/{row.project_id}/rollouts", query | {"key": "first:b"}).content.decode()
    assert tasks_on(text) == ["bab", "bad", "baf"]


def test_what_tools_said_stands_between_the_turns(visitor, evaluation):
    from evsys_sdk.protocols import Rollout, Turn
    from evsys_sdk.record.dashboard.payloads import prediction_fields

    tokens: Any = {"prompt_tokens": [1], "completion_tokens": [2], "logprobs": []}
    turns = [Turn(**tokens, text="call add"), Turn(**tokens, text="the sum is 3", observation="3")]
    [fields] = prediction_fields(evaluation.pk, [Rollout(task_id="sum", turns=turns, reward=1.0)], {})
    add(evaluation, "sum", completion=fields["completion"], body={"turns": fields["turns"]})
    text = page_of(visitor, evaluation)
    assert text.index("call add") < text.index('class="turn tool"') < text.index("the sum is 3")


def test_side_by_side_says_how_many_rollouts_it_leaves_out(visitor, sweep, monkeypatch):
    from evsys_dashboard.pages import rollouts

    row = sweep["sweep"]
    run = row.generations.get(name="half__s42")
    query = {"run": run.pk, "eval": run.evals.get(step=30).pk, "task": "god", "side": "1"}
    assert "of this task are shown" not in visitor.get(f"/p/{row.project_id}/rollouts", query).content.decode()
    monkeypatch.setattr(rollouts, "MOST_SIDES", 5)
    text = visitor.get(f"/p/{row.project_id}/rollouts", query).content.decode()
    assert "The first 5 of 24 rollouts of this task are shown" in text
