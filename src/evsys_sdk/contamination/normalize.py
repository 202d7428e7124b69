"""Text in the form in which it is compared: words, masks, numbers, and what is encoded in it.

In: a text. Out: a `Reading` (its words, the same with every number as `#`, and the numbers apart); the texts that are
encoded in it as HTML entities, base64, hex and the like. Case, punctuation, white space, accents and look-alike letters
are folded only here.
"""

from __future__ import annotations

import base64
import binascii
import html
import quopri
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from urllib.parse import unquote

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
    [0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164, 0xFEFF, 0xFFA0,
     *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), *range(0xFE00, 0xFE10),
     *range(0xFFF0, 0xFFFC), *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B), *range(0xE0000, 0xE1000)]
)  # fmt: skip
"""Soft hyphens, zero-width letters, fillers, marks of direction, variation selectors and tags: Unicode's property
Default_Ignorable_Code_Point, and the marks of annotations."""
# Bytes are translated and searched many times faster than text, and most text is ASCII.
_FOLDED = bytes(ord(chr(code).lower()) if chr(code).isalnum() else 32 for code in range(128)) + bytes(128)
_MASKED = _FOLDED.translate(bytes(35 if 48 <= code < 58 else code for code in range(256)))
# Without the last two, which are not ASCII.
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
    # NFKD parts accents from their letters, so that `MARKS` can drop them; NFKC joins what else it took apart, such as
    # Hangul. The table of look-alikes is made for folded case, so it comes last.
    plain = unicodedata.normalize("NFKD", text.translate(_INVISIBLE))
    plain = unicodedata.normalize("NFKC", MARKS.sub("", plain)).casefold()  # accents are forgotten too
    return _WORDS.findall(plain.translate(look_alikes()))


def _has_signs(text: str) -> bool:
    """Whether an ASCII text has signs before numbers."""
    data = text.encode()
    # Deleting bytes is a fast way to ask whether there are any; the pattern runs only where there are.
    return len(data.translate(None, _ASCII_SIGNS)) != len(data) and _SIGNED.search(text) is not None


def numbers_in(words: Sequence[str]) -> list[str]:
    """Every number, also those inside words."""
    found = [word for word in words if not word.isalpha() or word in _NUMBERS]
    # The usual case: every number is a word, and there is nothing to take apart.
    if "".join(found).isdecimal():
        return found
    return [number for word in found for number in ([word] if word in _NUMBERS else _DIGITS.findall(word))]


def grouped_numbers(words: Sequence[str]) -> list[list[str]]:
    """What stands behind each `#` of the masked words: one number, or several in a row."""
    found: list[list[str]] = []
    is_after_number = False
    for word in words:
        is_number = word in _NUMBERS or word.isdecimal()
        if is_number and is_after_number:
            found[-1].append(word)
        elif is_number:
            found.append([word])
        elif not word.isalpha():
            found += ([digits] for digits in _DIGITS.findall(word))
        is_after_number = is_number
    return found


def solid_text(text: str) -> str:
    """The letters, digits and signs of numbers of a text, folded, without anything between."""
    return "".join(words_of(text))


def grams_of(words: Sequence[str], size: int) -> Iterator[Gram]:
    """Every run of `size` words."""
    return zip(*(words[start:] for start in range(size)), strict=False)


