"""Keys and passwords stay in the process.

In: text on its way out: to a record, a log, the terminal, the wire. Out: the text with `[redacted]` where a secret
stood. A secret is known by value (variables of the environment and of `.env` whose names say so, variables that a
config names, settings whose names say so, headers, passwords and keys in URLs, given in the YAML or by an option) or
by shape (`sk-...`, `Bearer ...`, `user:password@` or `?sig=...` in a URL). A value is found as it is, as JSON, URLs,
HTML and Python write it, in base64 and hex, and broken over lines. By value is a substring search, cheap enough for
every line; by shape is for texts of ours and error messages, not for what a model wrote or a dataset holds, which must
come back from the record as it was.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import html
import json
import os
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

REDACTED = "[redacted]"
SHORTEST = 8
"""Shorter values are words that stand in other texts too."""
SHORTEST_NAMED = 6
"""For a value that a config names as a secret, if it has a digit beside letters or signs: `hunter2`."""
SHORTEST_ONE_CASE = 12
"""Of values that are looked for in upper and lower case too: a shorter one may then be a word, or a variable's name."""
SHORTEST_NUMBER = 12
"""Digits of a number that counts as a secret because of its variable's name alone; a config can name shorter ones."""

_SECRET_VARIABLE = re.compile(
    r"(?i)(^|_)(api_?key|key|token|secret|password|passwd|passphrase|credentials?|pat|auth)(_|$)"
)
"""Names of environment variables; their values must look like a secret besides."""
_SECRET_SETTING = re.compile(
    r"(?i)(^|_)(api_?keys?|(api|auth|access|bearer|hf|refresh|session|id)_?tokens?|(secret|access|private|signing)_?keys?|"
    r"client_?secret|secrets?|passwords?|passwd|pwd|passphrase|credentials?(_?json)?|authorization|cookies?|bearer|"
    r"basic_?auth|connection_?string|service_?account(_?(json|key|info))?|license_?key|"
    r"(openai|anthropic|claude|gemini|google|azure|aws|huggingface|wandb|mistral|cohere|tinker|e2b|fireworks|together|"
    r"groq|xai|deepseek|openrouter|github|slack)_?(key|token))$|^(token|pass|auth)$"
)
"""Names of settings: not `cluster_key`, `eos_token`, `max_tokens`."""
_USER = re.compile(r"[\w.@+-]{1,64}")
"""Before the `:` of `user:password`."""
_UPPER_CASE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""A setting of such a name is a variable, as in `env: {MY_KEY: ...}`."""
_PART_OF_CONNECTION = re.compile(r"(?i)(?:^|;)\s*[a-z ]*(?:key|password|pwd|secret|token|signature)\s*=\s*([^;\s]+)")
"""`Server=h;AccountKey=...`, as databases and clouds have it."""
_HEADER_LINE = re.compile(r"(?m)^\s*([A-Za-z0-9-]+)\s*[:=]\s*(.+?)\s*$")
LONGEST_JSON = 65_536
"""Letters of a setting that is read as JSON, such as the key file of a service account."""
LONGEST_DOTENV = 65_536
"""Bytes; a longer `.env` holds no settings."""
_HEADERS_SETTING = re.compile(r"(?i)(^|_)headers?$")
_PLAIN_HEADER = re.compile(
    r"(?i)accept(-.*)?|content-.*|user-agent|cache-control|connection|host|origin|referer|date|traceparent"
    r"|.*(version|beta|title|timeout|retries|encoding|language)"
)
"""Headers that never hold a secret; the value of any other may be one."""
_PASSWORD_NAME = re.compile(r"(?i)pass(word|wd|phrase)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_WORDS = (
    "key", "keys", "token", "tokens", "secret", "access", "auth", "pass", "password", "passwd", "passphrase", "pwd",
    "pat", "credential", "credentials", "api", "login", "bearer", "jwt",
)  # fmt: skip
"""Ends of words, one of which the name of a variable with a secret has: `OPENAI_API_KEY`, `mysvc_access`."""
_VARIABLE_WORD = re.compile(r"[A-Z]{0,15}[0-9]{0,2}|[A-Z0-9]{1,4}")
_IN_SHELL = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")

# In JSON a newline before the key is `\n`: its letter is no part of the word.
_START = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrtbf]))"
_SHAPES = re.compile(
    _START + r"(?:"
    r"sk-(?=[A-Za-z0-9_-]{0,256}\d)[A-Za-z0-9_-]{16,}"
    r"|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}"
    r"|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}|xai-[A-Za-z0-9]{16,}|gsk_[A-Za-z0-9]{16,}|tml-[A-Za-z0-9_-]{16,}"
    r"|e2b_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{16,}|nvapi-[A-Za-z0-9_-]{16,}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,}|ya29\.[0-9A-Za-z_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,4096}+\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|hooks\.slack\.com/services/[A-Za-z0-9/]{20,}"
    r")"
)
# No look ahead without an end: in `api_key=api_key=...` one from every place would read the whole rest.
_VALUE = r"(?=[A-Za-z0-9._~+/=-]{0,256}\d)(?=[A-Za-z0-9._~+/=-]{0,256}[A-Za-z])[A-Za-z0-9._~+/=-]{8,}"
_AFTER = re.compile(
    r"(?i)(" + _START + r"bearer\s+"
    r"|" + _START + r"(?:x-)?(?:api|auth|access)[-_]?(?:key|token)(?:\\*[\"']\s*:\s*\\*[\"']|\s*[:=]\s*(?:\\*[\"'])?)"
    r"|" + _START + r"(?:password|passwd|client_secret|secret)=)" + _VALUE
)  # fmt: skip
"""A header or an assignment; the value has a letter and a digit, so that no word and no number is taken for one."""
_QUERY = re.compile(r"((?:[?&#](?:amp;)?|\\u0026)([A-Za-z0-9_.~%-]{1,64})=)([^\s&#\"'\\<>]+)")
"""One parameter in the query of a URL: up to its value, its name, its value."""
_SECRET_PARAMETER = re.compile(
    r"(?:^|_)(?:sig|signature|secret|password|passwd|pwd|passphrase|credentials?|token|jwt|bearer|authorization)$"
    r"|(?:api|subscription|access|secret|private|account|functions?|auth|client|master|host)_?key$"
    r"|(?:access|auth|id|refresh|session|security|bearer|sas)_?token$"
)
"""Names of parameters whose value is a secret whatever it looks like."""
_MAYBE_SECRET_PARAMETER = re.compile(r"(?:^|_)(?:key|code|access|auth|pass|session|sas)(?:_|$)|key$|token|secret")
"""Names of parameters whose value is a secret unless it is a word or a number: `?code=...`, `?key=...`."""
_PLACEHOLDER = re.compile(r"\$\{?\w+\}?|\{\w*\}")
_HEADER = re.compile(
    r"(?i)(authorization(?:\\*[\"'])?\s*[:=,]\s*(?:\\*[\"'])?(?:(?:basic|token|digest|apikey)\s+)?)"
    r"(?!bearer\b|\[)[A-Za-z0-9._~+/=-]{8,}"
)
_BASIC = re.compile(r"(?i)(" + _START + r"basic\s+)([A-Za-z0-9+/_-]{8,}={0,2})")
_USER_IN_URL = re.compile(r"(://)[^\s/\"'\\<>?#]+@(?=[^\s\"'])")
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?(?:-----END \1PRIVATE KEY-----|\Z)", re.DOTALL)
_SHAPE_MARKS = (
    "sk-", "sk_", "rk_", "pk_", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "xai-",
    "gsk_", "tml-", "e2b_", "r8_", "nvapi-", "AKIA", "ASIA", "AIza", "ya29", "eyJ", "slack.com",
)  # fmt: skip
"""One of these begins every text that `_SHAPES` finds something in."""
_SHAPE_SIGN = re.compile(
    r"[-_](?:(?<=sk-)|(?<=[srp]k_live_)|(?<=[srp]k_test_)|(?<=hf_)|(?<=gh[pousr]_)|(?<=github_pat_)|(?<=glpat-)"
    r"|(?<=xox[abeprs]-)|(?<=xai-)|(?<=gsk_)|(?<=tml-)|(?<=e2b_)|(?<=r8_)|(?<=nvapi-))"
)
_SHAPE_WORDS = ("AKIA", "ASIA", "AIza", "ya29.", "eyJ", "slack.com")
"""One of these words, or a `_SHAPE_SIGN`, is in every text that `_SHAPES` finds something in. Looking for them is ten
times faster, and `task_id`, which is in every rollout, is none of them."""


class _Known:
    """The secrets of this process by value, and the forms in which a text may hold them."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.forms: tuple[str, ...] = ()
        self.coded: tuple[str, ...] = ()
        """Parts of base64 in which a value stands, wherever it began."""
        self.numbers: tuple[str, ...] = ()
        self.by_first: dict[str, list[str]] = {}
        """First letter -> every form that begins with it."""
        self.longest = 0
        self.lock = threading.Lock()
        self.environ: tuple[tuple[str, str], ...] | None = None

    def add(self, values: Iterable[str]) -> None:
        # Readers take no lock: what they search for is replaced as a whole, and of `values`, which grows, they take a
        # copy.
        new = {value for value in values if value and value not in self.values and REDACTED not in value}
        if not new:
            return
        with self.lock:
            self.values |= new
            numbers = {value for value in self.values if value.isascii() and value.isdigit()}
            texts = self.values - numbers
            self.numbers = tuple(sorted(numbers, key=len, reverse=True))
            # A longer form may hold a shorter one.
            self.forms = tuple(sorted({form for value in texts for form in _forms(value)}, key=len, reverse=True))
            self.coded = tuple(sorted({part for value in self.values for part in _base64_parts(value)}))
            by_first: dict[str, list[str]] = {}
            for form in (*self.forms, *self.coded, *self.numbers):
                by_first.setdefault(form[0], []).append(form)
            self.by_first, self.longest = by_first, max(map(len, (*self.forms, *self.coded, *self.numbers)))

    def refresh(self) -> None:
        """Take note of the environment as it is now, and of `.env`, which may become part of it at any time."""
        variables = (*os.environ.items(), *_dotenv())
        found = tuple((name, value) for name, value in variables if _SECRET_VARIABLE.search(name))
        if found != self.environ:
            self.environ = found
            self.add(value for name, value in found if _looks_secret(name, value))


