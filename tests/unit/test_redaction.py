"""Secrets are cut out of text that leaves the process, and nothing else is."""

from __future__ import annotations

import json
import logging

import pytest

from evsys_sdk import redaction
from evsys_sdk.atomic import to_json, write_json
from evsys_sdk.errors import shorten
from evsys_sdk.jsonl import encode_row
from evsys_sdk.logs import line_format
from evsys_sdk.record.journal import ROLLOUT, Journal
from evsys_sdk.redaction import REDACTED, learn_from_settings, learn_from_words, redact, redact_data, redact_values


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
    ):
        assert redact_values(f"it said {text}!").replace("'", "").replace('"', "") == f"it said {REDACTED}!"


@pytest.mark.parametrize(
    ("name", "value"),
    [("SSH_AUTH_SOCK", "/tmp/ssh-7/agent.1"), ("TOKENIZERS_PARALLELISM", "disabled1"), ("SOME_KEY", "1234567890"),
     ("PUBLIC_KEY", "ordinary"), ("HF_TOKEN", "short1")],
)  # fmt: skip
def test_variables_that_hold_no_secret_are_not_taken_for_one(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert redact_values(f"see {value} here") == f"see {value} here"


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
