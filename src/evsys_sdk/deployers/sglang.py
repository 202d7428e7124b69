"""SGLang: the adapter is loaded into a running server, and applies only to requests that name it."""

from __future__ import annotations

from typing import Any

from evsys_sdk.config.base import Name
from evsys_sdk.deployers.lora_server import LoraServer, LoraServerParams, as_numbers
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import Fingerprint
from evsys_sdk.registry import register_deployer


@register_deployer("sglang")
class SglangDeployer(LoraServer):
    """A running SGLang takes the adapter (`--enable-lora`); requests must name it (`lora_path`)."""

    class Config(LoraServerParams):
        alias_file: Name = ".evsys/deployed/sglang.json"

    kind = "sglang"
    load_route, unload_route = "/load_lora_adapter", "/unload_lora_adapter"
    start_with = "--enable-lora, --max-lora-rank and --lora-target-modules"

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        super().__init__()

    def request_fields(self, name: str) -> dict[str, object]:
        return {"lora_path": name}

    def prompt_logprobs(self, name: str, fingerprint: Fingerprint) -> list[list[float]]:
        answers = []
        for case in fingerprint.cases:
            body = {
                "input_ids": list(case.tokens),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
                **self.request_fields(name),
            }
            answer = self.client.call("POST", "/generate", body)
            try:
                # Each is [log probability, token id, text]; the first token has no log probability.
                found = [one[0] for one in answer["meta_info"]["input_token_logprobs"][1:]]
            except (KeyError, IndexError, TypeError) as exc:
                raise EvsysError(f"{self.cfg.url} gave no log probabilities of a prompt") from exc
            answers.append(as_numbers(found, self.cfg.url))
        return answers
