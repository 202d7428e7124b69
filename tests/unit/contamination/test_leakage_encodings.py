"""Tasks that stand in training rows in disguise are found, and what only looks like a disguise is left alone."""

from __future__ import annotations

import base64
import codecs
import html
import json
import quopri
from urllib.parse import quote

import pytest

from evsys_sdk.contamination import normalize
from evsys_sdk.contamination.audit import audit_rows
from evsys_sdk.contamination.normalize import decoded_texts, look_alikes, words_of
from evsys_sdk.data_types import HarborTask, InProcessVerifier

LONG = (
    "A freight train leaves Hamburg at noon and meets the night express near the old bridge; "
    "which of the drivers has to wait, and why does the signal box not answer?"
)
SHORT = "Name the capital of Peru"
OTHER = "Which river flows through the old town of Prague and where does it reach the sea?"
CLEAN = [{"prompt": f"row {n} speaks of {word} things and of nothing else at all"} for n, word in enumerate("abcdefgh")]


def task(text: str, name: str = "t") -> HarborTask:
    return HarborTask(task_id=name, instruction=text, verifier=InProcessVerifier(fn_name="exact_match", expected="7"))


def kinds(row: dict, text: str = LONG) -> dict[str, int]:
    return audit_rows([*CLEAN, row], [task(text), task(OTHER, "other")], benchmark="b").kinds


def cyrillic(text: str) -> str:
    return text.translate(str.maketrans("aeopcxyAEOPCX", "аеорсхуАЕОРСХ"))


def greek(text: str) -> str:
    return text.translate(str.maketrans("oiAEN", "οιΑΕΝ"))


def entities(text: str) -> str:
    return html.escape(text).replace("'", "&#39;").replace("t", "&#116;").replace(" ", "&nbsp;")


def no_break(text: str) -> str:
    return text.replace(" ", "\u00a0").replace("-", "\u2011")


def in_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def in_lines(text: str) -> str:
    return base64.encodebytes(text.encode()).decode()


def url_safe(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def unicode_look_alikes(text: str) -> str:
    """Each of these letters is one that Unicode's table has for its Latin letter, beyond the usual dozen."""
    return text.translate(str.maketrans("vlrugNnfTw", "νӏгսցΝոքТԝ"))


def capitals_and_small(text: str) -> str:
    return text.translate(str.maketrans("NvAHo", "ΝνΑΗο"))


def accents(text: str) -> str:
    return "".join(f"{letter}\u0301\u0336" if letter.isalpha() else letter for letter in text)


def strokes(text: str) -> str:
    return text.translate(str.maketrans("olditea", "øłđıŧéą"))


def short_lines(text: str) -> str:
    coded = in_base64(text)
    return "\n".join(coded[start : start + 20] for start in range(0, len(coded), 20))


def groups_of_four(text: str) -> str:
    coded = in_base64(text)
    return " ".join(coded[start : start + 4] for start in range(0, len(coded), 4))


def wide(text: str) -> str:
    return base64.b64encode(text.encode("utf-16")).decode()


def wide_big_endian(text: str) -> str:
    return base64.b64encode(text.encode("utf-16-be")).decode()


def twice(text: str) -> str:
    return in_base64(in_base64(text))


def behind_a_path(text: str) -> str:
    return f"notes/x/{in_base64(text)}"


def in_hex(text: str) -> str:
    return text.encode().hex()


def in_hex_of_c(text: str) -> str:
    return "0x" + in_hex(text)


def in_base32(text: str) -> str:
    return base64.b32encode(text.encode()).decode()


def percent(text: str) -> str:
    return quote(text, safe="")


def tags(text: str) -> str:
    return "ok " + "".join(chr(0xE0000 + ord(letter)) for letter in text)


def rot13(text: str) -> str:
    return codecs.encode(text, "rot13")


def rot13_of_base64(text: str) -> str:
    return rot13(in_base64(text))


def three_times(text: str) -> str:
    return in_base64(twice(text))


def percent_in_base64(text: str) -> str:
    return in_base64("".join(f"%{byte:02X}" for byte in text.encode()))


def base64_in_percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in in_base64(text).encode())


