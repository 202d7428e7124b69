"""A process in which llama.cpp answers a probe: a file that crashes it takes no other process down.

In, on stdin: `{"model", "lora", "prompts", "top"}`, prompts as token ids. Out, on stdout: `{"version", "answers"}`, for
each prompt the likeliest next tokens as `[id, log probability]`.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from evsys_sdk.errors import need


def main() -> None:
    asked = json.loads(sys.stdin.read())
    xllamacpp = need("xllamacpp", extra="llama_cpp")
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    if asked["lora"]:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = asked["lora"], 1.0
        params.lora_adapters = [adapter]
    server = xllamacpp.Server(params)
    answers = []
    for prompt in asked["prompts"]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": asked["top"], "cache_prompt": False}
        answer = server.handle_completions(body)
        if "choices" not in answer:
            raise SystemExit(f"llama.cpp refused a prompt: {answer}")
        likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        answers.append([[one["id"], one["logprob"]] for one in likeliest])
    print(json.dumps({"version": version("xllamacpp"), "answers": answers}), flush=True)


if __name__ == "__main__":
    main()
