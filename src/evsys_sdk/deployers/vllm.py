"""vLLM: the adapter is loaded into a running server under a new name."""

from __future__ import annotations

from typing import Any

from evsys_sdk.config.base import Name
from evsys_sdk.deployers.http import echo_logprobs
from evsys_sdk.deployers.lora_server import LoraServer, LoraServerParams
from evsys_sdk.protocols import Fingerprint
from evsys_sdk.registry import register_deployer


@register_deployer("vllm")
class VllmDeployer(LoraServer):
    """A running vLLM takes the adapter (`--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True)."""

    class Config(LoraServerParams):
        alias_file: Name = ".evsys/deployed/vllm.json"

    kind = "vllm"
    load_route, unload_route = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    start_with = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora, --max-loras and --max-lora-rank"

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        super().__init__()

    def prompt_logprobs(self, name: str, fingerprint: Fingerprint) -> list[list[float]]:
        return echo_logprobs(self.client, name, fingerprint)[0]
