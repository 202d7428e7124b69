"""The forms in which texts are compared.

In: a text. Out: its words; the same with every number as `#`, and the numbers apart. Case, punctuation, white space
and look-alike letters of other scripts are forgotten only here, and only here it is decided what a number is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from evsys_sdk.data.leakage_encodings import LOOK_ALIKES

Gram = tuple[str, ...]
MAX_PIECES = 5_000
"""Lines and sentences of a text that are looked at."""

_SIGNS = "-+*/^%<>=×÷"
_OPERATOR = rf"(?<=[\d\s])[{_SIGNS}](?=\s*\d)"  # before a number a sign is no punctuation
# Written without spaces: each letter is a word. Kana and Han; Thai, Lao, Burmese and Khmer.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_ASCII_WORDS = re.compile(rf"[a-z0-9]+|{_OPERATOR}")
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+|{_OPERATOR}")
_INVISIBLE = dict.fromkeys(
    [0xAD, 0x34F, 0x61C, 0x180E, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070)]
)
"""Soft hyphens, zero-width letters and marks of direction."""
# Bytes are translated and searched many times faster than text, and most text is ASCII.
_FOLDED = bytes(ord(chr(code).lower()) if chr(code).isalnum() else 32 for code in range(128)) + bytes(128)
_MASKED = _FOLDED.translate(bytes(35 if 48 <= code < 58 else code for code in range(256)))
_ASCII_SIGNS = _SIGNS[:-2].encode()
# A pattern that begins with a sign is found quickly where there is none, which is the usual case.
_SIGNED = re.compile(rf"[{_SIGNS}]\s*\d")
_DIGITS = re.compile(r"\d+")
_SPELT = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million"
)
_NUMBERS = frozenset([*_SPELT.split(), *_SIGNS])
_LETTER = re.compile(r"[^\W_]")
_ENDS = re.compile(r"[\n\r]+|(?<=[.!?:;])\s+|(?<=[。！？：；])\s*|[\"“”«»`]+")


def words_of(text: str) -> list[str]:
    """The words, folded: no case, no punctuation, no white space."""
    if text.isascii():
        if _has_signs(text):
            return _ASCII_WORDS.findall(text.lower())
        return text.encode().translate(_FOLDED).decode().split()
    plain = unicodedata.normalize("NFKC", text.translate(_INVISIBLE)).casefold()
    return _WORDS.findall(plain.translate(LOOK_ALIKES))


def _has_signs(text: str) -> bool:
    """Whether an ASCII text has signs before numbers."""
    data = text.encode()
    return len(data.translate(None, _ASCII_SIGNS)) != len(data) and _SIGNED.search(text) is not None


def _merged(run: list[str]) -> list[str]:
    """Numbers in a row as one."""
    at, left = -1, run.count("#")
    while left > 1:
        left, at = left - 1, run.index("#", at + 1)
        if run[at + 1] == "#":
            return [word for word, before in zip(run, ["", *run], strict=False) if not word == "#" == before]
    return run


def numbers_in(words: Sequence[str]) -> list[str]:
    """Every number, also those inside words."""
    found = [word for word in words if not word.isalpha() or word in _NUMBERS]
    if "".join(found).isdecimal():
        return found
    return [number for word in found for number in ([word] if word in _NUMBERS else _DIGITS.findall(word))]


def grouped_numbers(words: Sequence[str]) -> list[list[str]]:
    """What stands behind each `#` of the masked words: one number, or several in a row."""
    found: list[list[str]] = []
    goes_on = False
    for word in words:
        if word in _NUMBERS or word.isdecimal():
            if goes_on:
                found[-1].append(word)
            else:
                found.append([word])
            goes_on = True
            continue
        goes_on = False
        if not word.isalpha():
            found += ([digits] for digits in _DIGITS.findall(word))
    return found


def grams_of(words: Sequence[str], size: int) -> Iterator[Gram]:
    """Every run of `size` words."""
    return zip(*(words[start:] for start in range(size)), strict=False)


class Reading:
    """A text in the forms in which it is compared."""

    __slots__ = ("_groups", "_is_plain", "_pieces", "from_prompt", "mask", "run", "text")

    def __init__(self, text: str, *, from_prompt: bool = False):
        self.text, self.from_prompt = text, from_prompt
        self.run = self._masked()
        """The words with numbers as `#`, also those inside words (`v2` is `v#`); numbers in a row are one `#`."""
        self.mask = "".join(self.run)
        """Equal for texts that differ in case, punctuation, white space and numbers only."""
        self._groups: list[list[str]] | None = None
        self._pieces: list[Reading] | None = None

    def _masked(self) -> list[str]:
        text = self.text
        self._is_plain = text.isascii() and not _has_signs(text)
        if self._is_plain:
            data = text.encode().translate(_MASKED)
            while b"##" in data:
                data = data.replace(b"##", b"#")
            run = data.decode().split()
        else:
            run = [word if word.isalpha() else _DIGITS.sub("#", word) for word in words_of(text)]
        if not _NUMBERS.isdisjoint(run):
            self._is_plain = False
            run = ["#" if word in _NUMBERS else word for word in run]
        return _merged(run)

    @property
    def words(self) -> list[str]:
        return words_of(self.text)

    @property
    def numbers(self) -> list[str]:
        """Every number, also those inside words."""
        return _DIGITS.findall(self.text) if self._is_plain else numbers_in(self.words)

    @property
    def groups(self) -> list[list[str]]:
        """The numbers behind each `#`."""
        if self._groups is None:
            self._groups = grouped_numbers(self.words)
        return self._groups

    @property
    def pieces(self) -> list[Reading]:
        """Its lines and sentences, also what follows a colon or stands in quotes; nothing if it is but one."""
        if self._pieces is None:
            texts = [text for text in _ENDS.split(self.text, MAX_PIECES) if _LETTER.search(text)]
            # After a space, since without one a sign at the beginning would be punctuation.
            self._pieces = [Reading(f" {text}") for text in texts] if len(texts) > 1 else []
        return self._pieces
