"""The tinker backend: any server that speaks the Tinker protocol, through the real `tinker` client.

In: a model's name and a server's address. Out: a service that answers the training surface with that server's work. The
address and the key are handed to the client; the process's environment is not touched, so two arms can use two servers.
"""

from __future__ import annotations

import contextvars
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from evsys_engine.losses import LOSSES
from evsys_sdk.backends.chat_tokenizer import ChatTokenizer
from evsys_sdk.backends.tinker_clients import TinkerSamplingClient, TinkerTrainingClient
from evsys_sdk.backends.tinker_watch import Watch, as_our_error, is_transient, pause_seconds
from evsys_sdk.concurrency import POLL_SECONDS, check_stop, is_stop_requested, pause_before_retry
from evsys_sdk.config.base import Params, tunable
from evsys_sdk.errors import BackendError, BackendUnavailable, EvsysAuthError, EvsysError, need, not_known
from evsys_sdk.redaction import add_secrets
from evsys_sdk.registry import register_backend
from evsys_sdk.training_api import Capabilities

LOOPBACK_KEY = "tml-local"
"""What a server on this machine gets: the client insists on some key of that form."""
HOSTED_TINKER = "https://tinker.thinkingmachines.dev/services/tinker-prod"
FEATURES = ("custom_loss", "prompt_logprobs", "topk_prompt_logprobs", "resume", "full_fine_tuning")
if TYPE_CHECKING:
    Lack = str
else:  # every server has cross_entropy; the engine has the one list of losses, so a new one needs no line here
    Lack = Literal[(*(name for name in LOSSES if name != "cross_entropy"), *FEATURES)]
GOODBYE_SECONDS = 10.0
"""How long the end of a session may take; a server that does not hear of it ends it by itself."""