class Reading:
    """A text in the forms in which it is compared."""

    __slots__ = ("_groups", "_is_plain", "_pieces", "from_prompt", "mask", "run", "text")

    def __init__(self, text: str, *, from_prompt: bool = False):
        self.text, self.from_prompt = text, from_prompt
        self._is_plain = text.isascii() and not _has_signs(text)
        if self._is_plain:
            data = text.encode().translate(_MASKED)
            # Each pass halves a run, so a number of a thousand digits takes ten.
            while b"##" in data:
                data = data.replace(b"##", b"#")
            run = data.decode().split()
        else:
            run = [word if word.isalpha() else _DIGITS.sub("#", word) for word in words_of(text)]
        if not _NUMBERS.isdisjoint(run):
            self._is_plain = False
            run = ["#" if word in _NUMBERS else word for word in run]
        mask = "".join(run)
        if "##" in mask:  # numbers in a row, or a word that ends with one before a number
            run = [word for word, before in zip(run, ["", *run], strict=False) if not word == "#" == before]
            mask = "".join(run)
        self.run = run
        """The words with numbers as `#`, also those inside words (`v2` is `v#`); numbers in a row are one `#`."""
        self.mask = mask
        """Equal for texts that differ in case, punctuation, white space and numbers only."""
        self._groups: list[list[str]] | None = None
        self._pieces: list[Reading] | None = None

    @property
    def words(self) -> list[str]:
        return words_of(self.text)

    @property
    def solid(self) -> str:
        """The letters and digits alone, of a text whose words were run together or taken apart; else nothing. The mask
        of such a text is another: `two` is a number, `intotwoparts` is none."""
        letters, words = len(self.mask), len(self.run)
        return solid_text(self.text) if not 2 * words <= letters <= MOST_LETTERS * words else ""

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
        """Lines and sentences of the text, also what follows a colon or stands in quotes; nothing if it is but one."""
        if self._pieces is None:
            texts = [text for text in _ENDS.split(self.text, MAX_PIECES) if _LETTER.search(text)]
            # After a space, since without one a sign at the beginning would be punctuation.
            self._pieces = [Reading(f" {text}") for text in texts] if len(texts) > 1 else []
        return self._pieces


# Encoded texts. Entities, percent signs, base64, base32 and hex are undone before anything is compared; look-alike
# letters are folded with case and punctuation, by Unicode's table of confusable characters; rot13 and reversed text are
# looked for from the other side, by turning the index and not the rows, so that a row without them costs nothing.


