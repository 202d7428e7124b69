"""Text completion: POST /v1/completions.

In: a `CompletionRequest` and a sampler. Out: completions, and the answer in OpenAI's form, whole or as events. A prompt
is taken as it is, without a chat template. Log probabilities of the prompt (`echo`) and of other tokens than the one
drawn (`logprobs` above 0) are asked for in a second call, over prompt and completion together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from evsys_engine.http import HttpResponse, json_response
from evsys_engine.types import JsonObject
from evsys_sdk.serving.replies import IMPOSSIBLE, WORDS, event_stream
from evsys_sdk.serving.request import CompletionRequest
from evsys_sdk.training_api import ModelInput, SampledSequence, SamplingClient, SamplingParams, Tokenizer

Likeliest = list[list[tuple[int, float]] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletion:
    """How the model continued one prompt."""

    prompt: list[int]
    sequence: SampledSequence
    logprobs: list[float | None] | None = None
    """Of prompt and completion, where they were asked for."""
    likeliest: Likeliest | None = None


async def complete(
    sampler: SamplingClient, request: CompletionRequest, prompt: list[int], room: int
) -> list[TextCompletion]:
    """`n` completions of the prompt, of `room` tokens at most."""
    count, nothing = request.n or 1, SampledSequence(tokens=[], logprobs=[], stop_reason="length")
    sequences = [nothing] * count
    if request.max_tokens != 0:  # 0 asks for what the model thinks of the prompt alone
        output = await sampler.sample(ModelInput.from_ints(prompt), count, request.sampling(room))
        sequences = output.sequences
    if request.logprobs is None or not (request.echo or request.logprobs):
        return [TextCompletion(prompt=prompt, sequence=sequence) for sequence in sequences]
    # A sampler writes at least one token; this one is thrown away.
    completions, params = [], SamplingParams(max_tokens=1, temperature=0.0)
    for sequence in sequences:
        whole = ModelInput.from_ints([*prompt, *sequence.tokens])
        output = await sampler.sample(
            whole, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=request.logprobs
        )
        completions.append(
            TextCompletion(
                prompt=prompt,
                sequence=sequence,
                logprobs=[*(output.prompt_logprobs or [])[: len(prompt)], *sequence.logprobs],
                likeliest=output.topk_prompt_logprobs if request.logprobs else None,
            )
        )
    return completions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionReply:
    """All that one answer is made of."""

    id: str
    created: int
    request: CompletionRequest
    prompts: list[list[int]]
    completions: list[TextCompletion]
    """Of the first prompt, then of the second, ..."""
    tokenizer: Tokenizer
    digest: str | None = None
    """Of the weights that answered."""

    def answer(self) -> HttpResponse:
        if not self.request.stream:
            choices = [self._choice(index, text) for index, text in enumerate(self.completions)]
            return json_response(self._body(choices) | {"usage": self._usage()})
        return event_stream(self._events())

    def _events(self) -> Iterator[JsonObject]:
        """The stream. A sampler gives its completion at once, so the pieces are cut here."""
        for index, completion in enumerate(self.completions):
            whole = self._choice(index, completion)
            pieces = WORDS.findall(whole["text"]) or [""]
            first = {key: value for key, value in whole.items() if key not in ("text", "finish_reason")}
            for number, piece in enumerate(pieces):
                details = first if number == 0 else {"index": index, "logprobs": None}
                yield self._body([details | {"text": piece, "finish_reason": None}])
            end = {"index": index, "text": "", "logprobs": None, "finish_reason": whole["finish_reason"]}
            yield self._body([end])
        if self.request.include_usage:
            yield self._body([]) | {"usage": self._usage()}

    def _body(self, choices: list[JsonObject]) -> JsonObject:
        names = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.request.model}
        answered = {} if self.digest is None else {"system_fingerprint": self.digest}
        return {**names, **answered, "choices": choices}

    def _choice(self, index: int, completion: TextCompletion) -> JsonObject:
        said = self._answer_tokens(completion.sequence)
        shown = [*completion.prompt, *said] if self.request.echo else said
        choice: JsonObject = {
            "index": index,
            "text": self.tokenizer.decode(shown),
            "logprobs": None,
            "finish_reason": completion.sequence.stop_reason,
        }
        if self.request.logprobs is not None:
            choice["logprobs"] = self._logprobs(completion, shown)
        if self.request.return_token_ids:
            choice |= {"prompt_token_ids": completion.prompt, "token_ids": completion.sequence.tokens}
        return choice

    def _answer_tokens(self, sequence: SampledSequence) -> list[int]:
        """Without the token that ends the text."""
        ended = bool(sequence.tokens) and sequence.tokens[-1] == self.tokenizer.eos_token_id
        return sequence.tokens[:-1] if ended else sequence.tokens

    def _logprobs(self, completion: TextCompletion, shown: list[int]) -> JsonObject:
        begin = 0 if self.request.echo else len(completion.prompt)
        known = completion.logprobs or [*([None] * len(completion.prompt)), *completion.sequence.logprobs]
        values = [None if value is None else max(value, IMPOSSIBLE) for value in known[begin : begin + len(shown)]]
        tokens = [self.tokenizer.decode([token]) for token in shown]
        likeliest = None
        if completion.likeliest is not None:
            rows = completion.likeliest[begin : begin + len(shown)]
            likeliest = [
                None if row is None or value is None else self._with_own(row, token, value)
                for row, token, value in zip(rows, tokens, values, strict=True)
            ]
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": offsets}

    def _with_own(self, row: list[tuple[int, float]], token: str, logprob: float) -> dict[str, float]:
        """The likeliest tokens, and the one that stands there."""
        # Reversed: of two tokens with the same text the likelier one comes last and stays.
        found = {self.tokenizer.decode([other]): max(value, IMPOSSIBLE) for other, value in reversed(row)}
        return {**found, token: logprob}

    def _usage(self) -> dict[str, int]:
        written = sum(len(completion.sequence.tokens) for completion in self.completions)
        read = sum(map(len, self.prompts))
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