_DOTENV_LINE = re.compile(
    r"""(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*"""
    r"""(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|(.*?)(?:[ \t]+\#.*|[ \t]*)$)"""
)


def _dotenv() -> Iterator[tuple[str, str]]:
    """The variables of the file `.env` in the working directory: a project's code reads it, or a library of it."""
    file = Path(".env")
    try:
        text = file.read_text(errors="replace") if file.is_file() and file.stat().st_size <= LONGEST_DOTENV else ""
    except OSError:
        return
    for name, *values in _DOTENV_LINE.findall(text):
        yield name, "".join(values)


_known = _Known()


def secrets_known() -> int:
    """How many secrets are known by value; it only grows, so an equal number means that none was learnt since."""
    return len(_known.values)


def has_numeric_secrets() -> bool:
    """Whether a number in a text may be a secret."""
    return bool(_known.numbers)


def redact(text: str) -> str:
    """`text` without secrets, known by value or by shape."""
    # By value first: a shape may end before the value does, and what is left of it would no longer be known.
    text = redact_values(text)
    if "://" in text and "@" in text:
        text = _USER_IN_URL.sub(rf"\1{REDACTED}@", text)
    if _SHAPE_SIGN.search(text) or any(word in text for word in _SHAPE_WORDS):
        text = _SHAPES.sub(REDACTED, text)
    if "PRIVATE KEY-----" in text:
        text = _PRIVATE_KEY.sub(REDACTED, text)
    if "=" in text and ("?" in text or "&" in text or "#" in text or "\\u0026" in text):
        text = _QUERY.sub(lambda one: one[1] + (REDACTED if _is_secret_parameter(one[2], one[3]) else one[3]), text)
    lowered = text.lower()
    # The searches themselves take 0.1 us a character: a word as common as `api`, which is in every path of the
    # dashboard's wire, must not start them.
    is_named = ("key" in lowered or "token" in lowered) and any(name in lowered for name in _ASSIGNED_NAMES)
    if is_named or any(mark in lowered for mark in ("bearer", "password=", "passwd=", "secret=")):
        text = _AFTER.sub(rf"\g<1>{REDACTED}", text)
    if "authorization" in lowered:
        text = _HEADER.sub(rf"\g<1>{REDACTED}", text)
    if "basic" in lowered:
        text = _BASIC.sub(lambda found: f"{found[1]}{REDACTED}" if _says_user(found[2]) else found[0], text)
    return text


