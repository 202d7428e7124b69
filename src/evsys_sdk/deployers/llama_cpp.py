"""Weights for llama.cpp: a GGUF adapter beside its base model, or one merged GGUF file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.deployers.comparison import allowed, compare_top
from evsys_sdk.deployers.folder import GGUF_FILE, TOLERANCES, write_export
from evsys_sdk.deployers.releases import ReleaseDeployer
from evsys_sdk.errors import EvsysError, need, shorten
from evsys_sdk.experiment.export import export_run
from evsys_sdk.protocols import Deployment, ModelArtifact, ProbeResult
from evsys_sdk.registry import register_deployer

ADAPTER_FILE = "adapter.gguf"
BASES = "bases"
PROBE_SECONDS = 600.0


@register_deployer("llama_cpp")
class LlamaCppDeployer(ReleaseDeployer):
    """GGUF files for llama.cpp, checked by llama.cpp itself (package xllamacpp): `<path>/current` is what to start."""

    class Config(Params):
        path: Name
        """The folder of all releases; base models are kept in `bases/` below it, once."""
        form: Literal["adapter", "merged"] = "adapter"
        """A LoRA adapter for `--lora`, or the whole model in one file."""
        number_type: Literal["f32", "f16", "bf16", "q8_0"] = "f32"
        """Of the numbers in the base or merged file; an adapter's stay f32. SmolLM2-135M in f16 differs by 0.022."""
        tolerance: float | None = Field(default=None, gt=0)
        """The largest difference between log probabilities; by default by `number_type`: 0.01, 0.02, 0.1, 0.2."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        super().__init__(self.cfg.path, f"{self.cfg.form}-{self.cfg.number_type}")

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        made = self.releases.describe(artifact, "llama_cpp", self.form_name)

        def fill(part: Path) -> None:
            if self.cfg.form == "merged":
                write_export(artifact, part, "gguf", self.cfg.number_type)
            else:
                write_adapter(artifact, part / ADAPTER_FILE)
                base = self._base(artifact)
                if not base.is_file():
                    base.parent.mkdir(parents=True, exist_ok=True)
                    export_run(artifact.base_model, "gguf", base, number_type=self.cfg.number_type)
            (part / "README.md").write_text(artifact.card + "\n" + self._how_to_load(artifact))

        self.releases.add(made, self.form_name, fill)
        return made

    def _base(self, artifact: ModelArtifact) -> Path:
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", artifact.base_model).strip("-")
        return self.releases.path / BASES / f"{slug}.{self.cfg.number_type}.gguf"

    def _how_to_load(self, artifact: ModelArtifact) -> str:
        files = f"-m {GGUF_FILE}"
        if self.cfg.form == "adapter":
            files = f"-m ../{BASES}/{self._base(artifact).name} --lora {ADAPTER_FILE}"
        lines = ["## How to load it", "", "In this folder:", "", "```bash", f"llama-server {files}", "```", ""]
        note = "llama.cpp takes no new file while it runs: start it again after a deployment."
        return "\n".join([*lines, note, ""])

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        """Load the files into llama.cpp, in a separate process, and ask it for the likeliest tokens."""
        folder, cases = Path(deployment.endpoint), artifact.fingerprint.cases
        is_merged = self.cfg.form == "merged"
        found = ask_llama_cpp(
            folder / GGUF_FILE if is_merged else self._base(artifact),
            None if is_merged else folder / ADAPTER_FILE,
            [case.tokens[:-1] for case in cases],
            top=2 * max(len(case.top) for case in cases),
        )
        tolerance = allowed(self.cfg.tolerance, TOLERANCES[self.cfg.number_type], artifact.fingerprint)
        how = f"the files, loaded by llama.cpp (xllamacpp {found['version']})"
        answers = [{int(token): float(value) for token, value in answer} for answer in found["answers"]]
        return compare_top(artifact.fingerprint, answers, tolerance=tolerance, how=how)


def write_adapter(artifact: ModelArtifact, file: Path) -> None:
    """The adapter as a GGUF file."""
    if artifact.backend != "local":
        raise EvsysError(
            f"{artifact.run}: its weights live on the backend {artifact.backend!r}; only the backend local keeps "
            "weights that can be exported"
        )
    from evsys_engine.models import find_model
    from evsys_engine.models.gguf_writer import write_gguf_adapter
    from evsys_engine.peft_folder import is_peft_folder
    from evsys_engine.types import EngineError

    weights = Path(artifact.checkpoint)
    if not is_peft_folder(weights):
        raise EvsysError(f"{artifact.run} trained all weights and has no adapter; use form: merged")
    try:
        write_gguf_adapter(weights, find_model(artifact.base_model).path, file)
    except EngineError as exc:
        raise EvsysError(f"{artifact.run}: {exc}") from exc


def ask_llama_cpp(model: Path, lora: Path | None, prompts: list[tuple[int, ...]], *, top: int) -> dict[str, Any]:
    """What llama.cpp answers with these files."""
    need("xllamacpp", extra="llama_cpp")
    asked = {"model": str(model), "lora": str(lora) if lora else "", "prompts": [list(one) for one in prompts]}
    command = [sys.executable, "-m", "evsys_sdk.deployers.llama_cpp_worker"]
    try:
        done = subprocess.run(
            command, input=json.dumps({**asked, "top": top}), capture_output=True, text=True, timeout=PROBE_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise EvsysError(f"llama.cpp did not answer in {PROBE_SECONDS:g} s with {model}") from exc
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        reason = shorten(" ".join(done.stderr.split()[-60:]) or "no reason given", 400)
        raise EvsysError(f"llama.cpp could not load {model}{f' with {lora}' if lora else ''}: {reason}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