@register_backend("tinker")
class TinkerBackend:
    """Training on a Tinker-protocol server: hosted Tinker, or `evsys engine serve` (extra `tinker`)."""

    requires: ClassVar = {"tinker": "tinker"}

    class Config(Params):
        # The name identifies the model. If the address counted, a second try on a server that was started again, on
        # another port, would pass for the first look at a question.
        not_scored = frozenset(["base_url", "api_key_env", "timeout_seconds", "connect_attempts", "lacks"])

        base_url: str | None = None
        """The server; by default the client's own (hosted Tinker)."""
        api_key_env: str = "TINKER_API_KEY"
        """Name of the environment variable that holds the key. A server on this machine needs none."""
        timeout_seconds: float = Field(default=300.0, gt=0, le=300)
        """How long a server may fail (no connection, 429, 5xx) before the run gives up; slow answers are no failure.
        The client itself stops sending after 300."""
        connect_attempts: int | None = Field(default=None, ge=1)
        """Tries to reach the server at the start; by default as many as fit into `timeout_seconds`."""
        train_unembed: bool = Field(default=False, json_schema_extra=tunable())
        """Adapt the output layer too. The local backend does not, and the same config should learn the same."""
        lacks: list[Lack] = Field(default_factory=list)
        """What this server cannot do, as `evsys backend check` finds; recipes that need it are refused at once."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)

    def offers(self) -> Capabilities:
        """What can be known without asking the server."""
        return capabilities_of(None, self.cfg.lacks)

    def access_problem(self, environ: Mapping[str, str]) -> str | None:
        """Why the server cannot be asked with these settings, as far as that is known without asking: no key, or no
        address."""
        try:
            if self.cfg.base_url is not None:
                _check_address(self.cfg.base_url)
            api_key(self.cfg.base_url, self.cfg.api_key_env, environ)
        except EvsysError as exc:
            return str(exc)
        return None

    def prepare(self, *, model: Any, run_dir: Path) -> dict[str, object]:
        tinker = need("tinker", extra="tinker")
        url = self.cfg.base_url or default_address(os.environ)
        _check_address(url)
        key = api_key(self.cfg.base_url, self.cfg.api_key_env, os.environ)
        seconds, attempts = self.cfg.timeout_seconds, self.cfg.connect_attempts
        watch = Watch(url, self.cfg.timeout_seconds)

        def connect() -> Any:
            client = tinker.ServiceClient(base_url=url, api_key=key)
            try:
                supported = client.get_server_capabilities().supported_models
                known = {str(found.model_name): getattr(found, "max_context_length", None) for found in supported}
                if known and model.name not in known:
                    raise BackendError(not_known(model.name, "model of this server", known))
                watch.attach(client.holder)
                return client, client.create_sampling_client(base_model=model.name), known.get(model.name)
            except BaseException:
                release(client)
                raise

        try:
            # `ask_features` keeps to the limit itself, but for its last request: 10 s to connect, 10 s to be answered.
            features = within(seconds + 20, lambda: ask_features(url, key, seconds, attempts=attempts))
            client, base, length = within(seconds, connect, too_late=lambda made: release(made[0]))
            try:
                tokenizer = ChatTokenizer(base.get_tokenizer())
            except BaseException:
                release(client)
                raise
        except EvsysError:
            raise
        except TimeoutError as exc:
            raise BackendUnavailable(f"{url} did not let us in within {seconds:g} s") from exc
        except Exception as exc:
            raise as_our_error(exc, "connecting", url, names_a_path=True) from exc
        card = capabilities_of(features, self.cfg.lacks)
        service = TinkerService(client, model.name, watch, card, tokenizer, self.cfg.train_unembed)
        service.context_length = length
        return {"service": service}

    def teardown(self, handles: dict[str, Any]) -> None:
        handles["service"].close()


def default_address(environ: Mapping[str, str]) -> str:
    """Where the client goes when it is given no address."""
    try:
        from tinker.lib.base_url import DEFAULT_BASE_URL
    except ModuleNotFoundError:  # tinker 0.25, which SkyRL needs, has the same address in the body of its client
        DEFAULT_BASE_URL = HOSTED_TINKER
    # Empty counts as unset in both, and the newer one drops the last slash.
    return (environ.get("TINKER_BASE_URL") or str(DEFAULT_BASE_URL)).rstrip("/")


def _check_address(url: str) -> None:
    try:
        is_address = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        is_address = False
    if not is_address:
        raise BackendError(f"base_url {url!r} is no address; it looks like http://127.0.0.1:8000")


def api_key(base_url: str | None, variable: str, environ: Mapping[str, str]) -> str:
    """The key to use: the variable's, or a dummy for a server on this machine."""
    key = environ.get(variable)
    if key:
        add_secrets([key])
        return key
    if base_url and urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1"):
        return LOOPBACK_KEY
    raise EvsysAuthError(f"the tinker backend needs a key: set {variable}, or name a server of your own with base_url")


def ask_features(
    url: str,
    key: str,
    timeout_seconds: float,
    *,
    attempts: int | None = None,
    sleep: Callable[[float], None] = pause_before_retry,
) -> dict[str, object] | None:
    """What the server says of itself; None if it says nothing, as all but ours do. `BackendUnavailable` when no
    answer comes in time: asked before the client is, which would try for minutes whatever is wrong with the address."""
    import requests

    began, tries = time.monotonic(), 0
    while True:
        try:
            answer = requests.get(
                f"{url.rstrip('/')}/api/v1/get_server_capabilities",
                headers={"X-API-Key": key},
                timeout=max(1.0, min(10.0, timeout_seconds)),
                # requests would send this header on to wherever the server points.
                allow_redirects=False,
            )
            if not is_transient(answer.status_code):
                with suppress(ValueError):
                    reply = answer.json()
                    if isinstance(reply, dict) and isinstance(reply.get("features"), dict):
                        return reply["features"]
                return None
            why, after = f"status {answer.status_code}", answer.headers.get("retry-after")
        except requests.RequestException as exc:
            inner = getattr(exc.args[0], "reason", exc) if exc.args else exc
            why, after = str(inner).rpartition(": ")[2] or type(exc).__name__, None
        tries += 1
        pause = pause_seconds(tries, after)
        if tries == attempts or time.monotonic() - began + pause >= timeout_seconds:
            times = "once" if tries == 1 else f"{tries} times"
            within_seconds = "" if tries == attempts else f" in {timeout_seconds:g} s"
            raise BackendUnavailable(
                f"{url} does not answer ({why}; asked {times}{within_seconds}); start the server "
                "(evsys engine serve --model ...), or look at base_url"
            )
        sleep(pause)


