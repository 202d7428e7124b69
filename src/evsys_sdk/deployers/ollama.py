"""Ollama: a Modelfile with the base model and the GGUF adapter becomes a model; the alias is a copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.deployers.alias_file import AliasFile
from evsys_sdk.deployers.commands import run_command
from evsys_sdk.deployers.comparison import compare_completions
from evsys_sdk.deployers.http import TargetClient
from evsys_sdk.deployers.llama_cpp import ADAPTER_FILE, write_adapter
from evsys_sdk.deployers.releases import Releases
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import GREEDY_TOKENS, check_base_model, deployment_of
from evsys_sdk.protocols import Deployment, ModelArtifact, ProbeResult
from evsys_sdk.registry import register_deployer


@register_deployer("ollama")
class OllamaDeployer:
    """A running Ollama gets the model by `ollama create`; its completions are compared, because it gives no log
    probabilities."""

    class Config(Params):
        base: Name
        """The base model's name in Ollama. It must be the very model that was trained over, in full precision."""
        base_model: Name
        """The base model's name in the experiment, which says that `base` is meant to be the same."""
        path: Name
        """A folder for adapters and Modelfiles."""
        url: Name = "http://127.0.0.1:11434"
        """Of the server."""
        alias: Name = "policy"
        """What callers send as `model`."""
        alias_file: Name = ".evsys/deployed/ollama.json"
        """Where it is noted which weights the alias has: Ollama does not know."""
        command: Name = "ollama"
        """The program."""
        keep_replaced: bool = True
        """Leave the model that was replaced; `false` removes it."""
        timeout_seconds: float = Field(default=600.0, gt=0)
        """Of each command and call."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self.keeps_replaced = self.cfg.keep_replaced
        self._releases = Releases(Path(self.cfg.path).expanduser().absolute())
        self._alias = AliasFile(Path(self.cfg.alias_file).expanduser().absolute())
        self._client = TargetClient(url=self.cfg.url, timeout_seconds=self.cfg.timeout_seconds)

    def _run(self, *words: str, folder: Path | None = None) -> str:
        return run_command(
            [self.cfg.command, *words], seconds=self.cfg.timeout_seconds, folder=folder,
            environment={"OLLAMA_HOST": self.cfg.url}, install="see Ollama's own page for your system",
        )  # fmt: skip

    def _models(self) -> dict[str, str | None]:
        """Models that the server has, with their digests; a name without a tag is there as `<name>:latest`."""
        found = self._client.call("GET", "/api/tags").get("models") or []
        return {str(one["name"]).removesuffix(":latest"): one.get("digest") for one in found}

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        check_base_model(artifact, self.cfg.base_model, "base_model")
        if self.cfg.base.removesuffix(":latest") not in self._models():
            raise EvsysError(f"{self.cfg.url} has no model {self.cfg.base!r}; try: ollama pull {self.cfg.base}")
        endpoint = f"{self.cfg.url.rstrip('/')}/v1"
        made = deployment_of(artifact, "ollama", endpoint=endpoint, alias=self.cfg.alias)

        def fill(part: Path) -> None:
            write_adapter(artifact, part / ADAPTER_FILE)
            # A path relative to the Modelfile: the folder gets its name after it is filled.
            (part / "Modelfile").write_text(f"FROM {self.cfg.base}\nADAPTER ./{ADAPTER_FILE}\n")
            (part / "README.md").write_text(artifact.card)

        self._releases.add(made, "ollama", fill)
        self._run("create", artifact.name, "-f", "Modelfile", folder=self._releases.path / artifact.name)
        return made

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        answers = []
        for case in artifact.fingerprint.cases:
            body = {
                "model": deployment.name,
                "prompt": case.text,
                "raw": True,  # without the model's chat template: the text itself is what was fingerprinted
                "stream": False,
                "options": {"temperature": 0, "num_predict": GREEDY_TOKENS},
            }
            answers.append(str(self._client.call("POST", "/api/generate", body).get("response")))
        return compare_completions(artifact.fingerprint, answers, how="Ollama's answers")

    def route(self, deployment: Deployment) -> None:
        # `cp` writes over the alias, so it is never without a model; it is not removed first.
        self._run("cp", deployment.name, self.cfg.alias)
        self._alias.write(deployment)

    def retire(self, name: str) -> None:
        if name in self._models():
            self._run("rm", name)

    def current(self) -> Deployment | None:
        """What the note says, as long as the alias is a copy of that model: a process that was killed between `cp` and
        the note leaves other weights behind the alias."""
        found, models, alias = self._alias.read(), self._models(), self.cfg.alias
        if found is None or not {found.name, alias} <= models.keys() or models[found.name] != models[alias]:
            return None
        return found
