"""Secrets are cut out of text that leaves the process, and nothing else is."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import time
import unicodedata
from urllib.parse import quote

import pytest

from evsys_sdk import redaction
from evsys_sdk.cli.output import print_table
from evsys_sdk.errors import shorten
from evsys_sdk.files import encode_row, to_json, write_json
from evsys_sdk.format import GuardedStream
from evsys_sdk.logs import line_format
from evsys_sdk.record.journal import ROLLOUT, Journal
from evsys_sdk.redaction import (
    REDACTED,
    add_secrets,
    is_variable_name,
    learn_from_environment,
    learn_from_settings,
    learn_from_words,
    redact,
    redact_data,
    redact_values,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test knows its own secrets only."""
    monkeypatch.setattr(redaction, "_known", redaction._Known())


@pytest.mark.parametrize(
    "text",
    [
        "Incorrect API key provided: sk-proj-Abc123def456ghi789",
        "at\nsk-ant-api03-Abc123def456ghi789",
        "postgres://ann:hunter22x@db/x",
        "http://Abc123def456ghi789@host/v1",
        "Authorization: Bearer Abc123def456",
        "authorization: basic QWxhZGRpbjpvcGVuMTIz",
        '{"x-api-key": "Abc123def456"}',
        "https://h/v1?api_key=Abc123def456&n=1",
        "https://h/v1?subscription-key=Abc123def456",
        "https://h/v1?n=1&sig=Abc123def456%2Bx%3D&se=2027-01-01",
        "https://h/api/run?code=Abc123def456==",
        "https://h/v1?access=Abc123def456",
        "https://h/v1?n=1&amp;x-api-key=Abc123def456",
        "POST /v1/chat?X-Amz-Signature=Abc123def456&X-Amz-Credential=Abc123def456 failed",
        "https://h/cb#accessToken=Abc123def456",
        "https://h/v1?functionsKey=Abc123def456",
        "https://h/v1?client_password=hunter22x",
        "hf_Abc123def456ghi789jkl ghp_Abc123def456ghi789jkl012mno",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2",
    ],
)
def test_a_secret_is_known_by_its_shape_in_text_and_in_json(text):
    secrets = ("Abc123def456", "hunter22x", "QWxhZGRpbjpvcGVu", "AKIAABCDEFGHIJKLMNOP", "SflKxwRJSMeKKF2")
    for written in (redact(text), redact(json.dumps({"error": text}))):
        assert REDACTED in written and not any(secret in written for secret in secrets)
    assert isinstance(json.loads(redact(json.dumps({"error": text, "n": [1, 2.5e-7]})))["error"], str)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "a basic understanding of bearer certificates",
        "api_key: required; api_key_env: OPENAI_API_KEY; cluster_key: template_id; eos_token: <|endoftext|>",
        "https://example.com/v1/@user?x=1 and me@example.org, risk-averse, task-force_one, sk-learn",
        "https://h/v1?api-version=2024-05-01-preview&keyword=watermelon&max_tokens=12345678&sort_key=name&status_code=404",
        "https://h/run?id=3f2a9c1e-77aa-4c1b-9f0e-1234567890ab&page=2 and https://h/v1?key=${MY_KEY}&sig={sig}",
        json.dumps({"logprobs": [-4.250061511993408, 1e-05], "tokens": [257, 117, 115, 101], "api_key": 12345678}),
    ],
)
def test_other_text_and_numbers_stay(text):
    assert redact(text) == text