MOST_LETTERS = 12
"""Of a text with more letters per word, the spaces are taken for missing. English words have 5 on average."""
MIN_CODED = 24
"""Letters of the shortest base64 that is decoded: 18 bytes. A shorter text is no task."""
MAX_CODED = 1_000_000
"""Letters of the longest; beyond it lie files."""
MOST_ESCAPES = 3
"""How often entities are undone: text that went through several web pages says `&amp;amp;quot;`."""
MOST_LAYERS = 3
"""How often what was decoded is decoded again: base64 in base64, percent escapes in base64."""
MOST_TEXTS = 20_000
"""Decoded from one text."""
MIN_READABLE = 0.9
"""Share of a decoded text that is letters, digits, spaces and common punctuation."""
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2}[^%\s]{0,30}){3}")
_QUOTED_PRINTABLE = re.compile(r"(?:=(?:[0-9A-F]{2}|\r?\n)[^=\s]{0,30}){3}")  # of mail
# Tags that format text, comments, and colours of terminals; other tags (`<answer>`, XML) say something.
_MARKUP = re.compile(
    r"<!--(?:(?!<!--).){0,2000}?-->|</?(?:a|abbr|b|big|br|code|del|div|em|font|h[1-6]|i|img|ins|kbd|li|mark|ol|p|pre|q|s|small|span|strike|"
    r"strong|sub|sup|table|tbody|td|th|thead|tr|tt|u|ul|wbr)(?:\s[^<>]{0,500})?/?>|\x1b\[[0-9;]{0,20}m",
    re.IGNORECASE | re.DOTALL,
)
# What tags and comments say: texts as long as those of other keys of messages that are looked at.
_IN_MARKUP = re.compile(r"<!--(.{20,})-->|=\s*\"([^\"]{20,})\"|=\s*'([^']{20,})'", re.DOTALL)
_BLOCKS = re.compile(r"</?(?:br|div|h[1-6]|img|li|ol|p|pre|t|ul)", re.IGNORECASE)  # tags that part words; t: of tables
_BACKSLASHED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|u\{(0{0,4}[0-9a-fA-F]{1,5})\})")
_CODED = re.compile(r"[A-Za-z0-9+/_-]{24,}(?:\r?\n[A-Za-z0-9+/_-]{4,})*={0,2}")
_CODED_WORD = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_SEPARATOR = re.compile(r"[+/_-]")
_HEX = re.compile(r"(?:[0-9a-f]{2}){18,}|(?:[0-9A-F]{2}){18,}")
_BASE32 = re.compile(r"[A-Z2-7]{24,}")
# Lengths of words, one byte each: base64 in pieces is a run of words of one length, of 24 letters together; a long
# one may be followed by the rest alone.
_SAME_LENGTHS = re.compile(
    rb"([\x04\x05])\1{4,}|([\x06\x07])\2{3,}|([\x08-\x0b])\3{2,}|([\x0c-\xff])\4+|[\x10-\xff](?=[\x04-\xff])",
    re.DOTALL,
)
_MIXED = re.compile(r"[a-z][A-Z]|[0-9][A-Za-z]|[A-Za-z][0-9]")
"""In every coded text, and in few words."""
_READABLE = re.compile(r"[\w\s.,;:!?'\"()\[\]{}<>/+*=%$#@&|`~^\\-]")
_TAGS = re.compile("[\U000e0020-\U000e007e]{8,}")
_SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]{18,}")
"""Bytes as invisible variation selectors, 256 of which Unicode has; each hides behind the letter before it."""
# UTF-8 that was read as Windows-1252 or Latin-1: `donâ€™t`. A letter for the first byte, then one to three.
_MISREAD = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018"
    "\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178]{1,3}"
)
_TURN = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "nopqrstuvwxyzabcdefghijklmNOPQRSTUVWXYZABCDEFGHIJKLM"
)
_ENCLOSED = (0x1F150, 0x1F170, 0x1F1E6)
_PALOCHKA = str.maketrans("\u04c0\u04cf", "ii")
# Accents and strokes that go with any letter; vowel signs of Indic, Arabic and Thai writing are none of these.
MARKS = re.compile("[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+")
_MORE_LOOK_ALIKES = str.maketrans(
    # Cyrillic; Armenian; Cherokee; phonetic letters and small capitals, which Unicode's table leaves as they are.
    "вкмнтьԍօսհոցզյᎪᏴᏟᎠᎬᏀᎻᏆᎫᏦᏞᎷᏢᏒᏚᎢᏙᏔᏃɩʏᴀʙᴄᴅᴇɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡᴢʋηβεκμτυωⲟⲣ",
    "bkmhtbgouhngqjabcdeghijklmprstvwziyabcdeghijklmnoprstuvwzvnbekmtuwop",
)