def entities_in_base64(text: str) -> str:
    return in_base64("".join(f"&#{ord(letter)};" for letter in text))


def backslashes(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" if letter in "aei " else letter for letter in text)


def bytes_with_backslashes(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def bold_words(text: str) -> str:
    return " ".join(f'<span class="x"><b>{word}</b></span>' for word in text.split())


def table_cells(text: str) -> str:
    return "<tr><td>" + "</td><td>".join(text.split()) + "</td></tr>"


def comments_in_words(text: str) -> str:
    return " ".join(f"{word[:2]}<!-- x -->{word[2:]}" for word in text.split())


def colours(text: str) -> str:
    return " ".join(f"\x1b[1;31m{word}\x1b[0m" for word in text.split())


def quoted_printable(text: str) -> str:
    return quopri.encodestring(text.encode(), quotetabs=True).decode()


def full_width(text: str) -> str:
    return "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in text)


def base64_in_full_width(text: str) -> str:
    return full_width(in_base64(text))


def base64_with_invisible_letters(text: str) -> str:
    return "\u200b".join(in_base64(text))


def invisible_letters_in_base64(text: str) -> str:
    return in_base64("\u200b".join(text))


def rot13_in_full_width(text: str) -> str:
    return full_width(rot13(text))


def fillers(text: str) -> str:
    return "".join(
        letter + filler for letter, filler in zip(text, "\u3164\u115f\uffa0\u17b4" * len(text), strict=False)
    )


def white_on_black(text: str) -> str:
    return "".join(chr(0x1F170 + ord(one) - 65) if "A" <= one <= "Z" else one for one in text.upper())


def from_back_to_front(text: str) -> str:
    return text[::-1]


def enclosing_marks(text: str) -> str:
    return "".join(f"{letter}\u0300\u0489" if letter.isalpha() else letter for letter in text)


def misread(text: str) -> str:
    """UTF-8 with no-break spaces and a typographic quote, read as Windows-1252."""
    return f"‘{text}".replace(" ", "\u00a0").encode().decode("cp1252")


def misread_as_latin(text: str) -> str:
    return f"—{text}".replace(" ", "\u2003").encode().decode("latin-1")


def variation_selectors(text: str) -> str:
    return "so" + "".join(chr(0xFE00 + byte if byte < 16 else 0xE0100 + byte - 16) for byte in text.encode())


def braces(text: str) -> str:
    return "".join(f"\\u{{{ord(letter):x}}}" for letter in text)


DISGUISES = [
    cyrillic, greek, unicode_look_alikes, capitals_and_small, accents, strokes, entities, no_break, percent, tags,
    in_base64, in_lines, short_lines, groups_of_four, url_safe, wide, wide_big_endian, twice, behind_a_path, in_hex,
    in_hex_of_c, in_base32, rot13, rot13_of_base64, three_times, percent_in_base64, base64_in_percent,
    entities_in_base64, backslashes, bytes_with_backslashes, bold_words, table_cells, comments_in_words, colours,
    quoted_printable, full_width, base64_in_full_width, base64_with_invisible_letters, invisible_letters_in_base64,
    rot13_in_full_width, fillers, white_on_black, from_back_to_front, enclosing_marks, misread, misread_as_latin,
    variation_selectors, braces,
]  # fmt: skip


@pytest.mark.parametrize("disguise", DISGUISES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("text", [LONG, SHORT])
def test_a_task_in_disguise_is_found_as_a_whole(disguise, text):
    assert kinds({"prompt": disguise(text)}, text)


@pytest.mark.parametrize("disguise", DISGUISES, ids=lambda one: one.__name__)
def test_and_within_a_longer_message(disguise):
    said = f"Look at this first, please.\n{disguise(LONG)}\nThen tell me what to make of it."
    row = {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "ok"}]}
    assert kinds(row)


COUNTED = "A rope of 60 metres is cut into two parts, one of which is five times as long; how long are the two parts?"


@pytest.mark.parametrize(
    "spaces",
    [
        lambda text: text.replace(" ", ""),
        lambda text: "".join(word.capitalize() for word in text.split()),
        lambda text: text.replace(" ", "\u3164"),
        lambda text: "\u2800".join(text),
    ],
    ids=["none", "capitals", "fillers", "after each letter"],
)
def test_a_text_with_spelt_numbers_is_found_without_its_spaces(spaces):
    assert kinds({"prompt": spaces(COUNTED)}, COUNTED) == {"normalised": 1}


def test_another_text_without_spaces_is_no_copy():
    other = COUNTED.replace("rope", "cable").replace("cut into", "made of")
    assert kinds({"prompt": other.replace(" ", "")}, COUNTED) == {}
    assert kinds({"prompt": "???"}, "!!!") == {}


def test_most_of_a_text_in_rot13_is_found():
    assert kinds({"prompt": rot13(f"Well now. {LONG[:-30]}")}) == {"ngram": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "metadata": {"note": {"deep": [LONG]}}},
        {"messages": [{"role": "user", "content": "go"}], "metadata": {"from": LONG}},
        {"messages": [{"role": "user", "content": "go"}], "tools": [{"function": {"name": "x", "description": LONG}}]},
        {"messages": [{"role": "user", "content": "go", "tools": [{"function": {"description": rot13(LONG)}}]}]},
        {"prompt": "hi", "functions": [{"name": "x", "parameters": {"properties": {"q": {"description": LONG}}}}]},
        {"prompt": "hi", "metadata": {"tools": [{"description": in_base64(LONG)}]}},
        {"prompt": "hi", "metadata": {LONG: 1}},
        {"prompt": "hi", "metadata": {"seen": [{in_base64(LONG): True}]}},
    ],
)
def test_metadata_and_tool_descriptions_are_looked_at(row):
    assert kinds(row)


