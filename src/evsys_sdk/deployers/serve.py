"""Our own endpoint, `evsys serve --admin-key-env VAR`, takes new weights while it answers."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.deployers.comparison import ROUNDED, allowed, compare_logprobs
from evsys_sdk.deployers.http import TargetClient, echo_logprobs, key_from
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import now
from evsys_sdk.protocols import Deployment, ModelArtifact, ProbeResult
from evsys_sdk.registry import register_deployer


@register_deployer("serve")
class ServeDeployer:
    """A running `evsys serve`: the weights are loaded beside those that answer, and the alias moves in one step."""

    class Config(Params):
        url: Name
        """Of the server, such as http://127.0.0.1:8000."""
        alias: Name = "policy"
        """What callers send as `model`."""
        admin_key_env: Name = "EVSYS_ADMIN_KEY"
        """Environment variable with the key of the server's admin routes."""
        api_key_env: Name | None = None
        """Environment variable with the key that callers send, where the server wants one."""
        keep_replaced: bool = False
        """Leave the weights that were replaced loaded."""
        tolerance: float | None = Field(default=None, gt=0)
        """The largest difference between log probabilities; by default 0.05, because a server may compute in
        bfloat16."""
        timeout_seconds: float = Field(default=300.0, gt=0)
        """Of each call: loading weights takes a while, and unloading waits for requests under way."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self.keeps_replaced = self.cfg.keep_replaced

    def _client(self, *, admin: bool) -> TargetClient:
        if admin:
            key = key_from(self.cfg.admin_key_env, "admin_key_env", needed=True)
        else:
            key = key_from(self.cfg.api_key_env, "api_key_env", needed=True)
        return TargetClient(url=self.cfg.url, timeout_seconds=self.cfg.timeout_seconds, key=key)

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        body = {
            "name": artifact.name,
            "path": artifact.checkpoint,
            "base_model": artifact.base_model,
            "digest": artifact.digest,
        }
        self._client(admin=True).call("POST", "/admin/models", body)
        return self._deployment(artifact.name, artifact.digest)

    def _deployment(self, name: str, digest: str) -> Deployment:
        endpoint = f"{self.cfg.url.rstrip('/')}/v1"
        return Deployment(
            kind="serve", name=name, digest=digest, endpoint=endpoint, alias=self.cfg.alias, time=now()
        )  # fmt: skip

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        answers, prints = echo_logprobs(self._client(admin=False), deployment.name, artifact.fingerprint)
        # Our server gives the digest of the weights that answered as `system_fingerprint`.
        if prints != {artifact.digest}:
            raise EvsysError(f"{deployment.name} was asked and weights with the digest {', '.join(prints)} answered")
        tolerance = allowed(self.cfg.tolerance, ROUNDED, artifact.fingerprint)
        return compare_logprobs(artifact.fingerprint, answers, tolerance=tolerance, how="the server's answers")

    def route(self, deployment: Deployment) -> None:
        body = {"alias": self.cfg.alias, "name": deployment.name}
        self._client(admin=True).call("POST", "/admin/aliases", body)

    def retire(self, name: str) -> None:
        self._client(admin=True).call("DELETE", f"/admin/models/{quote(name, safe='')}")

    def current(self) -> Deployment | None:
        state = self._client(admin=True).call("GET", "/admin/models")
        name = state.get("aliases", {}).get(self.cfg.alias)
        found = next((one for one in state.get("models", []) if one["name"] == name), None)
        return self._deployment(str(name), str(found["digest"])) if found else None