# Letters of other scripts that look like Latin ones. Source: confusables.txt of Unicode Technical Standard 39 (Unicode
# Security Mechanisms), Unicode License v3, as packaged in confusable-homoglyphs 3.3.1: every letter beyond ASCII whose
# prototype is one or two Latin letters once accents and strokes are left off. Letters that compatibility normalisation
# (NFKC) changes are not needed here.
LOOK_ALIKES = {
    "a": "ɑΑαАаᎪᗅꓮ𐊠𖽀",
    "aa": "Ꜳꜳ",
    "ae": "ÆæӔӕ",
    "ao": "Ꜵꜵ",
    "au": "Ꜷꜷ",
    "av": "ꜸꜹꜺꜻ",
    "ay": "Ꜽꜽ",
    "b": "ƀƂƃƄɓΒБВЬѢѣҌҍᏏᏴᑲᑳᖯᗷꓐꞴ𐊂𐊡𐌁",
    "bl": "Ы",
    "c": "ȼСсҪҫᏟᴄⲤⲥꓚꮯ𐊢𐌂𐐕𐐽𐔜",
    "d": "ÐĐđƉƌɖɗԁᎠᏧᑯᗞᗪꓒꓓ",
    "dz": "ʣ",
    "e": "ɆɇΕЕеҽҿᎬⴹꓰꬲ𐊆𑢦𑢮",
    "f": "ƑƒϜքᖴᵮẝꓝꞘꞙꬵ𐊇𐊥𐔥𑢢𑣂",
    "g": "ƍǤǥɠɡԌցᏀᏳᶃꓖ",
    "h": "ĦħɦΗНћҢһӇӉհᎻᏂᏲᕼⱧⲎꓧꚕ𐋏",
    "i": "ıɨɩɪιіӏᎥᵻᵼꙇꭵ𑣃",
    "j": "ɈɉͿϳЈјᎫᒍꓙꞲ",
    "k": "ƙΚКҚҞᏦᛕⱩⲔꓗꝀ𐔘",
    "l": "ŁłƖƗƚǀɫɭΙІӀᏞᒪᛁᣳⲒⳐⵏꓡꓲ𐊊𐌉𐐛𐔦𑢣𑢲𖼖𖼨",
    "ll": "ǁ",
    "lo": "Ю",
    "ls": "ʪ",
    "lz": "ʫ",
    "m": "ΜϺМӍᎷᗰᛖⲘꓟꭑ𐊰𐌑",
    "n": "ƝƞɲɳΝηոռᵰⲚꓠ𐔓",
    "o": "ØøƟǾɵΘΟθοσОоѲѳӨөՕօଠഠဝჿዐᎾᏫᴏᴑⲞⲟⴱⵁⵔꓳꝊꝋꬽꬾꭴꮎꮻ𐊒𐊫𐐄𐐬𐓂𐓪𐔖𑢵𑣈𑣗",
    "oe": "Œœ",
    "oo": "ꚘꚙꝎꝏ",
    "p": "ƥΡρРрᏢᑭᣖᵽⲢⲣꓑ𐊕",
    "q": "ʠԛգզⵕ",
    "r": "ƦɍɼɽгғᎡᏒᖇᣴᴦᵲⲅꓣꭇꭈꮁ𐒴𖼵",
    "s": "ƽʂЅѕՏᏕᏚᣵᵴꓢꜱꮪ𐊖𐐠𐑈𑣁𖼺",
    "t": "ŦŧƫƭƮȾΤТҬᎢᵵⲦꓔ𐊗𐊱𐌕𑢼𖼊",
    "tf": "ꝷ",
    "ts": "ʦ",
    "u": "ɄʋυՍսሀᏌᑌᴜᵾꓴꞟꭎꭒꮜ𐓎𐓶𑢸𑣘𖽂",
    "ue": "ᵫ",
    "uo": "ꭣ",
    "v": "νѴѵᏙᐯᴠⴸꓦꛟꮩ𐔝𑜆𑢠𑣀𖼈",
    "w": "ɯѡԜԝաᎳᏔᴡꓪꝡꮃ𑓅𑜊𑜎𑜏",
    "x": "ΧХхҲᕁᕽᚷⲬⵝꓫꞳ𐊐𐊴𐌗𐔧",
    "y": "ƴɎɏɣʏΥγУуҮүҰұყᎩᎽᶌỿⲨꓬꭚ𐊲𑢤𑣜𖽃",
    "z": "ƵƶȤȥʐΖᏃᙆᴢᵶꓜꮓ𑢩𑣄",
}
"""A Latin letter, or two -> the letters that look like it."""


@cache
def look_alikes() -> dict[int, str]:
    """Letters that look like Latin ones -> those, after case is folded. Texts in these scripts are folded on both
    sides, so they compare as they did."""
    return _tables()[0]


