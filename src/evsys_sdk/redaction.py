"""Keys and passwords stay in the process.

In: text on its way out: to a record, a log, the terminal, the wire. Out: the text with `[redacted]` where a secret
stood. A secret is known by value (environment variables whose names say so, variables that a config names in an `*_env`
key, settings whose names say so, given in the YAML or by `--set`) or by shape (`sk-...`, `Bearer ...`, `user:password@`
in a URL). By value is a substring search, cheap enough for every line; by shape is for texts of ours and error
messages, not for what a model wrote or a dataset holds, which must come back from the record as it was.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
SHORTEST = 8
"""Shorter values are words that stand in other texts too."""

_SECRET_VARIABLE = re.compile(
    r"(?i)(^|_)(api_?key|key|token|secret|password|passwd|passphrase|credentials?|pat|auth)(_|$)"
)
"""Names of environment variables; their values must look like a secret besides."""
_SECRET_SETTING = re.compile(
    r"(?i)(^|_)(api_?key|(api|auth|access|bearer|hf|refresh|session)_?token|(secret|access|private)_?key|client_?secret|"
    r"secret|password|passwd|passphrase|credentials?)$|^token$"
)
"""Names of settings: not `cluster_key`, `eos_token`, `max_tokens`."""
_PASSWORD_NAME = re.compile(r"(?i)pass(word|wd|phrase)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# In JSON a newline before the key is `\n`: its letter is no part of the word.
_START = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrtbf]))"
_SHAPES = re.compile(
    _START + r"(?:"
    r"sk-(?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{16,}"
    r"|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}"
    r"|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}|xai-[A-Za-z0-9]{16,}|gsk_[A-Za-z0-9]{16,}|tml-[A-Za-z0-9_-]{16,}"
    r"|e2b_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{16,}|nvapi-[A-Za-z0-9_-]{16,}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,}|ya29\.[0-9A-Za-z_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r")"
)
_VALUE = r"(?=[A-Za-z0-9._~+/=-]*\d)(?=[A-Za-z0-9._~+/=-]*[A-Za-z])[A-Za-z0-9._~+/=-]{8,}"
_AFTER = re.compile(
    r"(?i)(" + _START + r"bearer\s+"
    r"|" + _START + r"(?:x-)?api[-_]?key(?:\\?[\"']\s*:\s*\\?[\"']|\s*[:=]\s*(?:\\?[\"'])?)"
    r"|" + _START + r"(?:password|passwd|client_secret|access_token|auth_token)=)" + _VALUE
)  # fmt: skip
"""A header or an assignment; the value has a letter and a digit, so that no word and no number is taken for one."""
_HEADER = re.compile(
    r"(?i)(authorization(?:\\?[\"'])?\s*[:=]\s*(?:\\?[\"'])?(?:basic|token|digest)\s+)[A-Za-z0-9._~+/=-]{8,}"
)
_USER_IN_URL = re.compile(r"(://)[^\s/@\"'\\<>?#]+@(?=[^\s\"'])")
_SHAPE_MARKS = (
    "sk-", "sk_", "rk_", "pk_", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "xai-",
    "gsk_", "tml-", "e2b_", "r8_", "nvapi-", "AKIA", "ASIA", "AIza", "ya29", "eyJ",
)  # fmt: skip
"""One of these is in every text that `_SHAPES` finds something in; looking for them is much faster."""


class _Known:
    """The secrets of this process by value, and the forms in which a text may hold them."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.forms: tuple[str, ...] = ()
        self.lock = threading.Lock()
        self.environ: tuple[tuple[str, str], ...] | None = None

    def add(self, values: Iterable[str]) -> None:
        new = {value for value in values if _is_fit(value)} - self.values
        if not new:
            return
        with self.lock:
            self.values |= new
            forms = {form for value in self.values for form in _forms(value)}
            self.forms = tuple(sorted(forms, key=len, reverse=True))  # a longer one may hold a shorter one

    def refresh(self) -> None:
        """Take note of the environment as it is now."""
        found = tuple((name, value) for name, value in os.environ.items() if _SECRET_VARIABLE.search(name))
        if found != self.environ:
            self.environ = found
            self.add(value for name, value in found if _looks_secret(name, value))


