"""What other weights think of a completion."""

from __future__ import annotations

import asyncio
import json

import pytest

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.models import ModelConfig
from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import Turn
from evsys_sdk.surface import ModelInput, SamplingParams
from evsys_sdk.training.teachers import MovingAverage, completion_logprobs, completion_top_k, logprobs_of


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
        from evsys_sdk.surface import SampleOutput

        return SampleOutput(sequences=[])


def test_logprobs_that_are_not_one_per_token_are_refused_not_shifted():
    with pytest.raises(BackendError, match="logprobs for 4 of 5 prompt tokens"):
        asyncio.run(completion_logprobs(Short(), [1, 2], [3, 4, 5]))
    with pytest.raises(BackendError, match="logprobs for 0 of 5 prompt tokens"):
        asyncio.run(completion_top_k(Blank(), [1, 2], [3, 4, 5], 2))


class Averager:
    """Averages numbers that are written as text."""

    async def average_weights(self, paths, shares, name):
        return repr(sum(float(path) * share for path, share in zip(paths, shares, strict=True)))


def test_a_moving_average_keeps_most_of_itself(tmp_path):
    async def check():
        teacher = MovingAverage(Averager(), start="0.0", decay=0.75, book=tmp_path / "t.json")
        assert float(await teacher.at(2, "4.0")) == 1.0
        assert float(await teacher.at(3, "5.0")) == 2.0

    asyncio.run(check())


def test_an_interrupted_average_goes_on_where_it_was_also_from_before_its_end(tmp_path):
    async def check():
        book = tmp_path / "t.json"
        first = MovingAverage(Averager(), start="0.0", decay=0.75, book=book)
        for step, student in ((2, "4.0"), (3, "5.0"), (4, "6.0")):
            await first.at(step, student)
        again = MovingAverage(Averager(), start="0.0", decay=0.75, book=book)
        assert float(await again.at(3, "5.0")) == 2.0
        assert set(json.loads(book.read_text())) == {"1", "2", "3"}
        with pytest.raises(BackendError, match="averaged teacher of step 8 is lost"):
            await again.at(9, "1.0")

    asyncio.run(check())