def test_a_secret_is_known_by_value_in_every_form_it_is_written(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", 'qu"o/te\\d-pässword7')
    for text in (
        'qu"o/te\\d-pässword7',
        json.dumps('qu"o/te\\d-pässword7'),
        json.dumps('qu"o/te\\d-pässword7', ensure_ascii=False),
        repr('qu"o/te\\d-pässword7'),
        "qu%22o%2Fte%5Cd-p%C3%A4ssword7",
        "qu%2522o%252Fte%255Cd-p%25C3%25A4ssword7",
        'QU"O/TE\\D-PÄSSWORD7',
        repr('qu"o/te\\d-pässword7'.encode())[1:],
        'qu"o/te\\d-pässword7'.encode().decode("latin-1"),
        unicodedata.normalize("NFD", 'qu"o/te\\d-pässword7'),
    ):
        assert redact_values(f"it said {text}!").replace("'", "").replace('"', "") == f"it said {REDACTED}!"
    assert "ssword" not in redact_values(json.dumps(json.dumps(json.dumps('qu"o/te\\d-pässword7'))))


@pytest.mark.parametrize(
    ("settings", "secret"),
    [
        ({"env": {"MYSVC_KEY": "ev19tok8key777"}}, "ev19tok8key777"),
        ({"SECRET_KEY_BASE": "skb9tok8key7777"}, "skb9tok8key7777"),
        ({"headers": "Accept: a/b\nX-Gate: hs19tok8key777"}, "hs19tok8key777"),
        ({"http_headers": [["X-Gate", "xl19tok8key777"]]}, "xl19tok8key777"),
        ({"headers": ["X-Gate: xm19tok8key777"]}, "xm19tok8key777"),
        ({"connection_string": "Server=h;AccountKey=Zz81kkQ9xx+/ab=="}, "Zz81kkQ9xx+/ab=="),
        ({"db": "host=h;Password=pz81kkQ9xx;"}, "pz81kkQ9xx"),
        ({"basic_auth": "bob:s3cretpw9"}, "s3cretpw9"),
        ({"openai_key": "okey9dash8key77"}, "okey9dash8key77"),
        ({"service_account": '{"type": "service_account", "private_key": "cj19tok8key777"}'}, "cj19tok8key777"),
        ({"given": '{"api_key": "gj19tok8key777"}'}, "gj19tok8key777"),
    ],
)
def test_keys_in_settings_of_many_shapes_are_secrets(settings, secret):
    learn_from_settings(settings, {})
    assert redact(f"the server refused {secret}.") == f"the server refused {REDACTED}."


def test_settings_that_hold_no_key_do_not_become_secrets():
    learn_from_settings(
        {
            "env": {"MAX_TOKENS": "twelve hundred", "CLUSTER_KEY": "templates", "HF_HOME": "/models/cache/hf"},
            "headers": {"Accept": "application/json", "User-Agent": "lab-client-7"},
            "sort_key": "difficulty-level-2",
            "note": "score=high; template=mail-2024",
        },
        {},
    )
    said = "twelve hundred templates in /models/cache/hf: application/json lab-client-7 difficulty-level-2 mail-2024"
    assert redact(said) == said


@pytest.mark.parametrize(
    ("name", "value"),
    [("SSH_AUTH_SOCK", "/tmp/ssh-7/agent.1"), ("TOKENIZERS_PARALLELISM", "disabled1"), ("SOME_KEY", "1234567890"),
     ("PUBLIC_KEY", "ordinary"), ("HF_TOKEN", "short1")],
)  # fmt: skip
def test_variables_that_hold_no_secret_are_not_taken_for_one(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert redact_values(f"see {value} here") == f"see {value} here"


def test_variables_of_a_dotenv_file_are_known_before_anybody_reads_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(
        '# ours\nexport SERVICE_API_KEY=plain-value-1\nOTHER_TOKEN = "quoted # value 2"  # said\n'
        "THIRD_SECRET='single value 3'\r\nDB_PASSWORD=hunter2-value # old\nKEY_OF_MANY=\"first-line-4\nsecond-line\"\n"
        "LEVEL=debug-level-5\nEMPTY_TOKEN=\nnot a line\n"
    )
    said = redact(
        "plain-value-1, quoted # value 2, single value 3, hunter2-value, first-line-4\nsecond-line, debug-level-5"
    )
    assert said == ", ".join([REDACTED] * 5 + ["debug-level-5"])


def test_a_dotenv_that_is_no_file_of_settings_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / ".env")
    assert redact("plain text") == "plain text"


def test_a_variable_that_code_of_the_project_sets_is_known(monkeypatch):
    redact("what is known is looked up here")
    monkeypatch.setenv("SET_LATER_TOKEN", "value-of-later-1")
    learn_from_environment()
    assert redact("value-of-later-1") == REDACTED


def test_settings_and_the_command_line_name_secrets(monkeypatch):
    monkeypatch.setenv("ODDLY_NAMED", "zq7-first-secret")
    learn_from_settings(
        {
            "run": {"backend": {"params": {"api_key_env": "ODDLY_NAMED", "base_url": "http://u:second-pw9@h/v1"}}},
            "eval": [{"params": {"api_key": "third-secret"}}, {"params": {"api_key_env": "plain fourth secret"}}],
            "cluster_key": "template_id",
        }
    )
    learn_from_words(
        ["run", "c.yaml", "--set", "run.backend.params.api_key=fifth-secret", "--set=a.password='sixth-word'"]
    )
    told = redact_values(
        "zq7-first-secret second-pw9 third-secret plain fourth secret fifth-secret sixth-word template_id ODDLY_NAMED"
    )
    assert told == " ".join([REDACTED] * 6) + " template_id ODDLY_NAMED"


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("https://h/v1?subscription-key=abcdefgh1234", "abcdefgh1234"),
        ("https://h/v1?u=Zx81kQ0pLm27TvYw93Bd", "Zx81kQ0pLm27TvYw93Bd"),
        ("https://h/v1?api-version=2024-05-01-preview&customer=9f8e7d6c5b4a39281706", "9f8e7d6c5b4a39281706"),
        ("https://h/v1?sig=a%2Bb%2Fc1d2e3f4%3D", "a+b/c1d2e3f4="),
    ],
)
def test_keys_in_the_query_of_a_url_are_secrets_wherever_a_server_echoes_them(url, secret):
    learn_from_settings({"run": {"backend": {"params": {"base_url": url}}}})
    assert redact_values(f"denied for {secret} (2024-05-01-preview)") == f"denied for {REDACTED} (2024-05-01-preview)"
    told = redact_data({"base_url": url})["base_url"]
    assert REDACTED in told and told.startswith("https://h/v1?") and secret not in told