_ASSIGNED_NAMES = tuple(
    first + sign + last for first in ("api", "auth", "access") for sign in ("", "-", "_") for last in ("key", "token")
)
"""What `_AFTER` looks for before a `:` or `=`, in lower case."""


def redact_values(text: str) -> str:
    """`text` without the secrets that are known by value."""
    if _known.environ is None:
        _known.refresh()
    for form in _known.forms:
        if form in text:
            text = text.replace(form, REDACTED)
    for part in _known.coded:
        if part in text:
            text = re.sub(rf"[A-Za-z0-9+/_-]*{re.escape(part)}[A-Za-z0-9+/_-]*={{0,2}}", REDACTED, text)
    if _known.numbers and any(number in text for number in _known.numbers):
        text = _without_numbers(text)
    if "\n" in text or "\\n" in text:
        text = _without_broken_values(text)
    return text


_OPEN_SHAPE = re.compile(
    r"(?:(?i:bearer|basic|authorization|(?:x-)?(?:api|auth|access)[-_]?(?:key|token)|password|passwd|secret)[\"'\\]*"
    r"\s*[:=,]?\s*[\"'\\]*(?:(?i:bearer|basic|token|digest|apikey)\s+)?\S*"
    r"|[?&#][A-Za-z0-9_.~%;-]{1,64}=\S*"
    r"|(?:" + "|".join(map(re.escape, _SHAPE_MARKS)) + r")\S*|://\S*|-----BEGIN [^-]*PRIVATE KEY-----.*)\Z",
    re.DOTALL,
)  # fmt: skip
"""The end of a text in which a secret, known by its shape, may have begun."""
_OPEN_LENGTH = 4096
"""How far back `unfinished_from` looks for such an end, in characters: longer than a private key."""


