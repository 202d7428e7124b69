"""Fireworks: the adapter is uploaded by `firectl` and loaded into a dedicated deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.deployers.alias_file import AliasFile
from evsys_sdk.deployers.commands import run_command
from evsys_sdk.deployers.comparison import ROUNDED, allowed, compare_logprobs
from evsys_sdk.deployers.folder import how_to_load, write_export
from evsys_sdk.deployers.http import TargetClient, echo_logprobs, key_from
from evsys_sdk.deployers.releases import Releases
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import check_base_model, deployment_of
from evsys_sdk.protocols import Deployment, ModelArtifact, ProbeResult
from evsys_sdk.registry import register_deployer

RANKS = range(4, 65)
"""What Fireworks takes."""


@register_deployer("fireworks")
class FireworksDeployer:
    """A dedicated deployment at Fireworks gets the adapter by `firectl`; serverless does not take adapters."""

    class Config(Params):
        account: Name
        """Your account's id."""
        deployment: Name
        """A dedicated deployment of the base model, made with `--enable-addons`."""
        base_model: Name
        """The base model at Fireworks, such as accounts/fireworks/models/qwen3-8b."""
        trained_over: Name
        """The base model's name in the experiment, which says that `base_model` is meant to be the same."""
        path: Name
        """A folder for the files that are uploaded."""
        url: Name = "https://api.fireworks.ai/inference"
        """Of the OpenAI-compatible endpoint, without /v1."""
        api_key_env: Name = "FIREWORKS_API_KEY"
        """Environment variable with the key."""
        alias_file: Name = ".evsys/deployed/fireworks.json"
        """A JSON file that names the model in use, for gateways and clients."""
        command: Name = "firectl"
        """The program."""
        keep_replaced: bool = False
        """Leave the replaced adapter loaded."""
        tolerance: float | None = Field(default=None, gt=0)
        """The largest difference between log probabilities; by default 0.05."""
        timeout_seconds: float = Field(default=1800.0, gt=0)
        """Of each command and call."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self.keeps_replaced = self.cfg.keep_replaced
        self._releases = Releases(Path(self.cfg.path).expanduser().absolute())
        self._alias = AliasFile(Path(self.cfg.alias_file).expanduser().absolute())

    def _run(self, *words: str) -> str:
        key = key_from(self.cfg.api_key_env, "api_key_env", needed=True)
        return run_command(
            [self.cfg.command, *words], seconds=self.cfg.timeout_seconds, environment={"FIREWORKS_API_KEY": key or ""},
            install="see Fireworks' page on firectl",
        )  # fmt: skip

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        check_base_model(artifact, self.cfg.trained_over, "trained_over")
        endpoint = f"{self.cfg.url.rstrip('/')}/v1"
        made = deployment_of(artifact, "fireworks", endpoint=endpoint, alias=str(self._alias.path))
        folder = self._releases.path / artifact.name

        def fill(part: Path) -> None:
            write_export(artifact, part, "peft", "f32")
            # Before the upload, which Fireworks would refuse.
            rank = json.loads((part / "adapter_config.json").read_text())["r"]
            if rank not in RANKS:
                raise EvsysError(f"the adapter has rank {rank}, and Fireworks takes {RANKS[0]} to {RANKS[-1]}")
            (part / "README.md").write_text(artifact.card + "\n" + how_to_load("peft", artifact))

        self._releases.add(made, "peft", fill)
        self._run("model", "create", artifact.name, str(folder), "--base-model", self.cfg.base_model)
        self._run("model", "load-lora", artifact.name, "--deployment", self.cfg.deployment, "--wait")
        return made

    def _model(self, name: str) -> str:
        return f"accounts/{self.cfg.account}/models/{name}"

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        key = key_from(self.cfg.api_key_env, "api_key_env", needed=True)
        client = TargetClient(url=self.cfg.url, timeout_seconds=self.cfg.timeout_seconds, key=key)
        answers, _ = echo_logprobs(client, self._model(deployment.name), artifact.fingerprint)
        tolerance = allowed(self.cfg.tolerance, ROUNDED, artifact.fingerprint)
        return compare_logprobs(artifact.fingerprint, answers, tolerance=tolerance, how="Fireworks' answers")

    def route(self, deployment: Deployment) -> None:
        self._alias.write(deployment, model=self._model(deployment.name))

    def retire(self, name: str) -> None:
        self._run("model", "unload-lora", name, "--deployment", self.cfg.deployment)

    def current(self) -> Deployment | None:
        return self._alias.read()