def test_plain_values_in_the_query_of_a_url_are_no_secrets():
    url = (
        "https://h/v1?api-version=2024-05-01-preview&model=smollm2-135m-instruct&key=name&code=standard&region=eu-west"
    )
    learn_from_settings({"base_url": url})
    assert redact_data({"base_url": url, "note": "standard name"}) == {"base_url": url, "note": "standard name"}


def test_a_setting_whose_name_says_so_loses_its_value_also_when_it_is_short():
    told = redact_data({"api_key": "abc", "arms.a.params.password": "x", "max_tokens": 5, "n": [1, {"token": "t"}]})
    assert told == {
        "api_key": REDACTED,
        "arms.a.params.password": REDACTED,
        "max_tokens": 5,
        "n": [1, {"token": REDACTED}],
    }


def test_records_logs_and_journals_hold_no_secret_and_datasets_come_back_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "value-of-key-77")
    by_shape = "sk-Abc123def456ghi789"
    text = f"401: value-of-key-77 {by_shape}"
    path = write_json(tmp_path / "record.json", {"error": text, "n": [1, 2.5]})
    assert json.loads(path.read_text()) == {"error": f"401: {REDACTED} {REDACTED}", "n": [1, 2.5]}
    journal = Journal(tmp_path / "j.sqlite")
    line = journal.begin("r", "f")
    line.add("end", {"error": text}, at=0)
    line.add(ROLLOUT, {"turns": [{"text": text, "completion_tokens": [77, 789]}]}, at=0)
    assert line.events(upto=1)[0].data == {"error": f"401: {REDACTED} {REDACTED}"}
    # What the model wrote is graded again from the record: only known values are cut out of it.
    assert line.rollouts("0")[""] == {
        "turns": [{"text": f"401: {REDACTED} {by_shape}", "completion_tokens": [77, 789]}]
    }
    assert "value-of-key-77" not in to_json({"error": text})
    record = logging.LogRecord("evsys_sdk", logging.ERROR, "f", 1, "said %s", (text + "\x1b[2J",), None)
    assert line_format().format(record).endswith(f"said 401: {REDACTED} {REDACTED}\\u001b[2J")
    assert json.loads(encode_row({"prompt": text})) == {"prompt": text}


def test_half_a_secret_does_not_stay_behind_when_a_text_is_shortened(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "Zy9" * 40)
    assert "Zy9" not in shorten(f"the key {'Zy9' * 40} was refused", 60)