@cache
def _tables() -> tuple[dict[int, str], dict[int, str]]:
    """The table for text whose case is folded, and, of letters for which the case decides what they look like (`ν` is a
    v, `Ν` an N), the table for text as it is."""
    exact = {letter: latin for latin, letters in LOOK_ALIKES.items() for letter in letters}
    folded: dict[str, str] = {}
    for letter, latin in exact.items():
        small = letter.casefold()
        if letter == small:
            folded[small] = latin  # what the small letter looks like comes before what the capital does
        elif len(small) == 1 and not small.isascii():
            folded.setdefault(small, latin)
    for code, latin_code in _MORE_LOOK_ALIKES.items():
        small = chr(code).casefold()
        folded.setdefault(small, chr(latin_code))
    # Letters in circles, squares and flags: to Unicode they are symbols.
    folded |= {chr(first + place): chr(97 + place) for first in _ENCLOSED for place in range(26)}
    folded["\u04cf"] = "l"  # the palochka: Unicode has the small one for an i, the capital for an l
    exact |= {"\u04cf": "l", "\u04c0": "l"}
    # What looks like a capital I is an l to Unicode; here it is what its small letter is.
    exact = {one: "i" if (latin, folded.get(one.casefold())) == ("l", "i") else latin for one, latin in exact.items()}
    by_case = {one: latin for one, latin in exact.items() if folded.get(one.casefold(), latin) != latin}
    return {ord(one): latin for one, latin in folded.items()}, {ord(one): latin for one, latin in by_case.items()}


def may_be_coded(text: str) -> bool:
    """Whether there can be anything to decode; most texts are done with here."""
    if "&" in text or "%" in text or not text.isascii():
        return True
    if ("<" in text or "\x1b" in text) and _MARKUP.search(text):
        return True
    if ("\\" in text and _BACKSLASHED.search(text)) or ("=" in text and _QUOTED_PRINTABLE.search(text)):
        return True
    if len(text) < MIN_CODED:
        return False
    try:
        lengths = bytes(map(len, text.split()))
    except ValueError:  # a word of more than 255 letters
        return True
    if max(lengths, default=0) >= MIN_CODED:
        return True
    return _SAME_LENGTHS.search(lengths) is not None and _MIXED.search(text) is not None


def decoded_texts(text: str) -> Iterator[str]:
    """The text without HTML entities and markup, what the markup says, and what base64 and the like say."""
    seen: set[str] = set()
    coded: Iterable[str] = [text]
    for _ in range(1 + MOST_LAYERS):
        found = []
        for said in islice(coded, max(0, MOST_TEXTS - len(seen))):
            for plain in _undo_escapes(said):
                if plain not in seen:
                    seen.add(plain)
                    found.append(plain)
                    yield plain
        coded = chain.from_iterable(_decode_once(plain) for plain in found if may_be_coded(plain))


def _undo_escapes(text: str) -> list[str]:
    """The text without entities, backslash escapes of letters, and markup; then the long texts that the markup has,
    in comments and attributes."""
    for _ in range(MOST_ESCAPES):
        if "&" not in text or not _ENTITY.search(text):
            break
        text = html.unescape(text)
    if "\\" in text:
        text = _BACKSLASHED.sub(_escaped_letter, text)
    if "<" not in text and "\x1b" not in text:
        return [text]
    hidden = (said for found in _MARKUP.finditer(text) for said in _IN_MARKUP.findall(found[0]))
    plain = _MARKUP.sub(lambda found: " " if _BLOCKS.match(found[0]) else "", text)
    return [plain, *islice(filter(None, chain.from_iterable(hidden)), MAX_PIECES)]


def _escaped_letter(found: re.Match[str]) -> str:
    letter = chr(int(found[1] or found[2] or found[3], 16))
    return " " if "\ud800" <= letter <= "\udfff" else letter  # half of a pair, which is no letter


def _decode_once(text: str) -> Iterator[str]:
    if "%" in text and _PERCENT.search(text):
        yield unquote(text)
    if "=" in text and _QUOTED_PRINTABLE.search(text):
        yield quopri.decodestring(text.encode(errors="replace")).decode(errors="replace")
    if not text.isascii():
        # Letters that look like one Latin letter or another are read in the second way too; so are invisible tags.
        by_case = text.translate(_tables()[1])
        yield from {by_case, by_case.translate(_PALOCHKA)} - {text}
        if _TAGS.search(text):
            yield "".join(chr(ord(tag) - 0xE0000) for run in _TAGS.findall(text) for tag in run)
        for run in _SELECTORS.findall(text):
            codes = (ord(one) - (0xFE00 if one < "\ufe10" else 0xE0100 - 16) for one in run)
            if (said := _readable(bytes(codes))) is not None:
                yield said
        if _MISREAD.search(text) and (well_read := _MISREAD.sub(_read_as_utf8, text)) != text:
            yield well_read
        # Coded text, in full-width letters or with invisible ones between.
        folded = unicodedata.normalize("NFKC", text.translate(_INVISIBLE))
        if folded.isascii() and may_be_coded(folded):
            yield folded
    yield from _from_base64(text)


