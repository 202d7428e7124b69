"""The Hugging Face Hub: each deployment is a tag of a repository, and the branch `main` is the one in use.

In: an artifact. Out: its files, uploaded to a separate branch and tagged with the content-addressed name; the probe
downloads the tag again and scores its files; then `main` gets the tag's files in one commit.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from evsys_sdk.config.base import Name
from evsys_sdk.deployers.folder import FileForm, how_to_load, probe_files, write_export
from evsys_sdk.deployers.http import key_from
from evsys_sdk.deployers.releases import ABOUT, read_about, write_about
from evsys_sdk.errors import EvsysError, need, shorten
from evsys_sdk.experiment.deployment import deployment_of
from evsys_sdk.protocols import Deployment, ModelArtifact, ProbeResult
from evsys_sdk.redaction import redact
from evsys_sdk.registry import register_deployer

MAIN = "main"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@register_deployer("hf_hub")
class HfHubDeployer:
    """Files with a model card in a repository of the Hugging Face Hub, private by default: a tag for each deployment,
    and `main` is the one in use."""

    requires: ClassVar = {"huggingface_hub": "local"}

    class Config(FileForm):
        repo: Name
        """`<user or organisation>/<name>`; it is created where it does not exist."""
        private: bool = True
        """Of the repository. One that exists and is public is refused, unless this is `false`."""
        token_env: Name = "HF_TOKEN"
        """Environment variable with a token that may write to the repository."""
        endpoint: Name | None = None
        """Of the hub; by default HF_ENDPOINT, else the Hugging Face Hub."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    @contextmanager
    def _hub(self) -> Iterator[Any]:
        """The hub's client; what it raises becomes an error that names the fix."""
        hub = need("huggingface_hub", extra="local")
        errors, httpx = need("huggingface_hub.errors", extra="local"), need("httpx", extra="local")
        token = key_from(self.cfg.token_env, "token_env", needed=True)
        api = hub.HfApi(endpoint=self.cfg.endpoint or os.environ.get("HF_ENDPOINT") or None, token=token)
        try:
            yield api
        except errors.OfflineModeIsEnabled as exc:
            raise EvsysError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it") from exc
        except errors.HfHubHTTPError as exc:
            raise EvsysError(f"{api.endpoint}: {self._refusal(exc)}") from exc
        except (httpx.HTTPError, ConnectionError) as exc:
            said = f"{api.endpoint} does not answer ({type(exc).__name__}); is the address right (HF_ENDPOINT)?"
            raise EvsysError(said) from exc
        except (ValueError, RuntimeError) as exc:  # a name the hub does not take, an upload that was refused
            raise EvsysError(f"{api.endpoint}, {self.cfg.repo}: {shorten(redact(str(exc)), 300)}") from exc

    def _refusal(self, exc: Any) -> str:
        repo, variable = self.cfg.repo, self.cfg.token_env
        status = exc.response.status_code if exc.response is not None else 0
        hint = {
            401: f"the token in {variable} is not known there; make one with write access and set {variable}",
            403: f"the token in {variable} may not write to {repo}; make one with write access",
            404: f"{repo} is not there, or the token in {variable} may not see it",
            412: f"{repo} was changed meanwhile; run evsys deploy again",
        }.get(status)
        said = shorten(redact(str(getattr(exc, "server_message", None) or exc).strip()), 300)
        return f"{status}: {hint} ({said})" if hint else f"{status}: {said}"

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        repo, tag = self.cfg.repo, artifact.name
        with self._hub() as api:
            api.create_repo(repo, private=self.cfg.private, exist_ok=True)
            if self.cfg.private and not api.model_info(repo).private:
                raise EvsysError(f"{repo} is public; set deploy.params.private: false, or name another repo")
            endpoint = f"{api.endpoint}/{repo}/tree/{tag}"
            made = deployment_of(artifact, "hf_hub", endpoint=endpoint, alias=f"{repo}@{MAIN}")
            if any(found.name == tag for found in api.list_repo_refs(repo).tags):
                there = self._about(api, tag)
                if there is None or there.digest != made.digest:
                    raise EvsysError(
                        f"{repo} has a tag {tag} that holds something else; delete it, or use another repo"
                    )
                return made
            # Not to `main`, which callers load: a tag is made last, so one that exists names a whole upload.
            branch = _upload_branch(tag)
            api.create_branch(repo, branch=branch, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="evsys-hub-") as place:
                folder = Path(place)
                write_export(artifact, folder, self.cfg.form, self.cfg.number_type)
                (folder / "README.md").write_text(self._card(artifact))
                write_about(folder, made, self.cfg.form_name)
                done = api.upload_folder(
                    repo_id=repo, folder_path=folder, revision=branch, commit_message=tag, delete_patterns="*"
                )
            api.create_tag(repo, tag=tag, revision=done.oid)
            api.delete_branch(repo, branch=branch)
        return made

    def _card(self, artifact: ModelArtifact) -> str:
        """The model card; the hub takes only ids of the hub as `base_model`."""
        lines = artifact.card.splitlines()
        if not HUB_ID.fullmatch(artifact.base_model) or Path(artifact.base_model).exists():
            lines = [line for line in lines if not line.startswith("base_model: ")]
        source = f'"{self.cfg.repo}", revision="{artifact.name}"'
        return "\n".join([*lines, "", how_to_load(self.cfg.form, artifact, source=source)])

    def _about(self, api: Any, revision: str) -> Deployment | None:
        """Which deployment a revision is; None where there is none."""
        errors = need("huggingface_hub.errors", extra="local")
        with tempfile.TemporaryDirectory(prefix="evsys-hub-") as place:
            try:
                api.hf_hub_download(self.cfg.repo, ABOUT, revision=revision, local_dir=place)
            except (errors.EntryNotFoundError, errors.RevisionNotFoundError, errors.RepositoryNotFoundError) as exc:
                if isinstance(exc, errors.GatedRepoError | errors.LocalEntryNotFoundError):
                    raise ConnectionError(str(exc)) from exc
                return None
            return read_about(Path(place), self.cfg.form_name)

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        """Download the tag and score the prompts with its files."""
        with tempfile.TemporaryDirectory(prefix="evsys-hub-") as place:
            with self._hub() as api:
                api.snapshot_download(self.cfg.repo, revision=deployment.name, local_dir=place)
            return probe_files(Path(place), self.cfg, artifact, files="the files, downloaded again")

    def route(self, deployment: Deployment) -> None:
        """`main` gets the files of the tag, and no other ones, in one commit."""
        hub, repo, tag = need("huggingface_hub", extra="local"), self.cfg.repo, deployment.name
        with self._hub() as api:
            head = next(found.target_commit for found in api.list_repo_refs(repo).branches if found.name == MAIN)
            files, before = api.list_repo_files(repo, revision=tag), api.list_repo_files(repo, revision=head)
            changes = [
                *(hub.CommitOperationCopy(src_path_in_repo=one, path_in_repo=one, src_revision=tag) for one in files),
                *(hub.CommitOperationDelete(path_in_repo=one) for one in before if one not in files),
            ]
            # A push in between is not overwritten: the hub refuses a commit whose parent is no longer the head.
            api.create_commit(repo, changes, commit_message=f"Deploy {tag}", revision=MAIN, parent_commit=head)

    def retire(self, name: str) -> None:
        used = self.current()
        if used is not None and used.name == name:
            raise EvsysError(f"{name} is in use ({self.cfg.repo}@{MAIN}); deploy another one first")
        with self._hub() as api:
            refs = api.list_repo_refs(self.cfg.repo)
            if any(found.name == name for found in refs.tags):
                api.delete_tag(self.cfg.repo, tag=name)
            if any(found.name == _upload_branch(name) for found in refs.branches):
                api.delete_branch(self.cfg.repo, branch=_upload_branch(name))

    def current(self) -> Deployment | None:
        with self._hub() as api:
            return self._about(api, MAIN)


def _upload_branch(name: str) -> str:
    return f"upload-{name}"
