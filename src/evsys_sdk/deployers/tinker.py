"""A Tinker server: its checkpoints are served where they are, so a deployment names one and keeps it.

In: weights that were trained there. Out: a checkpoint that does not expire, public where the config says so, and a
folder with the model card whose link `current` names the checkpoint in use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from evsys_sdk.backends.tinker import api_key, default_address
from evsys_sdk.backends.tinker_watch import as_our_error
from evsys_sdk.concurrency import run_async
from evsys_sdk.config.base import Name, Params
from evsys_sdk.deployers.comparison import ROUNDED, allowed, compare_logprobs
from evsys_sdk.deployers.releases import ABOUT, CURRENT, Releases
from evsys_sdk.errors import EvsysError, need
from evsys_sdk.experiment.deployment import deployment_of
from evsys_sdk.files import read_object
from evsys_sdk.protocols import Deployment, ModelArtifact, ProbeResult
from evsys_sdk.registry import register_deployer
from evsys_sdk.run.open_model import Target, open_model
from evsys_sdk.training_api import ModelInput

FORM = "tinker"


@register_deployer("tinker")
class TinkerDeployer:
    """A checkpoint at a Tinker server, where it was trained: kept from expiring, and published with `public: true`."""

    requires: ClassVar = {"tinker": "tinker"}

    class Config(Params):
        base_url: Name | None = None
        """The server; by default the client's own (hosted Tinker)."""
        api_key_env: Name = "TINKER_API_KEY"
        """Environment variable with the key. A server on this machine needs none."""
        public: bool = False
        """Publish the checkpoint: everyone with its path can load it. Only the owner of the training run can."""
        path: Name = ".evsys/deployed/tinker"
        """A folder with a model card for each deployment; `current/deployment.json` names the checkpoint in use."""
        keep_replaced: bool = True
        """`false`: what was replaced is no longer public."""
        tolerance: float | None = Field(default=None, gt=0)
        """The largest difference between log probabilities; by default 0.05, because a server may compute in
        bfloat16."""
        timeout_seconds: float = Field(default=60.0, gt=0)
        """Of each call."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self.keeps_replaced = self.cfg.keep_replaced
        self._releases = Releases(Path(self.cfg.path).expanduser().absolute())

    @contextmanager
    def _server(self, what: str) -> Iterator[Any]:
        """The client's REST calls; its connections are the process's, and stay open."""
        tinker = need("tinker", extra="tinker")
        url = self.cfg.base_url or default_address(os.environ)
        rest = tinker.RestClient(base_url=url, api_key=api_key(self.cfg.base_url, self.cfg.api_key_env, os.environ))
        try:
            yield rest
        except EvsysError:
            raise
        except Exception as exc:
            raise as_our_error(exc, what, url, names_a_path=True) from exc

    def _checkpoint(self, rest: Any, path: str) -> Any | None:
        """What the server says of a checkpoint; None where it has it no longer."""
        run = path.removeprefix("tinker://").split("/")[0]
        tinker = need("tinker", extra="tinker")
        try:
            found = rest.list_checkpoints(run).result(self.cfg.timeout_seconds).checkpoints
        except tinker.NotFoundError:
            return None
        return next((one for one in found if one.tinker_path == path), None)

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        if not artifact.checkpoint.startswith("tinker://"):
            raise EvsysError(
                f"{artifact.run}: its weights live on the backend {artifact.backend!r}, and the deployer tinker takes "
                "checkpoints of a Tinker server; use --to folder, hf_hub or serve"
            )
        with self._server("looking for the checkpoint") as rest:
            if self._checkpoint(rest, artifact.checkpoint) is None:
                raise EvsysError(f"{artifact.checkpoint} is not there: it expired or was deleted; train again")
        alias = str(self._releases.path / CURRENT)
        made = deployment_of(artifact, "tinker", endpoint=artifact.checkpoint, alias=alias)
        self._releases.add(made, FORM, lambda part: _write_card(part, artifact))
        return made

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        """Ask the server's sampler for the log probabilities of the prompts."""
        params: dict[str, object] = {"base_url": self.cfg.base_url, "api_key_env": self.cfg.api_key_env}
        target = Target(name=artifact.name, model=artifact.base_model, backend="tinker", backend_params=params)

        async def ask() -> list[list[float]]:
            sampler = await opened.service.create_sampling_client(deployment.endpoint)
            prompts = [ModelInput.from_ints(list(case.tokens)) for case in artifact.fingerprint.cases]
            found = [(await sampler.compute_logprobs(prompt))[1:] for prompt in prompts]
            return [[value for value in one if value is not None] for one in found]

        with open_model(target) as opened:
            answers = run_async(ask())
        tolerance = allowed(self.cfg.tolerance, ROUNDED, artifact.fingerprint)
        return compare_logprobs(artifact.fingerprint, answers, tolerance=tolerance, how="the server's sampler")

    def route(self, deployment: Deployment) -> None:
        path, seconds = deployment.endpoint, self.cfg.timeout_seconds
        with self._server("publishing") as rest:
            found = self._checkpoint(rest, path)
            if found is None:
                raise EvsysError(f"{path} is not there any more; train again")
            if found.expires_at is not None:
                rest.set_checkpoint_ttl_from_tinker_path(path, None).result(seconds)
            if found.public != self.cfg.public:
                wanted = "publish" if self.cfg.public else "unpublish"
                getattr(rest, f"{wanted}_checkpoint_from_tinker_path")(path).result(seconds)
        self._releases.switch(deployment.name)

    def retire(self, name: str) -> None:
        """No longer public; the checkpoint itself stays with its run."""
        about = read_object(self._releases.path / name / ABOUT)
        used = self._releases.current(FORM)
        if used is None or used.name != name:  # of the one in use, `remove` says what to do
            with self._server("unpublishing") as rest:
                path = str((about or {}).get("endpoint"))
                found = self._checkpoint(rest, path) if about else None
                if found is not None and found.public:
                    rest.unpublish_checkpoint_from_tinker_path(path).result(self.cfg.timeout_seconds)
        self._releases.remove(name)

    def current(self) -> Deployment | None:
        found = self._releases.current(FORM)
        if found is None:
            return None
        with self._server("looking for the checkpoint in use") as rest:
            checkpoint = self._checkpoint(rest, found.endpoint)
        return found if checkpoint is not None and checkpoint.public == self.cfg.public else None


def _write_card(folder: Path, artifact: ModelArtifact) -> None:
    code = [
        "import tinker",
        "",
        "client = tinker.ServiceClient()  # base_url=... for a server of your own",
        f'sampler = client.create_sampling_client(model_path="{artifact.checkpoint}")',
    ]
    how = ["", "## How to load it", "", "```python", *code, "```", ""]
    (folder / "README.md").write_text(artifact.card + "\n".join(how))