def capabilities_of(features: dict[str, Any] | None, lacks: Iterable[str]) -> Capabilities:
    """The card: what the server says it can do, or else what the protocol promises; without what the config lacks."""
    promised: dict[str, Any] = {"losses": tuple(LOSSES), **dict.fromkeys(FEATURES, True), "full_fine_tuning": False}
    offered, lacking = promised if features is None else features, set(lacks)
    if importlib.util.find_spec("torch") is None:
        lacking.add("custom_loss")  # it is computed on this side
    return Capabilities(
        losses=frozenset(offered.get("losses", ())) - lacking,
        **{name: bool(offered.get(name)) and name not in lacking for name in FEATURES},
    )


def release(client: object) -> None:
    """Stop a client's heartbeats and connections, without a word to the server, which may be gone."""
    for name in ("_session_holder", "_rest_holder"):  # `client.holder` would open a session where there is none
        holder = getattr(client, name, None)
        if holder is not None:
            holder.close()


def within[T](seconds: float, act: Callable[[], T], *, too_late: Callable[[T], object] = lambda result: None) -> T:
    """The result of `act`, which has no time limit itself; TimeoutError when it takes longer, Cancelled after a request
    to stop. A result that comes after either is given to `too_late`."""
    outcome: Future[T] = Future()
    context, until = contextvars.copy_context(), time.monotonic() + seconds

    def work() -> None:
        try:
            result = context.run(act)
        except BaseException as exc:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(exc)
        else:
            if outcome.set_running_or_notify_cancel():
                outcome.set_result(result)
            else:
                too_late(result)

    threading.Thread(target=work, name="evsys-tinker-connect", daemon=True).start()
    while not outcome.done():
        left = until - time.monotonic()
        # The future is never `running` before its work is done, so `cancel` fails only when the result has just come:
        # of the two threads exactly one has it.
        if (left <= 0 or is_stop_requested()) and outcome.cancel():
            check_stop()
            raise TimeoutError
        wait([outcome], timeout=min(max(left, 0.0), POLL_SECONDS))
    return outcome.result()


class TinkerService:
    """Clients of one server for one base model."""

    def __init__(
        self,
        client: Any,
        model_name: str,
        watch: Watch,
        capabilities: Capabilities,
        tokenizer: ChatTokenizer,
        train_unembed: bool,
    ):
        self.client, self.model_name, self.watch = client, model_name, watch
        self.capabilities, self._tokenizer, self.train_unembed = capabilities, tokenizer, train_unembed
        self.context_length: int | None = None
        """Tokens that prompt and completion may have together, as far as the server says."""
        self._holder = client.holder

    async def create_training_client(self, *, rank: int, seed: int) -> TinkerTrainingClient:
        if rank == 0 and not self.capabilities.full_fine_tuning:
            raise BackendError(
                "this server trains LoRA adapters only: set lora_rank to 1 or more, or train all weights on backend "
                "local or on `evsys engine serve`"
            )
        made = self.client.create_lora_training_client_async(
            self.model_name, rank=rank, seed=seed, train_unembed=self.train_unembed
        )
        return TinkerTrainingClient(self, await self.watch.answer(made, "creating a training client"))

    async def create_sampling_client(self, path: str | None = None) -> TinkerSamplingClient:
        weights = {"base_model": self.model_name} if path is None else {"model_path": path}
        made = self.client.create_sampling_client_async(**weights)
        what = f"sampling from {path or self.model_name}"
        return TinkerSamplingClient(self.watch, await self.watch.answer(made, what, names_a_path=path is not None))

    def leave_retries_to_caller(self) -> None:
        """A sampler's call that fails is not made again by the client."""
        self.watch.retries = False

    def get_tokenizer(self) -> ChatTokenizer:
        return self._tokenizer

    def close(self) -> None:
        """End the session; a server that fails is not waited for."""
        if self.watch.is_well and hasattr(self.client, "close"):  # older clients have none
            with suppress(Exception):  # the session ends by itself when it is silent
                self.client.close("success").result(GOODBYE_SECONDS)
        self._holder.close()
        release(self.client)
