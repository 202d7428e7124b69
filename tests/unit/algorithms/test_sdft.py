"""Self-distillation on the mock backend.

The mock cannot follow a demonstration by itself, so the weights these tests start from have been taught to: asked with
the demonstration they give its answer, asked without they babble.
"""

from __future__ import annotations

import pytest

from evsys_sdk.algorithms.sdft import SDFT
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.errors import BackendError, ConfigError, DataError
from evsys_sdk.registry import algorithms
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training_api import Capabilities

WORDS = {"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Norway": "Oslo"}
TEMPLATE = SDFT.Config().demonstration_template
FAST = {"learning_rate": 1e-3, "max_tokens": 12, "batch_size": 4}
EVERYTHING = {"prompt_logprobs": True, "topk_prompt_logprobs": True}


def _question(land):
    return f"Capital of {land}?"


def _chats():
    return [
        {"messages": [{"role": "user", "content": _question(land)}], "target_assistant": city}
        for land, city in WORDS.items()
    ]


def _shown(land, city):
    return TEMPLATE.replace("{question}", _question(land)).replace("{demonstration}", city)


def _context(folder, rows=None, **given):
    return training_context(folder, rows or _chats(), rollouts=InProcessRolloutEngine(), **given)


@pytest.fixture(scope="module")
def follower(tmp_path_factory):
    """Weights that follow a demonstration."""
    folder = tmp_path_factory.mktemp("follower")
    rows = [
        {"messages": [{"role": "user", "content": _shown(land, city)}], "target_assistant": city}
        for land, city in WORDS.items()
    ]
    result = SFT(num_epochs=40, learning_rate=1e-3).train(training_context(folder, rows))
    return result.artifacts["final_checkpoint"]


def _rewards(ctx):
    return ctx.log_store.curve("reward/mean")


@pytest.mark.parametrize(
    "params",
    [{}, {"num_samples": 2, "async_steps": 1}, {"teacher": "ema", "ema_decay": 0.9}, {"top_k": 3}],
    ids=str,
)
def test_the_demonstrated_answer_is_learnt_without_the_demonstration(tmp_path, follower, params):
    ctx = _context(tmp_path, start_from=follower)
    SDFT(**{"max_steps": 16, "num_samples": 2, **FAST, **params}).train(ctx)
    kl = ctx.log_store.curve("teacher_kl")
    assert _rewards(ctx)[0] < 0.5 and sum(_rewards(ctx)[-3:]) / 3 > 0.9
    assert kl[0] > 0.2 and kl[-1] < 0.05


def test_reverse_kl_draws_the_student_to_what_the_teacher_likes(tmp_path, follower):
    ctx = _context(tmp_path, start_from=follower)
    SDFT(max_steps=14, num_samples=8, kl="reverse", **FAST).train(ctx)
    kl = ctx.log_store.curve("teacher_kl")
    assert sum(_rewards(ctx)[-3:]) / 3 > _rewards(ctx)[0] + 0.2 and kl[-1] < kl[0]


def test_the_untrained_model_as_teacher_makes_the_student_forget(tmp_path, follower):
    ctx = _context(tmp_path, start_from=follower)
    SDFT(max_steps=16, num_samples=2, teacher="base", **FAST).train(ctx)
    assert sum(_rewards(ctx)[-3:]) == 0.0


def _first_data(backend):
    return next(event for event in backend.events if event.call == "forward_backward").args[0]


def test_the_teacher_sees_the_demonstration_and_the_students_own_words(tmp_path, follower):
    backend = RecordingBackend()
    ctx = _context(tmp_path, _chats()[:1], start_from=follower, backend=backend)
    SDFT(max_steps=1, num_samples=1, **FAST).train(ctx)
    asked = [e.args for e in backend.events if e.what == "submitted" and e.call == "sample"]
    student, teacher = asked[0][0].tokens, next(args for args in asked if 20 in args[3:])[0].tokens
    tokenizer = ctx.extras["backend_handles"]["service"].get_tokenizer()
    shown = [{"role": "user", "content": _shown("France", "Paris")}]
    prompt = tokenizer.apply_chat_template(shown, add_generation_prompt=True)
    assert list(teacher[: len(prompt)]) == prompt
    (datum,) = _first_data(backend)
    assert datum.model_input.tokens[: len(student)] == student
    said = datum.model_input.tokens[len(student) :]
    assert teacher[len(prompt) :][: len(said)] == said, "the same tokens, not the same text"


def test_targets_stand_on_the_answer_and_not_on_its_first_tokens(tmp_path, follower):
    weights = {}
    for skip in (0, 2):
        backend = RecordingBackend()
        ctx = _context(tmp_path, _chats()[:1], start_from=follower, backend=backend)
        SDFT(max_steps=1, num_samples=1, top_k=5, skip_first_n_tokens=skip, **FAST).train(ctx)
        (datum,) = _first_data(backend)
        assert datum.loss_fn_inputs["target_tokens"].shape[1] == 5
        weights[skip] = datum.loss_fn_inputs["weights"].to_numpy().sum(axis=1)
    (places,) = weights[0].nonzero()
    assert weights[0][places] == pytest.approx([1.0] * len(places))
    assert weights[2].nonzero()[0].tolist() == places[2:].tolist()


def test_reverse_skips_the_first_tokens_too(tmp_path, follower):
    backend = RecordingBackend()
    ctx = _context(tmp_path, _chats()[:1], start_from=follower, backend=backend)
    SDFT(max_steps=1, num_samples=1, kl="reverse", skip_first_n_tokens=2, **FAST).train(ctx)
    (datum,) = _first_data(backend)
    columns = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
    (written,) = columns["logprobs"].nonzero()
    assert columns["advantages"].nonzero()[0].tolist() == written[2:].tolist()


