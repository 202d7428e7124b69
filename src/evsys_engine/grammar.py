"""Completions that have to follow a grammar.

In: a grammar in llguidance's form and a vocabulary. Out: for each row, which tokens may come next. llguidance does the
parsing; it is imported when the first grammar arrives, so that sampling without one costs nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from evsys_engine.types import Array, BadRequest, EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

type Vocabularies = dict[tuple[int, ...], LLTokenizer]
"""By the number of logits and the tokens that end a text."""
_vocabularies: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, Vocabularies] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as exc:
        raise EngineError("a grammar needs llguidance: pip install 'evsys-sdk[serve]'") from exc
    return llguidance


class Matcher:
    """Where one completion stands in its grammar."""

    def __init__(self, inner: LLMatcher):
        self._inner = inner

    @classmethod
    def begin(cls, grammar: str, vocabulary: LLTokenizer) -> Matcher:
        """At the beginning; a grammar that cannot be followed is a `BadRequest`."""
        inner = _llguidance().LLMatcher(vocabulary, grammar, log_level=0)
        if inner.is_error():
            raise BadRequest(f"grammar: {inner.get_error().partition(chr(10))[0]}")
        return cls(inner)

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy())

    def allowed(self) -> Array:
        """True for each token that may come next; the ends of text among them where the grammar is satisfied."""
        mask: Array = np.frombuffer(self._inner.compute_logit_bias(), dtype=np.uint8).astype(bool)
        self._check()
        if not mask.any():
            raise BadRequest("the grammar allows no token here")
        return mask

    def take(self, token: int) -> None:
        self._inner.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():  # too complex, for instance: llguidance bounds its own work
            raise BadRequest(f"the grammar could not be followed: {self._inner.get_error().partition(chr(10))[0]}")


def model_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int]) -> LLTokenizer:
    """The vocabulary of a Hugging Face tokenizer, of a model with `size` logits; made once, which takes a second."""
    if not ends:
        raise BadRequest("a grammar needs a model that has an end-of-text token")
    if not getattr(tokenizer, "is_fast", False):
        raise BadRequest("a grammar needs a model with a fast tokenizer")
    key = (size, *sorted(ends))
    with _making:
        made = _vocabularies.setdefault(tokenizer, {})
        if key not in made:
            _llguidance()
            from llguidance.hf import from_tokenizer

            fast = cast("PreTrainedTokenizerFast", tokenizer)  # `is_fast` says so
            made[key] = from_tokenizer(fast, n_vocab=size, eos_token=sorted(ends))
        return made[key]


def byte_vocabulary(tokens: Sequence[bytes], specials: Sequence[int], ends: Sequence[int]) -> LLTokenizer:
    """A vocabulary of which each token is known by its bytes."""
    library = _llguidance()

    class Vocabulary:
        eos_token_id, bos_token_id, special_token_ids = ends[0], None, list(specials)

        def __init__(self) -> None:
            self.tokens = list(tokens)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return library.LLTokenizer(library.TokenizerWrapper(Vocabulary()), n_vocab=len(tokens), eos_token=list(ends))