@pytest.mark.parametrize("before", ["", "a", "ab", "ann:", "somebody:"])
@pytest.mark.parametrize("after", ["", "!", "=="])
@pytest.mark.parametrize("alphabet", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64_with_a_secret_in_it_goes_as_a_whole(before, after, alphabet):
    secret = "pw?>~ of Ann-77"
    add_secrets([secret])
    coded = alphabet(f"{before}{secret}{after}".encode()).decode()
    assert redact_values(f"got {coded} as header") == f"got {REDACTED} as header"
    assert redact_values(f"got {secret.encode().hex()}") == f"got {REDACTED}"


def test_user_and_password_of_a_url_are_known_in_the_header_that_a_client_makes_of_them():
    learn_from_settings({"base_url": "http://ann:p%40ss%2Fw9@127.0.0.1:9/v1", "next": "https://bo:hunter2@h"})
    header = base64.b64encode(b"ann:p@ss/w9").decode()
    short = base64.b64encode(b"bo:hunter2").decode()
    told = redact_values(json.dumps({"sent": [header, short], "said": "p@ss/w9 p%40ss%2Fw9 hunter2 p%40ss%2fw9"}))
    assert json.loads(told) == {"sent": [REDACTED] * 2, "said": " ".join([REDACTED] * 4)}
    unknown = base64.b64encode(b"eve:unknown-pw").decode()
    assert redact(f"refused 'Basic {unknown}'") == f"refused 'Basic {REDACTED}'"


@pytest.mark.parametrize("between", ["\n", "\r\n", "\\n", "\n    ", " \u2502\n\u2502 ", "\n> "])
@pytest.mark.parametrize("width", [1, 3, 7, 20])
def test_a_secret_that_was_broken_over_lines_goes(between, width):
    secret = "Zq9-long.secret+value/0815"
    add_secrets([secret])
    pieces = [secret[start : start + width] for start in range(0, len(secret), width)]
    assert redact_values(f"it was {between.join(pieces)} there") == f"it was {REDACTED} there"


def test_headers_and_nested_or_numeric_secrets_of_a_config_are_secrets():
    settings = {
        "headers": {
            "X-Tenant": "tenant-one-9",
            "Content-Type": "application/json",
            "Authorization": "Bearer tok-en-ab1",
        },
        "params": {"extra_headers": {"Cookie": "sid=abcdef99"}, "private_key": 123456789012345},
        "credentials": {"user": "ann-the-user", "values": ["first-one-1"]},
        "api_keys": ["second-one-2", 987654321],
        "n": 123456789012345678,
    }
    learn_from_settings(settings)
    told = redact_data(settings)
    assert told == {
        "headers": {"X-Tenant": REDACTED, "Content-Type": "application/json", "Authorization": REDACTED},
        "params": {"extra_headers": {"Cookie": REDACTED}, "private_key": REDACTED},
        "credentials": {"user": REDACTED, "values": [REDACTED]},
        "api_keys": [REDACTED, REDACTED],
        "n": 123456789012345678,
    }
    said = "tenant-one-9 tok-en-ab1 sid=abcdef99 123456789012345 ann-the-user first-one-1 second-one-2 987654321"
    assert redact_values(said) == " ".join([REDACTED] * 8)
    assert redact_values("application/json 0.987654321 987654321.5 1987654321") == (
        "application/json 0.987654321 987654321.5 1987654321"
    )
    assert redact_data({"run.headers.X-Tenant": "other-tenant", "run.headers.Accept": "text/html"}) == {
        "run.headers.X-Tenant": REDACTED,
        "run.headers.Accept": "text/html",
    }


def test_json_in_which_a_number_was_a_secret_is_still_json():
    add_secrets(["123456789012345"])
    data = {"n": [123456789012345, 1.5], "said": "code: 123456789012345, \\"}
    for text in (json.dumps(data), json.dumps(data, indent=2)):
        assert json.loads(redact_values(text)) == {"n": [REDACTED, 1.5], "said": f"code: {REDACTED}, \\"}
    lines = redact_values("\n".join([json.dumps(data)] * 2)).splitlines()
    assert [json.loads(line)["n"][0] for line in lines] == [REDACTED] * 2


def test_a_variable_that_the_config_or_the_command_line_names_is_a_secret(monkeypatch):
    monkeypatch.setenv("MYSVC_ACCESS", "plainwordsecret")
    monkeypatch.setenv("MYSVC_OTHER", "other-secret-42")
    monkeypatch.setenv("MYSVC_THIRD", "third-secret-43")
    monkeypatch.setenv("MYSVC_HOME", "/srv/mysvc-9")
    learn_from_words(["eval", "model", "--api-key-env", "MYSVC_ACCESS", "--set", "a.params={access: $MYSVC_THIRD}"])
    learn_from_settings({"auth_from": "MYSVC_OTHER", "folder": "MYSVC_HOME"})
    said = "plainwordsecret other-secret-42 third-secret-43 /srv/mysvc-9"
    assert redact_values(said) == f"{REDACTED} {REDACTED} {REDACTED} /srv/mysvc-9"


@pytest.mark.parametrize(
    ("value", "is_name"),
    [("OPENAI_API_KEY", True), ("MYSVC_ACCESS", True), ("E2B_API_KEY", True), ("KEY2", True), ("my_token", True),
     ("AWS_S3_KEY_01", True), ("AKIAIOSFODNN7EXAMPLE", False), ("QWERTYUIOPASDFGH", False), ("X9K2M4P7Q1Z8", False),
     ("SK_LIVE_51H8XYZ9ABCDE", False), ("sk-abc", False), ("abcDEF123ghi456jkl", False), ("f00ba7f00ba7f00b", False),
     ("correct_horse_battery_staple", False), ("QWERTY_UIOPAS_DFGHJK", False), ("abcdefghijklm", False),
     ("OPENAI_APIKEY_PROD", True), ("my_company_api_token", True)],
)  # fmt: skip
def test_a_key_in_the_place_of_a_variables_name_is_known_by_how_it_reads(value, is_name):
    assert is_variable_name(value) is is_name
    learn_from_settings({"api_key_env": value})
    assert redact_data({"run.backend.params.api_key_env": value}) == {
        "run.backend.params.api_key_env": value if is_name else REDACTED
    }
    assert (REDACTED in redact_values(f"set {value}")) is (not is_name and len(value) >= 8)


KEY = "corr3ct-horse/battery+staple"
SHAPE = "sk-proj-abcdefgh12345678ijkl"


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("said", "left"),
    [(f"key {KEY} end\n", f"key {REDACTED} end\n"), (f"{KEY}{KEY}", REDACTED * 2), (f"x={json.dumps(KEY)},", None),
     (f"url {quote(KEY, safe='')}\n", f"url {REDACTED}\n"), (f"{KEY[:9]}, then\n", f"{KEY[:9]}, then\n")],
)  # fmt: skip
def test_a_secret_that_is_written_to_a_stream_in_pieces_is_redacted(said, left, size, flushes):
    add_secrets([KEY])
    out = io.StringIO()
    stream = GuardedStream(out)
    for place in range(0, len(said), size):
        stream.write(said[place : place + size])
        if flushes:
            stream.flush()
    stream.finish()
    assert KEY not in out.getvalue() and out.getvalue() == (left or f'x="{REDACTED}",')


