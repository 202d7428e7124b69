"""On-policy distillation on the mock backend."""

from __future__ import annotations

import asyncio

import pytest

from evsys_sdk.algorithms.distill import Distill
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.errors import BackendError, ConfigError
from evsys_sdk.registry import algorithms
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import RecordingBackend, training_context
from evsys_sdk.training_api import Capabilities

WORDS = ("red", "green", "blue", "black")
FAST = {"learning_rate": 1e-3, "max_tokens": 6, "batch_size": 4}


def _chats(word_of=lambda word: word):
    return [
        {"messages": [{"role": "user", "content": f"say {word}"}], "target_assistant": word_of(word)} for word in WORDS
    ]


def _context(folder, rows=None, **given):
    return training_context(folder, rows or _chats(), rollouts=InProcessRolloutEngine(), **given)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Weights that know the words, and others on the way there."""
    folder = tmp_path_factory.mktemp("teacher")
    known = SFT(num_epochs=30, learning_rate=1e-3).train(training_context(folder, _chats()))
    begun = SFT(num_epochs=12, learning_rate=1e-4).train(training_context(folder, _chats()))
    return known, begun


def test_the_student_moves_towards_the_teacher(tmp_path, teacher):
    known, begun = teacher
    ctx = _context(tmp_path, start_from=begun.artifacts["final_checkpoint"])
    path = known.artifacts["final_sampler"]
    Distill(teacher={"load_checkpoint_path": path}, max_steps=15, num_samples=8, **FAST).train(ctx)
    kl, right = ctx.log_store.curve("teacher_kl"), ctx.log_store.curve("reward/mean")
    assert kl[0] > 1.0 and sum(kl[-3:]) / 3 < 0.3 * kl[0]
    assert sum(right[-3:]) / 3 > right[0] + 0.5, "and so says what the teacher says"


def test_centred_advantages_add_up_to_nothing_and_learn_faster(tmp_path, teacher):
    known, begun = teacher
    right = {}
    for centre in (True, False):
        ctx = _context(tmp_path, start_from=begun.artifacts["final_checkpoint"])
        given = {"load_checkpoint_path": known.artifacts["final_sampler"]}
        Distill(teacher=given, centre=centre, max_steps=8, num_samples=8, **FAST).train(ctx)
        right[centre] = ctx.log_store.curve("reward/mean")[-1]
        if centre:  # on fresh rollouts every ratio is 1, so the loss is minus the sum of the advantages
            assert ctx.log_store.curve("loss")[0] == pytest.approx(0.0, abs=1e-4)
    assert right[True] > right[False] + 0.2


def test_a_teacher_that_is_the_student_leaves_it_as_it_is(tmp_path, teacher):
    known, _ = teacher
    ctx = _context(tmp_path, start_from=known.artifacts["final_checkpoint"])
    Distill(teacher={"load_checkpoint_path": known.artifacts["final_sampler"]}, max_steps=1, **FAST).train(ctx)
    assert ctx.log_store.curve("teacher_kl") == [pytest.approx(0.0, abs=1e-5)]
    assert ctx.log_store.curve("loss") == [pytest.approx(0.0, abs=1e-5)]


def test_a_tokens_advantage_is_how_much_better_the_teacher_likes_it(tmp_path, teacher):
    known, _ = teacher
    backend = RecordingBackend()
    ctx = _context(tmp_path, _chats()[:1], backend=backend)
    path = known.artifacts["final_sampler"]
    Distill(teacher={"load_checkpoint_path": path}, max_steps=1, num_samples=2, centre=False, **FAST).train(ctx)
    data = next(event for event in backend.events if event.call == "forward_backward").args[0]

    async def expected(datum):
        sampler = await ctx.extras["backend_handles"]["service"].create_sampling_client(path)
        from evsys_sdk.algorithms.dpo import whole_sequence
        from evsys_sdk.training_api import ModelInput

        return (await sampler.compute_logprobs(ModelInput.from_ints(whole_sequence(datum))))[1:]

    columns = [{key: value.tolist() for key, value in datum.loss_fn_inputs.items()} for datum in data]
    written = [[position for position, lp in enumerate(column["logprobs"]) if lp] for column in columns]
    tokens = sum(map(len, written))
    for datum, column, places in zip(data, columns, written, strict=True):
        liked = asyncio.run(expected(datum))
        for place in places:
            assert column["advantages"][place] * tokens == pytest.approx(
                liked[place] - column["logprobs"][place], rel=1e-3, abs=1e-4
            )


def test_the_untrained_model_can_be_its_own_models_teacher(tmp_path, teacher):
    _, begun = teacher
    ctx = _context(tmp_path, start_from=begun.artifacts["final_checkpoint"], model_name="mock")
    Distill(teacher={"model": "mock"}, max_steps=1, **FAST).train(ctx)
    assert ctx.log_store.curve("teacher_kl")[0] > 0.5


def test_another_model_is_refused_with_what_can_be_done(tmp_path):
    with pytest.raises(BackendError, match=r"'Qwen/Qwen3-32B'.*serves 'mock' alone.*load_checkpoint_path.*with sft"):
        Distill(teacher={"model": "Qwen/Qwen3-32B"}, max_steps=1).train(_context(tmp_path))


def test_a_state_instead_of_sampler_weights_is_told_apart(tmp_path, teacher):
    known, _ = teacher
    wrong = {"load_checkpoint_path": known.artifacts["final_checkpoint"]}
    with pytest.raises(BackendError, match=r"teacher.load_checkpoint_path: .*give the final_sampler"):
        Distill(teacher=wrong, max_steps=1).train(_context(tmp_path))


@pytest.mark.parametrize("given", [{}, {"model": "m", "load_checkpoint_path": "p"}])
def test_a_teacher_is_one_of_the_two(given):
    with pytest.raises(ConfigError, match=r"teacher.*set either load_checkpoint_path or model"):
        algorithms.build("distill", {"teacher": given})
    with pytest.raises(ConfigError, match=r"teacher.*is missing"):
        algorithms.build("distill", {})


def test_prompts_without_an_answer_will_do_and_have_no_reward(tmp_path, teacher):
    known, _ = teacher
    rows = [{"messages": row["messages"]} for row in _chats()]
    ctx = _context(tmp_path, rows)
    Distill(teacher={"load_checkpoint_path": known.artifacts["final_sampler"]}, max_steps=1, **FAST).train(ctx)
    ((_, metrics),) = ctx.log_store.metrics
    assert "reward/mean" not in metrics and metrics["rollouts_dropped"] == 0 and metrics["teacher_kl"] > 0


def test_one_seed_repeats_exactly(tmp_path, teacher):
    known, _ = teacher
    names = []
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        algorithm = Distill(teacher={"load_checkpoint_path": known.artifacts["final_sampler"]}, max_steps=2, **FAST)
        result = algorithm.train(_context(tmp_path / place, seed=seed))
        names.append(result.artifacts["final_checkpoint"].rpartition("/")[2])
    assert names[0] == names[1] != names[2]


def test_what_the_backend_lacks_is_said():
    algorithm = Distill(teacher={"model": "m"})
    assert "logprobs of given tokens" in algorithm.needs(Capabilities(losses=frozenset({"importance_sampling"})))
    assert "no importance_sampling" in algorithm.needs(Capabilities(losses=frozenset(), prompt_logprobs=True))


def test_every_setting_is_read(tmp_path, teacher):
    given = {"teacher": {"load_checkpoint_path": teacher[0].artifacts["final_sampler"]}, "max_tokens": 4}
    algorithm = Distill(**Distill.Config(**given).model_dump())
    forget(algorithm.cfg)
    algorithm.train(_context(tmp_path))
    assert list(unread(algorithm.cfg)) == []
