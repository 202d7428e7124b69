"""What vLLM and SGLang have in common: adapters that are loaded into a running server from a folder it can see.

In: an artifact. Out: load under a name that is never reused, probe, alias file, drain, unload. Unique names are what
avoids the servers' known mix-ups: a prefix cache that is stale after a reload under the same name, and requests under
way that end on another adapter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.deployers.alias_file import AliasFile
from evsys_sdk.deployers.comparison import ROUNDED, allowed, compare_logprobs
from evsys_sdk.deployers.folder import how_to_load, write_export
from evsys_sdk.deployers.http import TargetClient, TargetRefused, key_from
from evsys_sdk.deployers.releases import Releases
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import deployment_of
from evsys_sdk.protocols import Deployment, Fingerprint, ModelArtifact, ProbeResult


class LoraServerParams(Params):
    url: Name
    """Of the server, such as http://127.0.0.1:8000."""
    path: Name
    """A folder that the server sees under the same path; each adapter gets a folder in it."""
    base_model: Name | None = None
    """The name under which the server has the base model; by default that of the experiment."""
    alias_file: Name
    """A JSON file that names the adapter in use, for gateways and clients: the server has no aliases."""
    api_key_env: Name | None = None
    """Environment variable with the server's key."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long requests that began on the replaced adapter may take before it is unloaded."""
    keep_replaced: bool = False
    """Leave the replaced adapter loaded; it takes one of the server's places (`--max-loras`)."""
    tolerance: float | None = Field(default=None, gt=0)
    """The largest difference between log probabilities; by default 0.05, because servers compute in bfloat16."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """Of each call."""


class LoraServer:
    """The part of a deployer that both servers share; their own are `kind`, routes, what these need, and the probe."""

    kind: ClassVar[str]
    load_route: ClassVar[str]
    unload_route: ClassVar[str]
    start_with: ClassVar[str]
    """What the server needs, or it does not have these routes."""

    cfg: LoraServerParams

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.keeps_replaced = self.cfg.keep_replaced
        self._releases = Releases(Path(self.cfg.path).expanduser().absolute())
        self._alias = AliasFile(Path(self.cfg.alias_file).expanduser().absolute())
        self._sleep = sleep

    @property
    def client(self) -> TargetClient:
        key = key_from(self.cfg.api_key_env, "api_key_env", needed=True)
        return TargetClient(url=self.cfg.url, timeout_seconds=self.cfg.timeout_seconds, key=key)

    def request_fields(self, name: str) -> dict[str, object]:
        """What callers must send besides `model`."""
        return {}

    def prompt_logprobs(self, name: str, fingerprint: Fingerprint) -> list[list[float]]:
        """The log probabilities of the probe's prompts, by the adapter of this name."""
        raise NotImplementedError

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        models = self._models()
        wanted = self.cfg.base_model or artifact.base_model
        bases = [name for name, parent in models.items() if parent is None]
        if wanted not in bases:
            raise EvsysError(
                f"{self.cfg.url} serves the base model {', '.join(bases) or 'none'}, and the adapter was trained over "
                f"{wanted}; where it is the same under another name, set deploy.params.base_model"
            )
        endpoint = f"{self.cfg.url.rstrip('/')}/v1"
        made = deployment_of(artifact, self.kind, endpoint=endpoint, alias=str(self._alias.path))
        folder = self._releases.path / artifact.name

        def fill(part: Path) -> None:
            write_export(artifact, part, "peft", "f32")
            (part / "README.md").write_text(artifact.card + "\n" + how_to_load("peft", artifact))

        self._releases.add(made, "peft", fill)
        if artifact.name not in models:
            self._load(artifact.name, folder)
        return made

    def _load(self, name: str, folder: Path) -> None:
        try:
            answer = self.client.call("POST", self.load_route, {"lora_name": name, "lora_path": str(folder)})
        except TargetRefused as exc:
            hint = f". Adapters need a server that was started with {self.start_with}" if exc.status == 404 else ""
            raise EvsysError(f"{exc}{hint}") from exc
        if answer.get("success") is False:  # SGLang's form
            raise EvsysError(f"{self.cfg.url} did not load {folder}: {answer.get('error_message') or answer}")

    def _models(self) -> dict[str, str | None]:
        """What the server has: name -> its base model, None for a base model itself."""
        found = self.client.call("GET", "/v1/models").get("data") or []
        return {str(one["id"]): one.get("parent") for one in found}

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        answers = self.prompt_logprobs(deployment.name, artifact.fingerprint)
        tolerance = allowed(self.cfg.tolerance, ROUNDED, artifact.fingerprint)
        return compare_logprobs(artifact.fingerprint, answers, tolerance=tolerance, how=f"{self.kind}'s answers")

    def route(self, deployment: Deployment) -> None:
        self._alias.write(deployment, **self.request_fields(deployment.name))

    def retire(self, name: str) -> None:
        used = self._alias.read()
        if used is not None and used.name == name:
            raise EvsysError(f"{name} is in use ({self._alias.path}); deploy another one first")
        if name not in self._models():
            return
        if used is not None:  # after a switch: callers that read the alias before may still be under way
            self._sleep(self.cfg.drain_seconds)
        self.client.call("POST", self.unload_route, {"lora_name": name})

    def current(self) -> Deployment | None:
        """What the alias names, as long as the server has it: one that was started again has no adapters."""
        found = self._alias.read()
        return found if found is not None and found.name in self._models() else None


def as_numbers(values: Any, url: str) -> list[float]:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as exc:
        raise EvsysError(f"{url} gave no log probabilities of a prompt") from exc