def unfinished_from(text: str) -> int:
    """Where in `text` a secret may begin that only the text to come completes; the length of `text` for nowhere.

    For streams: what is written in pieces must not leave before it can be redacted as a whole."""
    if _known.environ is None:
        _known.refresh()
    shape = _OPEN_SHAPE.search(text, max(0, len(text) - _OPEN_LENGTH))
    cut = shape.start() if shape else len(text)
    for place in range(max(0, len(text) - _known.longest), cut):
        head = text[place : place + 4]  # most places fail here, without a copy of the rest
        if any(form.startswith(head) and form.startswith(text[place:]) for form in _known.by_first.get(head[0], ())):
            cut = place
            break
    # A whole secret across the cut belongs to the part that waits: neither half would be known for one.
    for form in (*_known.forms, *_known.coded, *_known.numbers):
        place = text.find(form, max(0, cut - len(form) + 1), cut + len(form))
        if 0 <= place < cut:
            cut = place
    return cut


_LINE_EDGE = " \t\r|\u2502>#*\\"
"""What stands at the ends of a line that was wrapped: indents, frames, quotes."""


def _without_broken_values(text: str) -> str:
    """`text` without known values that were broken over lines; a line break in JSON is a backslash and an n."""
    # Cheap for all texts: the search with a gap after every letter runs only where the value is known to be there.
    joined = "".join(line.strip(_LINE_EDGE) for line in text.replace("\\r", "").replace("\\n", "\n").split("\n"))
    edge = rf"[{re.escape(_LINE_EDGE)}]{{0,200}}"
    gap = rf"(?:{edge}?(?:\\r)?(?:\n|\\n){edge})?"
    for form in (*_known.values, *_known.coded):
        if form in joined:
            text = re.sub(gap.join(map(re.escape, form)), REDACTED, text)
    return text


def _without_numbers(text: str) -> str:
    """`text` without known secrets that are numbers; a JSON number becomes a JSON text, so that JSON stays JSON."""
    number = re.compile(rf"(?<![\w.])(?:{'|'.join(_known.numbers)})(?![\w]|\.\d)")
    if not _is_json(text):
        return number.sub(REDACTED, text)

    def in_json(part: re.Match[str]) -> str:
        return number.sub(REDACTED if part[0].startswith('"') else f'"{REDACTED}"', part[0])

    return re.sub(r'"(?:[^"\\]|\\.)*"|[^"]+', in_json, text)


def _is_json(text: str) -> bool:
    """Whether it is JSON, or lines of JSON."""
    try:
        json.loads(text)
    except ValueError:
        lines = text.splitlines()
        return len(lines) > 1 and all(_is_json(line) for line in lines if line.strip())
    return True