def says(**keys):
    return {"messages": [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "done", **keys}]}


def calls(arguments):
    return says(tool_calls=[{"id": "1", "type": "function", "function": {"name": "ask", "arguments": arguments}}])


@pytest.mark.parametrize(
    "row",
    [
        says(reasoning_content=f"I remember it. {LONG} So the answer is 7."),
        says(thinking=LONG),
        says(reasoning=[{"type": "summary", "text": LONG}]),
        says(refusal=LONG),
        says(reasoning_details=[{"data": {"text": LONG}}]),
        says(function_call={"name": "ask", "arguments": json.dumps({"question": LONG})}),
        says(content=[{"type": "thinking", "thinking": LONG}, {"type": "text", "text": "7"}]),
        says(content=[{"type": "tool_use", "name": "ask", "input": {"questions": [LONG]}}]),
        says(content=[{"type": "tool_result", "content": [{"type": "text", "text": LONG}]}]),
        calls({"questions": [{"text": LONG}]}),
        calls(json.dumps({"question": LONG.replace(";", ";\n")}, ensure_ascii=True)),
        calls(json.dumps(["x", {"deep": [LONG]}])),
        {"prompt": [{"role": "user", "content": "go", "thinking": LONG}], "completion": "done"},
        {**says(), "reasoning_content": LONG},
    ],
)
def test_what_a_message_says_beside_its_content_is_looked_at(row):
    assert sum(kinds(row).values()) == 1


def test_short_texts_beside_the_content_are_no_copy():
    assert kinds(says(name="capital", refusal="Name the capital", thinking=SHORT[:15]), SHORT) == {}


def test_tools_that_all_rows_share_are_a_shared_prompt_and_no_leak():
    tools = [{"function": {"name": "x", "description": LONG}}]
    rows = [{"messages": [{"role": "user", "content": f"row {n}, of words"}], "tools": tools} for n in range(60)]
    audit = audit_rows(rows, [task(LONG), task(OTHER, "other")], benchmark="b")
    assert audit.clean and audit.shared == 1


