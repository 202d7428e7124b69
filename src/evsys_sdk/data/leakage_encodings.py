"""Texts that stand in a row in disguise: HTML entities, base64, look-alike letters, rot13.

In: a text as it stands in a row. Out: the text a reader would decode. Entities and base64 are undone before anything is
compared; look-alike letters are folded with case and punctuation (`leakage_words`); rot13 is looked for from the other
side, by turning the index and not the rows, so that a row without it costs nothing.
"""

from __future__ import annotations

import base64
import binascii
import html
import re
from collections.abc import Iterator

MIN_CODED = 24
"""Letters of the shortest base64 that is decoded: 18 bytes. A shorter text is no task."""
MAX_CODED = 1_000_000
"""Letters of the longest; beyond it lie files."""
MOST_ESCAPES = 3
"""How often entities are undone: text that went through several web pages says `&amp;amp;quot;`."""
MIN_READABLE = 0.9
"""Share of a decoded text that is letters, digits, spaces and common punctuation."""
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
_CODED = re.compile(r"[A-Za-z0-9+/_-]{24,}(?:\r?\n[A-Za-z0-9+/_-]{4,})*={0,2}")
_READABLE = re.compile(r"[\w\s.,;:!?'\"()\[\]{}<>/+*=%$#@&|`~^\\-]")
_TURN = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "nopqrstuvwxyzabcdefghijklmNOPQRSTUVWXYZABCDEFGHIJKLM"
)
LOOK_ALIKES = str.maketrans(
    # Cyrillic; Greek; Armenian; Cherokee; phonetic letters and small capitals.
    "авеікмнорстухјѕԁһԛԝԍьαβεηικμνορτυχϲγωօսհոցզյᎪᏴᏟᎠᎬᏀᎻᏆᎫᏦᏞᎷᏢᏒᏚᎢᏙᏔᏃɑɡıȷɩʏᴀʙᴄᴅᴇɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡᴢʋⲟⲣ",
    "abeikmhopctyxjsdhqwgbabehikmnoptyxcywouhngqjabcdeghijklmprstvwzagijiyabcdeghijklmnoprstuvwzvop",
)
"""Letters that look like Latin ones -> those, after case is folded. Texts in these scripts are folded on both sides, so
they compare as they did."""


def may_be_coded(text: str) -> bool:
    """Whether there can be anything to decode; most texts are done with here."""
    return "&" in text or (len(text) >= MIN_CODED and max(map(len, text.split()), default=0) >= MIN_CODED)


def decoded_texts(text: str) -> Iterator[str]:
    """The text without HTML entities, and what its base64 says."""
    for _ in range(MOST_ESCAPES):
        if "&" not in text or not _ENTITY.search(text):
            break
        text = html.unescape(text)
    yield text
    yield from _from_base64(text)


def _from_base64(text: str) -> Iterator[str]:
    for found in _CODED.finditer(text):
        coded = found[0]
        if len(coded) > MAX_CODED:
            continue
        first = coded.split("\n", 1)[0]
        for attempt in dict.fromkeys((coded, first)):
            said = _read_base64(attempt)
            if said is not None:
                yield said
                break


def _read_base64(coded: str) -> str | None:
    """What it says, if it is text that somebody could read."""
    letters = "".join(coded.split()).rstrip("=").replace("-", "+").replace("_", "/")
    if len(letters) % 4 == 1:
        letters = letters[:-1]
    try:
        said = base64.b64decode(letters + "=" * (-len(letters) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return said if len(_READABLE.findall(said)) >= MIN_READABLE * len(said) else None


def turned(text: str) -> str:
    """rot13, which is its own way back."""
    return text.translate(_TURN)