def redact_data(value: Any) -> Any:
    """Plain data in which every text is redacted; a setting whose name says that it is a secret loses its value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _redact_setting(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_data(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and str(value) in _known.values:
        return REDACTED
    return value


def _redact_setting(name: str, value: object) -> object:
    last = name.rpartition(".")[2]
    if is_secret_name(name) and value:
        return _blank(value)
    if isinstance(value, Mapping) and _HEADERS_SETTING.search(last):
        return {key: redact_data(item) if _PLAIN_HEADER.fullmatch(str(key)) else _blank(item)
                for key, item in value.items()}  # fmt: skip
    in_headers = ".headers." in f".{name.lower()}" or "_headers." in name.lower()
    if in_headers and isinstance(value, str) and not _PLAIN_HEADER.fullmatch(last):
        return _blank(value)
    if isinstance(value, str) and last.lower().endswith("_env") and not is_variable_name(value):
        return REDACTED
    return redact_data(value)


def _blank(value: object) -> object:
    """A secret, or a group of secrets, without its values."""
    if isinstance(value, Mapping):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_blank(item) for item in value]
    return value if value is None or isinstance(value, bool) or value == "" else REDACTED


def redact_rollout(data: dict[str, object]) -> dict[str, object]:
    """A rollout as plain data whose error, metadata and observations, which servers, verifiers and tools wrote, are
    redacted; what the model wrote and its token ids stay as they are."""
    error, metadata, turns = data.get("error"), data.get("metadata"), data.get("turns")
    if isinstance(turns, list) and any(turn.get("observation") for turn in turns):
        data = data | {"turns": [turn | {"observation": redact(turn.get("observation") or "")} for turn in turns]}
    return data | {"error": redact(error) if isinstance(error, str) else error, "metadata": redact_data(metadata)}


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: `api_key`, `password`; not `api_key_env`, `cluster_key`."""
    return bool(_SECRET_SETTING.search(name.rpartition(".")[2].replace("-", "_")))


def is_variable_name(value: str) -> bool:
    """Whether it reads as the name of a variable, `OPENAI_API_KEY`, `mysvc_access`, and not as a key in its place.

    Decided by the text alone, so that a record says the same whatever the environment holds."""
    if not _VARIABLE.fullmatch(value):
        return not value
    if len(value) < 12:
        return True
    # Letters and underscores alone may be a passphrase (`correct_horse_battery_staple`); a name says what it is for.
    if not any(word.endswith(_SECRET_WORDS) for word in value.lower().split("_")):
        return False
    if value != value.upper():
        return value == value.lower() and not any(map(str.isdigit, value)) and ("_" in value or len(value) < 16)
    return "_" in value and all(_VARIABLE_WORD.fullmatch(word) for word in value.split("_"))


def add_secrets(values: Iterable[str | None]) -> None:
    """From now on these values do not leave the process."""
    _known.add(found for value in values if value for found in _secret_values(value))


def learn_from_environment() -> None:
    """Note the secrets that the environment holds now: code of the project may have set variables."""
    _known.refresh()


def learn_from_settings(settings: object, environ: Mapping[str, str] = os.environ) -> None:
    """Note the secrets of a config: settings whose names say so, headers, passwords in URLs, and the variables that it
    names, in an `*_env` key or elsewhere.

    A key that was given where the name of its variable belongs (`api_key_env: sk-...`) is a secret as well."""
    _known.refresh()
    _known.add(_in_settings(settings, environ))


def learn_from_words(words: Iterable[str]) -> None:
    """Note the secrets in `--set a.b.api_key=VALUE`, `--api-key-env NAME` and the like, before anything of the command
    line is written."""
    _known.refresh()
    option = ""
    for word in words:
        if option:
            _known.add(_in_settings({option: word}, os.environ))
        key, _, value = word.removeprefix("--").partition("=")
        option = key.replace("-", "_") if word.startswith("--") and not value else ""
        if word.startswith("--") and value:  # --api-key=VALUE, --set=a.b=VALUE
            _known.add(_in_settings({key.replace("-", "_"): value}, os.environ))
            key, _, value = value.partition("=")
        if value:
            _known.add(_in_settings({key: value.strip("\"'")}, os.environ))
            _known.add(_in_settings(_as_json(value), os.environ))  # --set run.backend.params='{api_key: ...}'


