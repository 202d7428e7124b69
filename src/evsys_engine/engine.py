"""A loaded base model and everything that runs over it.

In: a model's directory. Out: an `Engine` (see `types.EngineApi`): adapters to train and samplers to draw from, all
over one frozen copy of the weights. Loading ends with a look at the model itself: what we compute in our own way must
be what it would say.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evsys_engine.adapters import Shared, TrainingAdapter
from evsys_engine.batching import hidden_states, install
from evsys_engine.devices import (
    FairLock,
    choose_device,
    choose_dtype,
    choose_limits,
    share_one_heap,
    without_progress_bars,
)
from evsys_engine.export import fingerprint, read_weights
from evsys_engine.head import LogitBuffers
from evsys_engine.lora import adapt_linears
from evsys_engine.losses import LOSSES
from evsys_engine.types import BadRequest, EngineError, LoraSettings, ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from evsys_engine.scheduler import BatchSampler

PROBE = [5, 3]
"""Lengths of the sequences a model is tried with."""
FEATURES = {
    "losses": sorted(LOSSES),
    "custom_loss": True,
    "prompt_logprobs": True,
    "topk_prompt_logprobs": True,
    "resume": True,
    "full_fine_tuning": True,
}
"""What this engine can do; its server tells clients that ask."""


class Engine:
    """Fulfils `types.EngineApi`; any thread may call."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self.model, self.tokenizer, self.info, self.lock = shared.model, shared.tokenizer, shared.info, shared.lock

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        name: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> Engine:
        """Load the Hugging Face model in `model_dir`. `threads` counts for the whole process, as torch has it."""
        if threads is not None:
            if threads < 1:
                raise EngineError(f"threads must be 1 or more, not {threads}")
            torch.set_num_threads(threads)
        share_one_heap()
        where = choose_device(device)
        precision = choose_dtype(dtype, where)
        model, tokenizer = _read(Path(model_dir), precision, where)
        model.requires_grad_(False).eval()
        adapt_linears(model)
        install(model)
        text = model.config.get_text_config()
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        info = ModelInfo(
            name=name or Path(model_dir).name,
            path=Path(model_dir).absolute(),
            # One of the two matrices may be padded: an id must have a row in both.
            vocab_size=min(len(layer.get_parameter("weight")) for layer in ends),
            max_length=getattr(text, "max_position_embeddings", None) or 2048,
            parameters=sum(tensor.numel() for tensor in model.parameters()),
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            extra={"fingerprint": fingerprint(model), "architecture": type(model).__name__, "features": FEATURES},
        )
        limits = choose_limits(text, where, precision, max_batch_tokens)
        shared = Shared(
            model=model,
            tokenizer=tokenizer,
            info=info,
            lock=FairLock(),
            limits=limits,
            workspace=LogitBuffers(limits.head_rows),
            packs=_keeps_apart(model),
            trainable=_is_plain(model),
        )
        return cls(shared)

    def create_adapter(self, settings: LoraSettings) -> TrainingAdapter:
        if settings.rank < 0:
            raise BadRequest(f"rank must be 0 (all weights) or more, not {settings.rank}")
        if settings.rank and not settings.alpha > 0:
            raise BadRequest(f"alpha must be above 0, not {settings.alpha}")
        if not self._shared.trainable:
            raise EngineError(
                f"{self.info.name}: a {type(self.model).__name__} does more to its logits than a linear head "
                "(a cap, a scale); this engine can sample from it but not train it"
            )
        with self.lock, torch.inference_mode(False):
            return TrainingAdapter(self._shared, settings)

    def load_sampler(self, folder: Path | None) -> BatchSampler:
        from evsys_engine.scheduler import BatchSampler

        lora, full = (None, None) if folder is None else read_weights(Path(folder), self.model, self.info)
        return BatchSampler(
            engine_model=self.model, tokenizer=self.tokenizer, info=self.info, lora=lora, full=full, lock=self.lock
        )


def _read(model_dir: Path, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (model_dir / "config.json").is_file():
        raise EngineError(f"{model_dir} is not a model directory: it has no config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        with without_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(  # its `to` is decorated without types
                model_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise EngineError(f"{model_dir} cannot be loaded as a causal language model: {exc}") from exc
    return model.to(device), tokenizer


@torch.no_grad()
def _is_plain(model: PreTrainedModel) -> bool:
    """Whether its logits are `head(decoder(tokens))` and nothing more: no cap, no scale."""
    tokens = _probe(model)
    ours = model.get_output_embeddings()(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    return torch.allclose(ours, model(tokens, use_cache=False).logits, rtol=1e-6, atol=1e-6)  # the same products


@torch.no_grad()
def _keeps_apart(model: PreTrainedModel) -> bool:
    """Whether sequences packed into one row stay apart; layers with memory (convolutions) mix them."""
    tokens = _probe(model)
    positions = torch.cat([torch.arange(length, device=model.device) for length in PROBE])[None]
    # Positions are not read where there is one sequence, so any tensor will do for them.
    alone = [hidden_states(model.base_model, part, part, [part.shape[1]]) for part in tokens.split(PROBE, dim=1)]
    try:
        packed = hidden_states(model.base_model, tokens, positions, PROBE)
    except (TypeError, ValueError, RuntimeError):  # a model that does not know masks or positions of this kind
        return False
    theirs = torch.cat(alone)
    tolerance = 1e-3 if theirs.dtype == torch.float32 else 0.1
    return bool((packed - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0))


def _probe(model: PreTrainedModel) -> Tensor:
    vocab_size = len(model.get_input_embeddings().get_parameter("weight"))
    return torch.arange(1, 1 + sum(PROBE), device=model.device)[None] % vocab_size
