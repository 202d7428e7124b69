"""A loss of your own: cross-entropy that looks away from tokens the model already knows.

The algorithm is `sft` with one line changed: the batch brings the loss. docs/custom_loss.md has the contract.
"""

from __future__ import annotations

from pydantic import Field

from evsys_sdk import register_algorithm
from evsys_sdk.algorithms.sft import SFT


def focal_loss(gamma):
    """Focal loss (Lin et al. 2017, equation 4), as a sum over tokens; gamma 0 is cross-entropy."""

    def loss(data, logprobs):
        total = 0.0
        for datum, logp in zip(data, logprobs, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_torch().to(logp)
            total = total - (weights * (1 - logp.exp()) ** gamma * logp).sum()
        return total, {"sequences:sum": float(len(data))}

    return loss


@register_algorithm("focal_sft")
class FocalSFT(SFT):
    """`sft` with the focal loss."""

    name = "focal_sft"

    class Config(SFT.Config):
        gamma: float = Field(default=2.0, ge=0)
        """How much less a token counts that the model already knows; 0 is `sft`."""

    async def build_batch(self, step):
        batch = await super().build_batch(step)
        batch.loss_fn = focal_loss(self.cfg.gamma)
        batch.loss_scale = float(len(batch.data))  # logged per row; the gradient is that of the sum
        return batch