def _as_json(text: str) -> object:
    """What a command line's value says, where it is a mapping or a list."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        import yaml

        return yaml.safe_load(text)
    except Exception:  # it is refused with its place where it is read
        return None


def _in_settings(settings: object, environ: Mapping[str, str]) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            name = str(key).rpartition(".")[2]
            if isinstance(value, str) and name.lower().endswith("_env"):
                if value in environ:
                    yield from _secret_values(environ[value])
                elif not is_variable_name(value):
                    yield from _secret_values(value)
            elif is_secret_name(name):
                yield from _all_below(value)
                yield from _in_settings(value, environ)
            elif isinstance(value, str) and _UPPER_CASE.fullmatch(name) and _SECRET_VARIABLE.search(name):
                if _looks_secret(name, value):
                    yield from _secret_values(value)
            elif _HEADERS_SETTING.search(name):
                secret = {header: item for header, item in _headers(value) if not _PLAIN_HEADER.fullmatch(header)}
                yield from _all_below(secret)
                yield from _in_settings(secret, environ)
            else:
                yield from _in_settings(value, environ)
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from _in_settings(item, environ)
    elif isinstance(settings, str):
        # A variable that the config names in a key of any name; here its value must look like a secret.
        for variable in {settings, *_IN_SHELL.findall(settings)} & environ.keys():
            if _looks_secret(variable, environ[variable]):
                yield from _secret_values(environ[variable])
        yield from _in_url(settings)
        if "=" in settings and "://" not in settings:
            for found in _PART_OF_CONNECTION.findall(settings):
                yield from _secret_values(found)
        if settings.lstrip()[:1] == "{" and len(settings) <= LONGEST_JSON:
            with contextlib.suppress(ValueError, RecursionError):  # text in braces
                yield from _in_settings(json.loads(settings), environ)


def _headers(value: object) -> Iterator[tuple[str, object]]:
    """Headers as a mapping, as pairs, or as lines `Name: value`."""
    if isinstance(value, Mapping):
        yield from ((str(header), item) for header, item in value.items())
    elif isinstance(value, str):
        yield from _HEADER_LINE.findall(value)
    elif isinstance(value, list | tuple):
        for one in value:
            if isinstance(one, list | tuple) and len(one) == 2:
                yield str(one[0]), one[1]
            elif isinstance(one, str | Mapping):
                yield from _headers(one)


def _is_secret_parameter(name: str, value: str) -> bool:
    """Whether this value of a parameter in a URL's query is a secret, by the parameter's name."""
    # One form for `accessToken`, `Access-Token` and `ACCESS_TOKEN`.
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", unquote(name)).lower())
    if _PLACEHOLDER.fullmatch(value):
        return False
    if _SECRET_PARAMETER.search(name):
        return True
    has_digit, has_letter = any(map(str.isdigit, value)), any(map(str.isalpha, value))
    is_plain = len(value) < 16 and (value.islower() or value.isupper()) and not has_digit
    return (
        bool(_MAYBE_SECRET_PARAMETER.search(name)) and not name.endswith("tokens") and not is_plain
        and len(value) >= SHORTEST and (has_letter or len(value) >= SHORTEST_NUMBER)
    )  # fmt: skip


def _is_random(value: str) -> bool:
    """Whether it looks drawn by chance: 16 letters and digits in a row, or 24 in upper and lower case; unlike
    `2024-05-01-preview`, a UUID or the name of a model."""
    pieces = re.findall(r"[A-Za-z0-9]{16,}", value)
    if any(not piece.isdigit() and any(map(str.isdigit, piece)) for piece in pieces):
        return True
    is_mixed = value != value.lower() and value != value.upper() and any(map(str.isdigit, value))
    return len(value) >= 24 and is_mixed


def _in_url(text: str) -> Iterator[str]:
    """`user:password` and the password of a URL, and the keys in its query, as written and decoded."""
    if "://" in text and "=" in text:
        for _, name, value in _QUERY.findall(text):
            for found in {value, unquote(value)}:
                # A word (`?code=standard`) would be cut out of every text; in the URL itself its name tells.
                is_word = found.isalpha() and (found.islower() or found.isupper()) and len(found) < 16
                if (_is_secret_parameter(name, value) and not is_word) or _is_random(found):
                    yield from (one for one in [found] if _is_fit(one, named=True))
    if "://" in text and "@" in text:
        for found in re.finditer(r"://([^\s/?#]+)@", text):
            for user in {found[1], unquote(found[1])}:
                yield from _secret_values(user)
                yield from _secret_values(user.partition(":")[2])


def _all_below(value: object) -> Iterator[str]:
    """Every text and number of a secret setting, which may be a mapping or a list."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _all_below(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _all_below(item)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield from _secret_values(str(value))


