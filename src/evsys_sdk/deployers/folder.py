"""Weights as files with a model card, under a path of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.deployers.comparison import ROUNDED, allowed, compare_logprobs
from evsys_sdk.deployers.releases import ReleaseDeployer
from evsys_sdk.errors import EvsysError, need
from evsys_sdk.experiment.export import export_run
from evsys_sdk.files import read_object
from evsys_sdk.protocols import Deployment, ModelArtifact, ProbeResult
from evsys_sdk.registry import register_deployer

GGUF_FILE = "model.gguf"
TOLERANCES = {"f32": 1e-2, "f16": 2e-2, "bf16": 1e-1, "q8_0": 2e-1}
"""Of log probabilities, by the numbers in a GGUF file. On a tiny model the largest differences were 1e-5 (f32), 1.2e-3
(f16) and 3.7e-3 (q8_0); larger models round more, so there is room. That of bf16 was not measured."""


class FileForm(Params):
    """In which files weights are written, for targets that keep files."""

    form: Literal["peft", "merged", "gguf"] = "peft"
    """The adapter, the whole model as safetensors, or one GGUF file."""
    number_type: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """Of the numbers in a GGUF file."""
    tolerance: float | None = Field(default=None, gt=0)
    """The largest difference between log probabilities; by default 0.01, and by `number_type` for GGUF."""

    @property
    def form_name(self) -> str:
        return f"gguf-{self.number_type}" if self.form == "gguf" else self.form


@register_deployer("folder")
class FolderDeployer(ReleaseDeployer):
    """Files with a model card: `<path>/<name>/`, and the link `<path>/current` to the newest."""

    class Config(FileForm):
        path: Name
        """The folder of all releases."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        super().__init__(self.cfg.path, self.cfg.form_name)

    def deploy(self, artifact: ModelArtifact) -> Deployment:
        made = self.releases.describe(artifact, "folder", self.form_name)

        def fill(part: Path) -> None:
            write_export(artifact, part, self.cfg.form, self.cfg.number_type)
            (part / "README.md").write_text(artifact.card + "\n" + how_to_load(self.cfg.form, artifact))

        self.releases.add(made, self.form_name, fill)
        return made

    def probe(self, deployment: Deployment, artifact: ModelArtifact) -> ProbeResult:
        """Load the files again, by transformers and peft, and score the prompts with them."""
        return probe_files(Path(deployment.endpoint), self.cfg, artifact, files="the files")


def probe_files(folder: Path, cfg: FileForm, artifact: ModelArtifact, *, files: str) -> ProbeResult:
    """Load the files again, by transformers and peft, and compare what they make of the prompts."""
    usual = TOLERANCES[cfg.number_type if cfg.form == "gguf" else "f32"]
    if cfg.form == "merged" and "float32" not in str((read_object(folder / "config.json") or {}).get("dtype")):
        usual = ROUNDED  # the sum of base weights and adapter is rounded to the base model's own type
    tolerance = allowed(cfg.tolerance, usual, artifact.fingerprint)
    answers = score_files(folder, cfg.form, artifact)
    how = f"{files}, loaded by transformers" + (" and peft" if cfg.form == "peft" else "")
    return compare_logprobs(artifact.fingerprint, answers, tolerance=tolerance, how=how)


def write_export(artifact: ModelArtifact, folder: Path, form: Any, number_type: Any) -> None:
    """The files of the weights in an existing, empty folder."""
    made = folder / (GGUF_FILE if form == "gguf" else "files")
    export_run(artifact.checkpoint, form, made, number_type=number_type)
    if form != "gguf":
        for file in made.iterdir():
            file.rename(folder / file.name)
        made.rmdir()


def score_files(folder: Path, form: str, artifact: ModelArtifact) -> list[list[float]]:
    """Log probabilities of every prompt, by libraries that know nothing of how the weights were trained."""
    torch, transformers = need("torch", extra="local"), need("transformers", extra="local")
    from evsys_engine.devices import without_progress_bars
    from evsys_engine.models import find_model

    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        with without_progress_bars():
            if form == "peft":
                peft = need("peft", extra="local")
                base = load(find_model(artifact.base_model).path, dtype=torch.float32, local_files_only=True)
                model = peft.PeftModel.from_pretrained(base, str(folder))
            elif form == "gguf":
                model = load(folder, gguf_file=GGUF_FILE, dtype=torch.float32, local_files_only=True)
            else:
                model = load(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise EvsysError(f"{folder} cannot be loaded: {exc}") from exc
    model.eval()
    answers = []
    with torch.no_grad():
        for case in artifact.fingerprint.cases:
            tokens = torch.tensor([case.tokens])
            scores = torch.log_softmax(model(tokens).logits[0, :-1].float(), dim=-1)
            answers.append(scores.gather(1, tokens[0, 1:, None])[:, 0].tolist())
    return answers


def how_to_load(form: str, artifact: ModelArtifact, *, source: str | None = None) -> str:
    """The last section of the card. `source`: Python arguments that name a repository; None is the card's folder."""
    place, at = ("In this folder:", '"."') if source is None else ("From the repository:", source)
    base, pulled = artifact.base_model, ""
    if "/" not in base:  # a built-in name of ours, which other programs know by its folder
        base, pulled = f"<folder of {base}>", f"  # `evsys model pull {base}` prints it"
    code = {
        "peft": [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{base}"){pulled}',
            f"model = PeftModel.from_pretrained(base, {at})",
            f"tokenizer = AutoTokenizer.from_pretrained({at})",
        ],
        "merged": [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({at})",
            f"tokenizer = AutoTokenizer.from_pretrained({at})",
        ],
        "gguf": [
            "import xllamacpp",
            *([] if source is None else ["from huggingface_hub import hf_hub_download"]),
            "",
            "params = xllamacpp.CommonParams()",
            "params.model.path = "
            + (f'"{GGUF_FILE}"' if source is None else f'hf_hub_download({source}, filename="{GGUF_FILE}")'),
            "server = xllamacpp.Server(params)",
        ],
    }[form]
    note = {"gguf": f"Or with llama.cpp's own server: `llama-server -m {GGUF_FILE}`.\n"}.get(form, "")
    return "\n".join(["## How to load it", "", place, "", "```python", *code, "```", "", note])