@pytest.mark.parametrize("said", [SHAPE, f"Authorization: Bearer {SHAPE[8:]}", f"api_key={SHAPE[8:]}"])
@pytest.mark.parametrize("size", [1, 5, 11])
def test_a_secret_known_by_its_shape_is_redacted_when_it_is_written_in_pieces(said, size):
    out = io.StringIO()
    stream = GuardedStream(out)
    for place in range(0, len(said), size):
        stream.write(said[place : place + size])
    stream.write("\n")
    assert "12345678" not in out.getvalue() and REDACTED in out.getvalue()


VALUE = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6"
SHAPED = [
    *(
        f"{mark}{VALUE}"
        for mark in ("sk-", "sk_live_", "hf_", "ghp_", "github_pat_", "glpat-", "xoxb-", "AIza", "ya29.")
    ),
    *(f"{mark}{VALUE}" for mark in ("Bearer ", "api_key=", "x-api-key: ", '"api_key": "', "client_secret=")),
    *(f"{mark}{VALUE}" for mark in ("Authorization: ", "authorization, token ", "https://h/p?key=", "?a=1&sig=")),
    f"https://hooks.slack.com/services/T000/B000/{VALUE}",
    f"https://user:{VALUE}@host/x",
    f"-----BEGIN RSA PRIVATE KEY-----\nMII\n{VALUE}\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SHAPED)
def test_a_secret_known_by_its_shape_is_redacted_wherever_the_stream_is_flushed(secret):
    said = f"got {secret} and more\n"
    assert REDACTED in redact(said)
    splits = [[said[:at], said[at:]] for at in range(1, len(said))]
    splits += [[said[at : at + size] for at in range(0, len(said), size)] for size in (1, 2, 3, 5, 11)]
    for pieces in splits:
        out = io.StringIO()
        stream = GuardedStream(out)
        for piece in pieces:
            stream.write(piece)
            stream.flush()
        stream.finish()
        left = out.getvalue()
        assert VALUE[:4] not in left and VALUE[-4:] not in left, pieces
        assert REDACTED in left and left.startswith("got ") and left.endswith(" and more\n"), pieces


def test_what_became_a_secret_after_it_was_written_is_not_written_twice():
    out = io.StringIO()
    stream = GuardedStream(out)
    print("user late-secret-77 says", file=stream, flush=True)
    add_secrets(["late-secret-77"])
    print("hello late-secret-77", file=stream, flush=True)
    assert out.getvalue() == f"user late-secret-77 says\nhello {REDACTED}\n"


def test_a_flushed_line_is_there_at_once_and_ordinary_text_is_not_changed():
    add_secrets([KEY])
    out = io.StringIO()
    stream = GuardedStream(out)
    print("12 of", 40, end="", file=stream, flush=True)
    assert out.getvalue() == "12 of 40"
    stream.write(", done\n")
    assert out.getvalue() == "12 of 40, done\n"


def test_a_secret_in_a_table_cell_is_redacted_before_the_cell_is_wrapped(monkeypatch):
    add_secrets([KEY])
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", "24")
    print_table(["name", "about"], [["a", f"said {KEY} and more"]])
    assert "battery" not in out.getvalue() and "staple" not in out.getvalue() and "[redacte" in out.getvalue()


def test_what_a_tool_printed_is_redacted_and_what_the_model_wrote_is_not():
    from evsys_sdk.redaction import redact_rollout

    add_secrets(["s3cr3t-of-the-shell"])
    turn = {"text": "echo s3cr3t-of-the-shell", "observation": "KEY=s3cr3t-of-the-shell"}
    found = redact_rollout({"turns": [{"text": "env", "observation": ""}, turn], "error": None, "metadata": {}})
    assert found["turns"][0] == {"text": "env", "observation": ""}
    assert found["turns"][1]["text"] == turn["text"] and "s3cr3t" not in found["turns"][1]["observation"]


SHAPED = [
    "sk-Abc123def456ghi789", "sk_live_Abc123def456", "rk_test_Abc123def456", "pk_live_Abc123def456",
    "hf_Abc123def456ghi789", "ghp_Abc123def456ghi789jkl", "gho_Abc123def456ghi789jkl", "ghu_Abc123def456ghi789jkl",
    "ghs_Abc123def456ghi789jkl", "ghr_Abc123def456ghi789jkl", "github_pat_Abc123def456ghi789jkl",
    "glpat-Abc123def456ghi789", "xoxb-Abc123def456", "xai-Abc123def456ghi789", "gsk_Abc123def456ghi789",
    "tml-Abc123def456ghi789", "e2b_Abc123def456ghi789", "r8_Abc123def456ghi789", "nvapi-Abc123def456ghi789",
    "AKIAABCDEFGHIJKLMNOP", "ASIAABCDEFGHIJKLMNOP", "AIzaAbc123def456ghi789jkl012mno345pq",
    "ya29.Abc123def456ghi789jkl", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2",
    "hooks.slack.com/services/Abc123/def456/ghi789jkl",
]  # fmt: skip
ASSIGNED = [
    f"{first}{sign}{last}{by}Abc123def456"
    for first in ("api", "Auth", "ACCESS")
    for sign in ("", "-", "_")
    for last in ("key", "Token")
    for by in ("=", ": ", '": "')
] + ["Bearer Abc123def456", "password=Abc123def456", "PASSWD=Abc123def456", "client_secret=Abc123def456"]  # fmt: skip


@pytest.mark.parametrize("secret", [*SHAPED, *ASSIGNED])
def test_each_shape_alone_starts_the_search_for_it(secret: str) -> None:
    # Redaction first asks cheaply whether a text may hold a shape; that question must not miss one.
    for text in (secret, f"so: {secret} and on", f'{{"text": "a\\n{secret}"}}'):
        assert REDACTED in redact(text)


def test_a_rollout_without_secrets_is_searched_by_no_slow_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def sub(self, *_: object) -> str:
            raise AssertionError("a slow search ran")

    for name in ("_SHAPES", "_AFTER", "_HEADER", "_BASIC"):
        monkeypatch.setattr(redaction, name, Refused())
    path = "/api/dashboard/api/sdk/generations/7b0f5f0e-6c1f/predictions/"
    line = to_json({"path": path, "body": {"task_id": "t-1", "completion": "Accessing the author's key."}})
    assert redact(line) == line


@pytest.mark.parametrize("unit", ["api_key=", "password=", "sk-", "-eyJ", "sk-a", "bearer x "])
def test_the_search_for_shapes_takes_no_time_that_grows_with_the_square(unit: str) -> None:
    """A server can answer with any text, and its error is redacted before it is shortened."""
    begin = time.process_time()
    redact(unit * 24_000)
    assert time.process_time() - begin < 3, "CPU seconds, below 1; where time grows with the square it is 7 and more"