def _secret_values(value: str) -> Iterator[str]:
    """The values to look for, of one that is known to be a secret: itself, and what stands behind `Bearer` or in
    `Basic`'s base64."""
    yield from (text for text in (value, value.strip()) if _is_fit(text, named=True))
    scheme, _, rest = value.strip().partition(" ")
    if rest and scheme.isalpha():
        yield from _secret_values(rest)
        said = _from_base64(rest) if scheme.lower() == "basic" else None
        if said and ":" in said:
            yield from (text for text in (said, said.partition(":")[2]) if _is_fit(text, named=True))
    user, _, password = value.strip().partition(":")
    if _USER.fullmatch(user) and _is_fit(password, named=True) and not password.startswith("//"):
        yield password
    yield from _in_url(value)


def _is_fit(value: str, *, named: bool = False) -> bool:
    if value.isascii() and value.isdigit():
        return len(value) >= (SHORTEST if named else SHORTEST_NUMBER)
    # Another number is never taken for a secret: it would be cut out of scores and logprobs.
    if re.fullmatch(r"[\d.+e-]+", value):
        return False
    mixed = any(map(str.isdigit, value)) and not value.isdigit()
    return len(value) >= (SHORTEST_NAMED if named and mixed else SHORTEST)


def _looks_secret(name: str, value: str) -> bool:
    """Whether the variable's value is a secret and not a path, a switch or a word."""
    if not _is_fit(value) or value.startswith(("/", "./", "~")) or os.path.exists(value):
        return False
    if _PASSWORD_NAME.search(name):
        return True
    is_mixed = any(map(str.isdigit, value)) or (value != value.lower() and value != value.upper())
    return is_mixed or len(value) >= 20


def _forms(value: str) -> set[str]:
    """The value as it is, in one case, and as JSON and URLs (also twice), HTML, hex and Python's repr write it."""
    once = json.dumps(value)[1:-1]
    twice = json.dumps(once)[1:-1]
    written = {
        value,
        once,
        json.dumps(value, ensure_ascii=False)[1:-1],
        twice,
        json.dumps(twice)[1:-1],
        repr(value)[1:-1],
    }
    if not value.isascii():
        as_bytes = value.encode(errors="surrogatepass")
        written |= {repr(as_bytes)[2:-1], as_bytes.decode("latin-1")}
        written |= {unicodedata.normalize(form, value) for form in ("NFC", "NFD")}
    in_url = {quote(value, safe=""), quote(value), quote_plus(value)}
    in_url |= {quote(text, safe="") for text in in_url}  # a URL that stands in the query of another
    in_url |= {re.sub("%..", lambda found: found[0].lower(), text) for text in in_url}
    coded = value.encode(errors="surrogatepass").hex()
    in_html = {html.escape(value), html.escape(value, quote=False)}
    # A header or a host that a proxy has written in lower case, a variable that a shell has written in upper case.
    one_case = {value.lower(), value.upper()} if len(value) >= SHORTEST_ONE_CASE else set()
    return {*written, *in_url, *in_html, *one_case, coded, coded.upper()}


def _base64_parts(value: str) -> set[str]:
    """What any base64 of a text with the value in it holds: the letters that depend on the value alone, for each of the
    three places in a group of three bytes where it can begin, in both alphabets."""
    raw, parts = value.encode(errors="surrogatepass"), set()
    for before in range(3):
        # A base64 letter has 6 bits. After 1 byte the second letter, after 2 bytes the third mixes bits of the text
        # before with the value's, so 2 or 3 letters are cut off; so is the last one where the value ends inside a
        # group.
        coded = base64.b64encode(b"\0" * before + raw).decode().rstrip("=")
        end = len(coded) - (1 if (before + len(raw)) % 3 else 0)
        part = coded[(0, 2, 3)[before] : end]
        if len(part) >= SHORTEST:
            parts |= {part, part.replace("+", "-").replace("/", "_"), part.replace("/", "\\/")}
    return parts


def _says_user(coded: str) -> bool:
    """Whether base64 says `user:password`."""
    said = _from_base64(coded)
    return said is not None and ":" in said and said.isprintable()


def _from_base64(coded: str) -> str | None:
    letters = coded.strip().rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(letters + "=" * (-len(letters) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