def _read_as_utf8(found: re.Match[str]) -> str:
    """What stood there before UTF-8 was read as Windows-1252, which leaves five bytes out, or Latin-1."""
    data = b"".join(one.encode("latin-1" if one < "\u0100" else "cp1252") for one in found[0])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return found[0]


def _from_base64(text: str) -> Iterator[str]:
    candidates = []
    for found in _CODED.finditer(text):
        if len(found[0]) <= MAX_CODED:
            candidates.append(dict.fromkeys((found[0], found[0].split("\n", 1)[0])))  # or its first line alone
    # Base64 in short lines or groups: words of one length in a row, and the shorter one behind them.
    words = text.split()
    lengths = bytes(min(len(word), 255) for word in words)
    for run in _SAME_LENGTHS.finditer(lengths):
        start, end = run.span()
        size = lengths[start]
        if end < len(words) and lengths[end] < size:
            end += 1
        if size < 255 and all(map(_CODED_WORD.fullmatch, words[start:end])):
            candidates.append({"".join(words[start:end]): None})
    for attempts in candidates:
        attempts |= {rot13(attempt): None for attempt in attempts}
        said = next((said for attempt in attempts if (said := _read(attempt)) is not None), None)
        if said is not None:
            yield said


def _read(coded: str) -> str | None:
    """What base64, base32 or hex says, if it is text that a person could read."""
    letters = "".join(coded.split()).rstrip("=")
    # Hex first, then base32: base64 has the letters of both.
    if _HEX.fullmatch(hexadecimal := letters.removeprefix("0x")):
        return _readable(bytes.fromhex(hexadecimal))
    if _BASE32.fullmatch(letters) and (said := _decode(base64.b32decode, letters + "=" * (-len(letters) % 8))):
        return said
    # What stands before it without a space (`notes/QWxs...`) is left out, or moves the groups of four.
    starts = dict.fromkeys([0, *(found.end() for found in islice(_SEPARATOR.finditer(letters), 8)), 1, 2, 3])
    letters = letters.replace("-", "+").replace("_", "/")
    for rest in (letters[start:] for start in starts if len(letters) - start >= MIN_CODED):
        # One letter alone encodes no byte: it belongs to what follows.
        rest = rest[:-1] if len(rest) % 4 == 1 else rest
        said = _decode(base64.b64decode, rest + "=" * (-len(rest) % 4))
        if said is not None:
            return said
    return None


def _decode(decode: Callable[[str], bytes], letters: str) -> str | None:
    try:
        return _readable(decode(letters))
    except (binascii.Error, ValueError):
        return None


def _readable(data: bytes) -> str | None:
    """The text in UTF-8, UTF-16 or UTF-32."""
    encodings = ["utf-8"]
    # Latin text has a zero in one of two bytes of UTF-16 and in three of four of UTF-32, and none in UTF-8. In
    # little-endian most of them stand at odd places.
    if data.count(0) * 3 >= len(data) or data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        little = data[1::2].count(0) >= data[::2].count(0)
        encodings = ["utf-32-le", "utf-16-le"] if little else ["utf-32-be", "utf-16-be"]
    for encoding in encodings:
        try:
            said = data.decode(encoding).translate(_INVISIBLE)
        except UnicodeDecodeError:
            continue
        if said and len(_READABLE.findall(said)) >= MIN_READABLE * len(said):
            return said
    return None


def rot13(text: str) -> str:
    """rot13; applied twice it gives the text back."""
    return text.translate(_TURN)


def reversed_text(text: str) -> str:
    """From the last letter to the first; applied twice it gives the text back."""
    return text[::-1]