_known = _Known()


def redact(text: str) -> str:
    """`text` without secrets, known by value or by shape."""
    text = redact_values(text)
    if "://" in text and "@" in text:
        text = _USER_IN_URL.sub(rf"\1{REDACTED}@", text)
    if any(mark in text for mark in _SHAPE_MARKS):
        text = _SHAPES.sub(REDACTED, text)
    lowered = text.lower()
    if any(word in lowered for word in ("bearer", "authorization", "api", "passw", "secret=", "token=")):
        text = _AFTER.sub(rf"\g<1>{REDACTED}", text)
        text = _HEADER.sub(rf"\g<1>{REDACTED}", text)
    return text


def redact_values(text: str) -> str:
    """`text` without the secrets that are known by value."""
    if _known.environ is None:
        _known.refresh()
    for form in _known.forms:
        if form in text:
            text = text.replace(form, REDACTED)
    return text


def redact_data(value: Any) -> Any:
    """Plain data in which every text is redacted; a setting whose name says that it is a secret loses its value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            key: REDACTED if isinstance(item, str) and is_secret_name(str(key)) and item else redact_data(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_data(item) for item in value]
    return value


def redact_rollout(data: dict[str, Any]) -> dict[str, Any]:
    """A rollout as plain data whose error and metadata, which servers and verifiers wrote, are redacted; what the model
    wrote and its token ids stay as they are."""
    error, metadata = data.get("error"), data.get("metadata")
    return data | {"error": redact(error) if isinstance(error, str) else error, "metadata": redact_data(metadata)}


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: `api_key`, `password`; not `api_key_env`, `cluster_key`."""
    return bool(_SECRET_SETTING.search(name.rpartition(".")[2]))


def add_secrets(values: Iterable[str]) -> None:
    """From now on these values do not leave the process."""
    _known.add(values)


def learn_from_settings(settings: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Note the secrets of a config: settings whose names say so, and the variables that `*_env` keys name.

    A key that was given where the name of its variable belongs (`api_key_env: sk-...`) is a secret as well."""
    _known.refresh()
    _known.add(_in_settings(settings, environ))


def learn_from_words(words: Iterable[str]) -> None:
    """Note the secrets in `--set a.b.api_key=VALUE` and the like, before anything of the command line is written."""
    _known.refresh()
    for word in words:
        key, _, value = (word.partition("=")[2] if word.startswith("--") else word).partition("=")
        if not value and word.startswith("--"):  # --api-key=VALUE
            key, _, value = word.removeprefix("--").replace("-", "_").partition("=")
        if value:
            _known.add(_in_settings({key: value.strip("\"'")}, os.environ))


def _in_settings(settings: Any, environ: Mapping[str, str]) -> Iterable[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            name = str(key).rpartition(".")[2]
            if isinstance(value, str) and name.lower().endswith("_env"):
                if value in environ:
                    yield environ[value]
                elif not _VARIABLE.fullmatch(value) or (value != value.upper() and len(value) >= 16):
                    yield value
            elif isinstance(value, str) and is_secret_name(name):
                yield value
            else:
                yield from _in_settings(value, environ)
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from _in_settings(item, environ)
    elif isinstance(settings, str) and "://" in settings and "@" in settings:
        for found in re.finditer(r"://([^\s/@]+)@", settings):
            yield from (part for part in (found[1], found[1].partition(":")[2]) if part)


def _is_fit(value: str) -> bool:
    # A number is never taken for a secret: it would be cut out of scores, token ids and logprobs.
    return len(value) >= SHORTEST and not re.fullmatch(r"[\d.+e-]+", value) and value != REDACTED


def _looks_secret(name: str, value: str) -> bool:
    """Whether the variable's value is a secret and not a path, a switch or a word."""
    if value.startswith(("/", "./", "~")) or os.path.exists(value):
        return False
    if _PASSWORD_NAME.search(name):
        return True
    is_mixed = any(map(str.isdigit, value)) or (value != value.lower() and value != value.upper())
    return is_mixed or len(value) >= 20


def _forms(value: str) -> set[str]:
    """The value as it is, and as JSON, a URL and Python's repr write it."""
    written = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    return {*written, quote(value, safe=""), quote_plus(value)}