def test_short_words_in_metadata_are_nobodys_copy():
    rows = [{"prompt": f"row {n}", "metadata": {"kind": SHORT[:8], "id": "Peru"}} for n in range(5)]
    assert audit_rows(rows, [task("Peru"), task(SHORT[:8], "u")], benchmark="b").clean


@pytest.mark.parametrize(
    "text",
    [
        "see https://example.org/a/very/long/path/that/has/no/spaces_in_it/at-all-0123456789",
        "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "internationalisation_of_something_long_in_snake_case",
        base64.b64encode(bytes(range(200, 256)) * 4).decode(),
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "R&D and AT&T; a&b;",
        "a" * 23,
        "four word long text that only uses even same size tiny bits here also they stop",
        "abcdefghij abcdefghij klmnopqrst uvwxyzabcd",
        "100% of 5% and 20% are %20 or so",
        "think: <answer>7</answer> <think>no</think> and a < b, c > d; List<T> of <item id=3>",
        "\\\\times \\\\nu \\\\xi \\\\unit \\\\n C:\\\\users\\\\new",
        "x=1, y=20, z=3, AB=CD=EF, ==A1== and 3=12",
    ],
)
def test_what_is_no_text_in_base64_is_left_as_it_is(text):
    assert list(decoded_texts(text)) == [text]


@pytest.mark.parametrize(
    "hidden",
    [
        "hello <!-- {text} --> there",
        '<span class="note" title="{text}">see this</span>',
        "<img src='chart.png' alt='{text}'>",
        '<a href="data:text/plain;base64,{coded}">see this</a>',
        "&lt;!-- {coded} --&gt; hello",
    ],
)
def test_what_comments_and_attributes_say_is_looked_at(hidden):
    said = hidden.format(text=LONG, coded=base64.b64encode(LONG.encode()).decode())
    assert kinds({"prompt": said})


def test_markup_of_a_task_counts_as_little_as_that_of_a_row():
    assert kinds({"prompt": LONG}, bold_words(LONG)) == {"exact": 1}
    assert kinds({"prompt": LONG}, LONG.replace("freight", "<think>freight</think>")) != {"exact": 1}


def test_half_of_an_escaped_pair_is_no_letter():
    assert next(decoded_texts("a\\ud83d b")) == "a  b"


def test_entities_are_undone_also_when_they_were_escaped_twice():
    assert next(decoded_texts("5 &lt; 6 &amp;amp; 7")) == "5 < 6 & 7"


def test_texts_in_other_scripts_compare_as_they_did():
    russian = "Сколько месяцев в году имеют ровно тридцать дней и почему это так"
    assert words_of(russian) == words_of(russian.upper()) == words_of(russian.lower())
    assert kinds({"prompt": russian.upper() + "!"}, russian) == {"normalised": 1}
    assert not kinds({"prompt": "Почему зимой дни короче, чем летом, и где это не так"}, russian)


def test_look_alikes_are_letters_and_rot13_is_its_own_way_back():
    assert all(value.isascii() and value.isalpha() for value in look_alikes().values())
    assert normalize.rot13(normalize.rot13(LONG)) == LONG and normalize.rot13("Uryyb, 12 jbeyqf") == "Hello, 12 worlds"


def test_a_greek_text_and_its_capitals_are_one_text():
    greek_text = "Ποιος ποταμός περνά από την παλιά πόλη και πού φτάνει στη θάλασσα το καλοκαίρι"
    assert kinds({"prompt": greek_text.upper() + "!"}, greek_text)
    assert not kinds({"prompt": "Πόσοι μήνες του χρόνου έχουν τριάντα ημέρες και γιατί είναι έτσι"}, greek_text)


def test_vowel_signs_are_part_of_their_word():
    assert words_of("किताब") != words_of("कतब") and words_of("が") != words_of("か") and words_of("한글") == ["한글"]