def test_answers_with_nothing_left_to_learn_are_counted_and_the_step_skipped(tmp_path, follower):
    ctx = _context(tmp_path, start_from=follower)
    result = SDFT(max_steps=1, skip_first_n_tokens=50, **FAST).train(ctx)
    ((_, metrics),) = ctx.log_store.metrics
    assert metrics["answers_too_short"] == 4 and result.metrics["steps_skipped"] == 1


def test_the_start_is_the_teacher_however_far_the_student_goes(tmp_path, follower):
    """And a moving average is neither the start nor the student."""
    paths = {}
    for teacher in ("start", "ema"):
        backend = RecordingBackend()
        ctx = _context(tmp_path / teacher, start_from=follower, backend=backend)
        SDFT(max_steps=4, teacher=teacher, ema_decay=0.5, **FAST).train(ctx)
        averaged = [e.args for e in backend.events if e.what == "submitted" and e.call == "average_weights"]
        paths[teacher] = averaged
    assert paths["start"] == []
    assert [shares for _, shares, _ in paths["ema"]] == [[0.5, 0.5]] * 3
    teachers = [before for (before, _), _, _ in paths["ema"]]
    assert "teacher-000000" in teachers[0] and "teacher-000001" in teachers[1] and "teacher-000002" in teachers[2]


@pytest.mark.parametrize(
    "row",
    [
        {"inputs": {"q": "Capital of France?"}, "expected": "Paris"},
        {
            "task_id": "f",
            "instruction": "Capital of France?",
            "verifier": {"fn_name": "exact_match", "expected": "Paris"},
        },
        {
            "messages": [
                {"role": "user", "content": "Capital of France?"},
                {"role": "assistant", "content": "Paris"},
            ]
        },
    ],
)
def test_every_row_format_with_an_answer_is_a_demonstration(tmp_path, follower, row):
    ctx = _context(tmp_path, [row], start_from=follower)
    SDFT(max_steps=8, num_samples=4, **FAST).train(ctx)
    assert _rewards(ctx)[-1] > 0.7


def test_a_question_late_in_a_chat_is_asked_with_all_that_went_before(tmp_path, follower):
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Capital of {demonstration}?"},
    ]
    backend = RecordingBackend()
    ctx = _context(tmp_path, [{"messages": before, "target_assistant": "{question}"}], backend=backend)
    SDFT(max_steps=1, **FAST).train(ctx)
    asked = [
        bytes(t for t in e.args[0].tokens if t < 256).decode() for e in backend.events if e.call == "sample" and e.args
    ]
    assert "Be brief." in asked[0] and "Hello" in asked[0] and asked[0].index("Hi") < asked[0].index("Capital")
    assert "Capital of {demonstration}?\n\nThis is how somebody answered it well:\n{question}\n" in asked[1]


def test_a_row_without_an_answer_is_named(tmp_path):
    rows = [*_chats(), {"messages": [{"role": "user", "content": "?"}], "metadata": {"id": "lonely"}}]
    with pytest.raises(DataError, match="row lonely shows no answer"):
        SDFT(max_steps=1).train(_context(tmp_path, rows))


def test_a_template_without_a_place_for_the_demonstration_is_refused():
    with pytest.raises(ConfigError, match=r"must contain \{demonstration\}"):
        algorithms.build("sdft", {"demonstration_template": "{question}"})


@pytest.mark.parametrize(
    ("has", "params", "said"),
    [
        ({"prompt_logprobs": True}, {}, "likeliest tokens; set kl: reverse"),
        ({"prompt_logprobs": True}, {"kl": "reverse"}, None),
        ({}, {"kl": "reverse"}, "logprobs of given tokens"),
        (EVERYTHING, {"teacher": "ema"}, "cannot average weights; set teacher: start"),
        ({**EVERYTHING, "average_weights": True}, {"teacher": "ema"}, None),
    ],
)
def test_what_the_backend_lacks_is_said_with_the_remedy(has, params, said):
    capabilities = Capabilities(losses=frozenset({"cross_entropy", "importance_sampling"}), **has)
    lack = SDFT(**params).needs(capabilities)
    assert lack is None if said is None else said in lack


def test_a_moving_average_is_refused_where_it_cannot_be_had_before_anything_is_spent(tmp_path):
    class Hosted(MockBackend):
        name = "mock"

        def prepare(self, *, model, run_dir):
            handles = super().prepare(model=model, run_dir=run_dir)
            handles["service"].capabilities = Capabilities(losses=frozenset({"cross_entropy"}), **EVERYTHING)
            return handles

    backend = RecordingBackend(inner=Hosted())
    with pytest.raises(BackendError, match="sdft: this backend cannot average weights"):
        SDFT(teacher="ema", max_steps=1).train(_context(tmp_path, backend=backend))
    assert backend.events == []


def test_one_seed_repeats_exactly(tmp_path, follower):
    names = []
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        ctx = _context(tmp_path / place, start_from=follower, seed=seed)
        result = SDFT(max_steps=2, teacher="ema", **FAST).train(ctx)
        names.append(result.artifacts["final_checkpoint"].rpartition("/")[2])
    assert names[0] == names[1] != names[2]


def test_every_setting_is_read(tmp_path, follower):
    algorithm = SDFT(**SDFT.Config(teacher="ema", max_tokens=4).model_dump())
    forget(algorithm.cfg)
    algorithm.train(_context(tmp_path, start_from=follower))
    assert list(unread(algorithm.cfg)) == []
