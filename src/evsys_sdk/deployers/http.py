"""HTTP to a target: one call, its errors in words, and the probe that every OpenAI-compatible server can answer.

In: an address and a key's variable. Out: JSON, or an `EvsysError` that names the address, what it said and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.protocols import Fingerprint
from evsys_sdk.redaction import add_secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetClient:
    """A server that weights are deployed to."""

    url: str
    timeout_seconds: float
    key: str | None = None

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The answer as JSON; a text that is none (vLLM answers some calls so) under `text`."""
        import requests

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        place = self.url.rstrip("/") + path
        try:
            response = requests.request(method, place, json=body, headers=headers, timeout=self.timeout_seconds)
        except requests.RequestException as exc:
            raise EvsysError(
                f"{method} {place}: no answer ({type(exc).__name__}). Is the server running, and is the url right?"
            ) from exc
        if response.status_code >= 400:
            raise TargetRefused(f"{method} {place}: {response.status_code}: {_message(response)}", response.status_code)
        try:
            found = response.json()
        except ValueError:
            return {"text": response.text}
        return found if isinstance(found, dict) else {"data": found}


class TargetRefused(EvsysError):
    """The server answered, and refused."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _message(response: Any) -> str:
    """What a server says of a refusal: OpenAI's form, vLLM's and FastAPI's, or the text."""
    try:
        body = response.json()
    except ValueError:
        return shorten(response.text or "no reason given", 300)
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return shorten(str(said or body), 300)


def key_from(variable: str | None, setting: str, *, needed: bool = False) -> str | None:
    """The key in an environment variable, known as a secret from now on."""
    found = os.environ.get(variable) if variable else None
    if variable and needed and not found:
        raise EvsysError(f"deploy.params.{setting}: the environment variable {variable} is not set")
    add_secrets([found])
    return found or None


def echo_logprobs(
    client: TargetClient, model: str, fingerprint: Fingerprint, **more: object
) -> tuple[list[list[float]], set[str]]:
    """Log probabilities of the prompts by `/v1/completions` with `echo`, and the `system_fingerprint`s of the answers.
    The prompts go as token ids, so that no tokenizer stands between the two sides."""
    answers, prints = [], set()
    for case in fingerprint.cases:
        body = {"model": model, "prompt": list(case.tokens), "max_tokens": 1, "temperature": 0, "echo": True,
                "logprobs": 1, **more}  # fmt: skip
        answer = client.call("POST", "/v1/completions", body)
        try:
            # The first token has no log probability; behind the prompt stands the one that had to be generated.
            values = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(case.tokens)]
            answers.append([float(value) for value in values])
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise EvsysError(f"{client.url} gave no log probabilities of a prompt: {type(exc).__name__}") from exc
        prints.add(str(answer.get("system_fingerprint")))
    return answers, prints
