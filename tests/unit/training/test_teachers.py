"""What other weights think of a completion."""

from __future__ import annotations

import asyncio

import pytest

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import Turn
from evsys_sdk.training.teachers import MovingAverage, completion_logprobs, completion_top_k, logprobs_of
from evsys_sdk.training_api import ModelInput, SamplingParams


@pytest.fixture
def sampler(tmp_path):
    service = MockBackend().prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]
    return asyncio.run(_made(service))


async def _made(service):
    return await service.create_sampling_client()


def test_the_writer_itself_gives_its_completion_the_logprobs_it_was_written_with(sampler):
    async def check():
        prompt = [*b"hello"]
        output = await sampler.sample(ModelInput.from_ints(prompt), 2, SamplingParams(max_tokens=6, seed=1))
        turns = [
            Turn(prompt_tokens=prompt, completion_tokens=s.tokens, logprobs=s.logprobs, text="")
            for s in output.sequences
        ]
        assert await logprobs_of(sampler, turns) == [pytest.approx(turn.logprobs, abs=1e-5) for turn in turns]

    asyncio.run(check())


def test_the_top_k_of_each_place_are_likeliest_first_and_agree_with_the_logprobs(sampler):
    async def check():
        prompt, completion = [*b"hello"], [*b"abc"]
        rows = await completion_top_k(sampler, prompt, completion, 300)
        own = await completion_logprobs(sampler, prompt, completion)
        assert len(rows) == 3
        for row, token, logprob in zip(rows, completion, own, strict=True):
            assert [lp for _, lp in row] == sorted((lp for _, lp in row), reverse=True)
            assert dict(row)[token] == pytest.approx(logprob)

    asyncio.run(check())


class Short:
    """A server that forgets the leading None."""

    async def compute_logprobs(self, prompt):
        return [-1.0] * (prompt.length - 1)


class Blank:
    """A server that has no top-k."""

    async def sample(self, prompt, *args, **kwargs):
        from evsys_sdk.training_api import SampleOutput

        return SampleOutput(sequences=[])


def test_logprobs_that_are_not_one_per_token_are_refused_not_shifted():
    with pytest.raises(BackendError, match="logprobs for 4 of 5 prompt tokens"):
        asyncio.run(completion_logprobs(Short(), [1, 2], [3, 4, 5]))
    with pytest.raises(BackendError, match="logprobs for 0 of 5 prompt tokens"):
        asyncio.run(completion_top_k(Blank(), [1, 2], [3, 4, 5], 2))


class Averager:
    """Averages numbers that are written as text, and remembers which it was told to forget."""

    def __init__(self):
        self.forgotten = []

    async def average_weights(self, paths, shares, name):
        return repr(sum(float(path) * share for path, share in zip(paths, shares, strict=True)))

    async def discard_weights(self, path):
        self.forgotten.append(path)


def test_a_moving_average_keeps_most_of_itself_and_leaves_no_files_behind_but_the_start():
    async def check():
        service = Averager()
        teacher = MovingAverage(service, start="0.0", decay=0.75)
        assert float(await teacher.follow("4.0", 2)) == 1.0
        assert float(await teacher.follow("5.0", 3)) == 2.0
        assert service.forgotten == ["1.0"]

    asyncio.run(check())


def test_a_resumed_average_resumes_with_the_teacher_of_the_checkpoint_which_is_never_deleted():
    async def check():
        service = Averager()
        first = MovingAverage(service, start="0.0", decay=0.75)
        await first.follow("4.0", 2)
        told = first.progress()
        await first.follow("5.0", 3)
        await first.follow("6.0", 4)
        assert told not in service.forgotten and service.forgotten == ["2.0"]
        again = MovingAverage(service, start="0.0", decay=0.75)
        again.restore(told)
        assert float(await again.follow("5.0", 3)) == 2.0

    asyncio.run(check())


def test_teachers_that_only_older_checkpoints_name_are_deleted():
    """The last two stay: of the newest checkpoint a crash of the machine can have cost the journal."""

    async def check():
        service = Averager()
        teacher = MovingAverage(service, start="0.0", decay=0.5)
        told = []
        for step in range(2, 8):
            await teacher.follow("8.0", step)
            told.append(teacher.progress())
        assert service.forgotten == told[:3], "as the seventh step began, the checkpoints of the fifth and sixth stood"
        resumed = MovingAverage(service, start="0.0", decay=0.5)
        resumed.restore(told[-1])
        await resumed.follow("8.0", 8)
        assert told[-1] not in service.forgotten and "0.0" not in service.forgotten

    asyncio.run(check())
