"""`llama_cpp`: the exported files answer in llama.cpp as the weights do in our engine."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from evsys_sdk.config.base import DeploySpec
from evsys_sdk.deployers.llama_cpp import LlamaCppDeployer
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import deploy_artifact, find_shipped_run, make_artifact

pytest.importorskip("torch", reason="the local backend needs torch")
pytest.importorskip("xllamacpp", reason="extra llama_cpp")


@pytest.fixture(scope="module")
def artifact(tiny_trained):
    return make_artifact(tiny_trained.record, find_shipped_run(tiny_trained.record, tiny_trained.path))


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_llama_cpp_answers_like_the_engine(artifact, tiny_trained, tmp_path, form):
    spec = DeploySpec(kind="llama_cpp", params={"path": str(tmp_path), "form": form, "number_type": "f32"})
    target = LlamaCppDeployer(**spec.params)
    done = deploy_artifact(artifact, target, spec, tiny_trained.path)
    assert done.state == "deployed" and done.probe.tolerance == 0.01
    assert done.probe.difference < 1e-3 < artifact.fingerprint.contrast, "and these are not the base model's"
    assert "loaded by llama.cpp" in done.probe.detail
    assert (tmp_path / "bases").exists() == (form == "adapter")
    assert "llama-server -m" in (tmp_path / "current" / "README.md").read_text()


def test_an_adapter_that_does_nothing_fails_the_probe(artifact, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    target = LlamaCppDeployer(path=str(tmp_path / "out"), number_type="f32")
    zeros = tmp_path / "zeros"
    zeros.mkdir()
    source = artifact.checkpoint
    shutil.copy(f"{source}/adapter_config.json", zeros)
    tensors = load_file(f"{source}/adapter_model.safetensors")
    save_file({name: torch.zeros_like(one) for name, one in tensors.items()}, zeros / "adapter_model.safetensors")
    made = target.deploy(replace(artifact, checkpoint=str(zeros)))
    found = target.probe(made, artifact)
    assert found.ok is False and found.compared == "logprobs"


def test_a_file_that_llama_cpp_cannot_read_is_an_error_and_not_a_crash(artifact, tmp_path):
    target = LlamaCppDeployer(path=str(tmp_path), number_type="f32")
    made = target.deploy(artifact)
    (tmp_path / artifact.name / "adapter.gguf").write_bytes(b"not a GGUF file")
    with pytest.raises(EvsysError, match=r"llama\.cpp could not load"):
        target.probe(made, artifact)
