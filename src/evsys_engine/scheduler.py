"""Completions of many prompts at once.

In: `SampleRequest`s. Out: `SampleOutput`s. A row (one completion) is admitted, decoded together with all others, and
leaves when it is done; its place goes to the next one that waits. What a row draws depends on its own seed and number
alone. Which rows are in a batch is up to the clock: on a CPU, `LlamaDecoder` gives each of them the same bits in any
company. With `ModelDecoder`, or on a GPU, a product over 8 rows may round differently from one over 16: log
probabilities then differ in their last digits, and where two tokens are within rounding of each other's place in the
CDF (about 1e-6 of the mass), a draw.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from evsys_engine.decoder import LlamaDecoder, ModelDecoder, is_supported
from evsys_engine.grammar import Matcher, model_vocabulary
from evsys_engine.merging import LoraParts, MergedWeights
from evsys_engine.sampler import RowStream, Settings, StopRule, TokenSampler, end_ids, fresh_seed
from evsys_engine.types import Array, BadRequest, EngineError, ModelInfo, SampledSequence, SampleOutput, SampleRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("evsys_engine.scheduler")

# Merged weights in memory: only the last few used.
#
# In: who wants weights and how to make them. Out: those weights, made again if they had to go. Each snapshot is about
# as large as the model, and an experiment has many samplers over one base, so they take turns.


LIMIT = 2
"""Per model: the one that is trained against and the one that is evaluated."""


class Snapshots:
    """The snapshots of one model, the last used one last."""

    def __init__(self, limit: int = LIMIT):
        self._limit, self._guard = limit, threading.RLock()
        self._held: OrderedDict[object, Any] = OrderedDict()

    def get[T](self, owner: object, build: Callable[[], T]) -> T:
        with self._guard:
            if owner not in self._held:
                while len(self._held) >= self._limit:  # first make room, then build
                    self._held.popitem(last=False)
                self._held[owner] = build()
            self._held.move_to_end(owner)
            found: T = self._held[owner]
            return found

    def drop(self, owner: object) -> None:
        with self._guard:
            self._held.pop(owner, None)

    def __len__(self) -> int:
        return len(self._held)


_BY_MODEL: WeakKeyDictionary[PreTrainedModel, Snapshots] = WeakKeyDictionary()
_GUARD = threading.Lock()


def snapshots_of(model: PreTrainedModel) -> Snapshots:
    """Shared by all samplers over this model. A snapshot must not hold the model itself, or neither would ever go."""
    with _GUARD:
        return _BY_MODEL.setdefault(model, Snapshots())


MAX_ROWS = {"cpu": 64, "cuda": 256}
"""Completions decoded at once; more would wait for the processor anyway."""
MAX_GROUPS = 8
"""Rows admitted at different times have separate caches; each costs a little per layer and step."""
CACHE_BYTES = 2 << 30
"""No row is admitted beyond this, unless nothing else runs."""
EXPECTED_TOKENS = 256
"""Reserved for a row that is admitted, if it may write that many."""
PREFILL_TOKENS = 8192
"""Prompt tokens admitted at once."""
DIVERGED = "the model's logits are not finite: its weights have diverged; use an earlier checkpoint"
SLICE_SECONDS = 1.0
"""After this long the lock is offered to other threads (training)."""


class PromptScores:
    """What the model thought of the prompt itself."""

    def __init__(self, tokens: Sequence[int], top: int):
        self._tokens, self._top = tokens, top
        self.logprobs: list[float | None] = [None]
        self.likeliest: list[list[tuple[int, float]] | None] = [None]

    def __call__(self, position: int, logits: Tensor) -> None:
        logits = logits.float()
        total = logits.logsumexp(-1, keepdim=True)
        following = logits.new_tensor(self._tokens[position + 1 : position + 1 + len(logits)]).long()
        self.logprobs += (logits.gather(1, following[:, None]) - total)[:, 0].tolist()
        if self._top:
            values, tokens = logits.topk(self._top, dim=-1)
            pairs = zip(tokens.tolist(), (values - total).tolist(), strict=True)
            self.likeliest += [list(zip(*pair, strict=True)) for pair in pairs]


@dataclass(slots=True, eq=False)
class SampleJob:
    """A request that was found good, and whom to tell."""

    request: SampleRequest
    tokens: tuple[int, ...]
    limit: int
    """Tokens a row may write: as many as were asked for and fit."""
    stop: StopRule
    done: Callable[[SampleOutput], None]
    failed: Callable[[BaseException], None]
    matcher: Matcher | None = None
    """At the beginning of the grammar that the completions have to follow."""
    scores: PromptScores | None = None
    rows: dict[int, SampledSequence] = field(default_factory=dict)
    over: bool = False

    def make_rows(self) -> Iterator[SampleRow]:
        asked = self.request
        seed = fresh_seed() if asked.seed is None else asked.seed
        settings = Settings(asked.temperature, asked.top_k, asked.top_p)
        return (
            SampleRow(self, i, RowStream(seed, i), settings, self.matcher.copy() if self.matcher else None)
            for i in range(asked.num_samples)
        )

    def finish_row(self, index: int, row: SampledSequence) -> None:
        self.rows[index] = row
        if len(self.rows) == self.request.num_samples and not self.over:
            self.over = True
            self.done(self._result())

    def fail(self, error: BaseException) -> None:
        if not self.over:
            self.over = True
            self.failed(error)

    def reset(self) -> None:
        """Forget what was written so far: the job is decoded again from its prompt."""
        self.rows.clear()
        self.scores = None

    def _result(self) -> SampleOutput:
        asked, scores = self.request, self.scores
        return SampleOutput(
            sequences=[self.rows[i] for i in range(asked.num_samples)],
            prompt_logprobs=scores.logprobs if scores and asked.prompt_logprobs else None,
            topk_prompt_logprobs=scores.likeliest if scores and asked.topk_prompt_logprobs else None,
        )


@dataclass(slots=True, eq=False)
class SampleRow:
    """One completion being written."""

    job: SampleJob
    index: int
    stream: RowStream
    settings: Settings
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def reserve(self) -> int:
        """Cache slots it will probably need."""
        return len(self.job.tokens) + min(self.job.limit, EXPECTED_TOKENS)

    def take(self, token: int, logprob: float) -> bool:
        """Write a token; is the row over?"""
        if math.isnan(logprob):
            self.job.fail(EngineError(DIVERGED))
            return True
        self.tokens.append(token)
        self.logprobs.append(logprob)
        try:
            kept = self.job.stop.kept(self.tokens)
            if self.matcher is not None and kept is None:
                self.matcher.take(token)
        except Exception as exc:  # a tokenizer that cannot decode is this request's trouble, not its neighbours'
            self.job.fail(exc)
        else:
            if kept is not None:
                self._finish(SampledSequence(tokens=self.tokens[:kept], logprobs=self.logprobs[:kept]))
                return True
            if len(self.tokens) >= self.job.limit:
                self._finish(SampledSequence(tokens=self.tokens, logprobs=self.logprobs, stop_reason="length"))
                return True
        return self.job.over

    def _finish(self, row: SampledSequence) -> None:
        self.job.finish_row(self.index, row)


Feed = Callable[[int], Iterable[SampleJob]]
"""`feed(rows)`: jobs to begin, of so many rows at most; asked before every token. It may raise, to break off."""


class Run:
    """The rows that are being decoded now, and those that wait for a place."""

    def __init__(self, decoder: LlamaDecoder | ModelDecoder, feed: Feed, max_rows: int):
        self._decoder, self._feed, self._max_rows = decoder, feed, max_rows
        self._waiting: deque[SampleRow] = deque()
        self._groups: list[tuple[Any, list[SampleRow]]] = []
        self._starting: list[SampleRow] = []
        self._sampler: TokenSampler | None = None
        """For the live rows; None when they have changed."""

    @property
    def _live(self) -> list[SampleRow]:
        return [row for _, rows in self._groups for row in rows]

    def advance(self) -> bool:
        """Admit whom there is room for, and write a token to every row. False when there was nothing left to do."""
        live = self._live
        room = self._max_rows - len(live)
        for job in self._feed(max(0, room - len(self._waiting))):
            self._waiting.extend(job.make_rows())
        self._starting = self._admit(live, room)
        # Rows with prompts of similar length start together: a cache is as wide as its longest prompt, so at most half
        # of it is padding.
        parts: list[list[SampleRow]] = []
        for row in sorted(self._starting, key=lambda row: len(row.job.tokens)):
            if not parts or len(row.job.tokens) > max(64, 2 * len(parts[-1][0].job.tokens)):
                parts.append([])
            parts[-1].append(row)
        for part in parts:
            self._start(part)
        busy = bool(self._starting or self._groups)
        self._starting = []
        if self._groups:
            self._step()
        return busy or bool(self._waiting)

    def unfinished_jobs(self) -> list[SampleJob]:
        rows = (*self._live, *self._starting, *self._waiting)
        return [job for job in dict.fromkeys(row.job for row in rows) if not job.over]

    def _admit(self, live: list[SampleRow], room: int) -> list[SampleRow]:
        """Those that waited longest, as many as fit; at least one if nothing runs."""
        if not self._waiting or len(self._groups) >= MAX_GROUPS:
            return []
        slots = CACHE_BYTES // self._decoder.bytes_per_token - sum(row.reserve for row in live)
        admitted: list[SampleRow] = []
        prompts: set[tuple[int, ...]] = set()
        while self._waiting and len(admitted) < room:
            row = self._waiting[0]
            slots -= row.reserve
            prompts.add(row.job.tokens)
            if (slots < 0 and (admitted or live)) or (admitted and sum(map(len, prompts)) > PREFILL_TOKENS):
                break
            self._waiting.popleft()
            if not row.job.over:
                admitted.append(row)
        return admitted

    def _start(self, rows: list[SampleRow]) -> None:
        """Read the prompts of these rows, write the first token of each, open a group for those that continue."""
        numbers = {tokens: i for i, tokens in enumerate(dict.fromkeys(row.job.tokens for row in rows))}
        which = [numbers[row.job.tokens] for row in rows]
        # The scores of each prompt that were asked for and are not there yet.
        wanting: dict[int, list[PromptScores]] = {}
        for job in dict.fromkeys(row.job for row in rows):
            asked = job.request
            if job.scores is None and (asked.prompt_logprobs or asked.topk_prompt_logprobs):
                job.scores = PromptScores(job.tokens, asked.topk_prompt_logprobs)
                wanting.setdefault(numbers[job.tokens], []).append(job.scores)
        watchers = {number: partial(_score_all, scores) for number, scores in wanting.items()}
        read = self._decoder.prefill(list(numbers), watchers, keep=any(row.job.limit > 1 for row in rows))
        picks = _pick(TokenSampler([row.settings for row in rows], self._decoder.device), read.logits[which], rows)
        going = [i for i, (row, pick) in enumerate(zip(rows, picks, strict=True)) if not row.take(*pick)]
        self._sampler = None
        if going:
            room = min(64, max(rows[i].job.limit for i in going) - 1)
            self._groups.append((read.open([which[i] for i in going], room), [rows[i] for i in going]))

    def _step(self) -> None:
        live = self._live
        logits = self._decoder.step([group for group, _ in self._groups], [row.tokens[-1] for row in live])
        if self._sampler is None:
            self._sampler = TokenSampler([row.settings for row in live], self._decoder.device)
        picks = iter(_pick(self._sampler, logits, live))
        kept = [
            self._after_step(group, [not row.take(*next(picks)) for row in rows], rows) for group, rows in self._groups
        ]
        self._groups = [(group, rows) for group, rows in kept if rows]

    def _after_step(self, group: Any, continues: list[bool], rows: list[SampleRow]) -> tuple[Any, list[SampleRow]]:
        if all(continues):
            return group, rows
        self._sampler = None
        alive = [i for i, on in enumerate(continues) if on]
        return group, [rows[i] for i in group.keep(alive)] if alive else []


def _pick(sampler: TokenSampler, logits: Tensor, rows: list[SampleRow]) -> Iterable[tuple[int, float]]:
    allowed: dict[int, Array] = {}
    for index, row in enumerate(rows):
        if row.matcher is not None and not row.job.over:
            try:
                allowed[index] = row.matcher.allowed()
            except EngineError as exc:  # a grammar that is too much for its parser is this request's trouble alone
                row.job.fail(exc)
    return zip(*sampler.sample(logits, [row.stream.draw() for row in rows], allowed), strict=True)


def _score_all(wanting: list[PromptScores], position: int, logits: Tensor) -> None:
    for scores in wanting:
        scores(position, logits)


class SamplerClosed(EngineError):
    """The weights are put away; no request can be answered any more."""


def feed_once(jobs: list[SampleJob], feed: Feed) -> Feed:
    """These jobs and no others; what `feed` raises breaks them off."""
    left = deque([jobs])

    def next_jobs(room: int) -> Iterable[SampleJob]:
        if left:  # first of all, so that a run that is broken off knows them
            return left.popleft()
        feed(0)
        return ()

    return next_jobs


class BatchSampler:
    """Fixed weights to sample from: a base model and what was trained over it."""

    def __init__(
        self,
        *,
        engine_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        info: ModelInfo,
        lora: LoraParts | None,
        full: Mapping[str, Tensor] | None,
        lock: AbstractContextManager[Any],
    ):
        self._model, self._tokenizer, self._info, self._lock = engine_model, tokenizer, info, lock
        # Low-rank parts are copied, since training changes them; `full` is large and becomes this sampler's own.
        own = {name: (a.detach().clone(), b.detach().clone(), scale) for name, (a, b, scale) in (lora or {}).items()}
        self._weights: MergedWeights | None = MergedWeights(engine_model, own, full)
        self._snapshots, self._key = snapshots_of(engine_model), object()
        weakref.finalize(self, self._snapshots.drop, self._key)  # also of one that was never closed
        self._end_ids = end_ids(engine_model, tokenizer)
        self.max_rows = MAX_ROWS.get(engine_model.device.type, 64)

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleOutput]:
        """All requests in one batch."""
        results: dict[int, SampleOutput] = {}
        errors: list[BaseException] = []

        def job(number: int, request: SampleRequest) -> SampleJob:
            return self.job(request, lambda result: results.update({number: result}), errors.append)

        waiting = deque(job(number, request) for number, request in enumerate(requests))
        self.serve(lambda room: [waiting.popleft() for _ in range(len(waiting))])
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(requests))]

    def job(
        self,
        request: SampleRequest,
        done: Callable[[SampleOutput], None],
        failed: Callable[[BaseException], None],
    ) -> SampleJob:
        """The request, checked; `BadRequest` if something is wrong with it."""
        tokens = check(request, self._info)
        limit = min(request.max_tokens, max(1, self._info.max_length - len(tokens)))
        ends = self._end_ids if request.end_of_text else frozenset()
        stop = StopRule(request.stop, ends, self._tokenizer, keep_strings=request.keep_stop_strings)
        matcher = None
        if request.grammar is not None:
            vocabulary = model_vocabulary(self._tokenizer, self._model.get_output_embeddings().weight.shape[0], ends)
            matcher = Matcher.begin(request.grammar, vocabulary)
        return SampleJob(
            request=request, tokens=tokens, limit=limit, stop=stop, done=done, failed=failed, matcher=matcher
        )

    def serve(self, feed: Feed) -> None:
        """Decode what `feed` brings until it brings nothing more.

        A batch that fails is decoded again in two halves, and a half that fails in its halves: in the end only the job
        that breaks its batch gets the error. What `feed` raises, and a sampler that was closed, ends all jobs.
        """
        retries: list[list[SampleJob]] = []
        run, going = None, True
        while going or retries:
            try:
                with self._lock:
                    if run is None and retries:
                        feed(0)  # raises if the queue was closed meanwhile
                    run = run or Run(
                        self._decoder(), feed_once(retries.pop(), feed) if retries else feed, self.max_rows
                    )
                    until = time.monotonic() + SLICE_SECONDS
                    going = run.advance()
                    while going and time.monotonic() < until:
                        going = run.advance()
            except BaseException as exc:
                if run is None or isinstance(exc, SamplerClosed) or not isinstance(exc, Exception):
                    for job in chain(run.unfinished_jobs() if run else (), *retries):
                        job.fail(exc)
                    if run is None:
                        for job in feed(self.max_rows):
                            job.fail(exc)
                    raise
                jobs = run.unfinished_jobs()
                if len(jobs) == 1:
                    jobs[0].fail(exc)
                else:
                    logger.warning("a batch of %d requests failed; decoding its halves: %r", len(jobs), exc)
                    for job in jobs:
                        job.reset()
                    middle = len(jobs) // 2
                    retries += [part for part in (jobs[middle:], jobs[:middle]) if part]
                run, going = None, True
            if not going and retries:
                run = None

    def close(self) -> None:
        """Give the memory back, even if this object is still referenced. A batch that is running ends first."""
        self._weights = None
        self._snapshots.drop(self._key)

    def _decoder(self) -> LlamaDecoder | ModelDecoder:
        if is_supported(self._model):
            return self._snapshots.get(self._key, lambda: LlamaDecoder(self._model, self._open_weights()))
        return ModelDecoder(
            self._model, self._snapshots.get(self._key, lambda: self._open_weights().changed_parameters())
        )

    def _open_weights(self) -> MergedWeights:
        """Called while the snapshots are locked: after a `close`, nothing is built that would never be dropped."""
        weights = self._weights
        if weights is None:
            raise SamplerClosed("this sampler was closed; load it again")
        return weights


def check(request: SampleRequest, info: ModelInfo) -> tuple[int, ...]:
    """The prompt, if everything about the request is right."""
    try:
        tokens = tuple(int(token) for token in request.tokens)
    except (TypeError, ValueError) as exc:
        raise BadRequest(f"prompt: {exc}") from None
    if not tokens:
        raise BadRequest("the prompt is empty; give at least one token (the model's bos, for instance)")
    if len(tokens) > info.max_length:
        raise BadRequest(f"the prompt has {len(tokens)} tokens, but {info.name} takes {info.max_length} at most")
    wrong = next((token for token in tokens if not 0 <= token < info.vocab_size), None)
    if wrong is not None:
        raise BadRequest(f"token {wrong} is out of range: {info.name} has {info.vocab_size} tokens, from 0")
    rules = {
        "num_samples": (request.num_samples, request.num_samples >= 1, "1 or more"),
        "max_tokens": (request.max_tokens, request.max_tokens >= 1, "1 or more"),
        "temperature": (
            request.temperature,
            math.isfinite(request.temperature) and request.temperature >= 0,
            "0 (the likeliest token) or more",
        ),
        "top_k": (request.top_k, request.top_k >= -1, "-1 or 0 (off) or more"),
        "top_p": (request.top_p, 0 < request.top_p <= 1, "above 0 and at most 1"),
        "topk_prompt_logprobs": (
            request.topk_prompt_logprobs,
            0 <= request.topk_prompt_logprobs <= info.vocab_size,
            f"from 0 to {info.vocab_size}",
        ),
    }
    for name, (value, good, words) in rules.items():
        if not good:
            raise BadRequest(f"{name} is {value}; it must be {words}")
    return tokens
