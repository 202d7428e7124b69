"""How a model is asked for one identifier, such as a tool's slug, and how that is read from what it says.

In: a query; a completion. Out: a prompt; the identifier. The `qwen_*` helpers write out a chat as text, for clients
that take raw text; our own clients take messages and render them with the model's own template.
"""

from __future__ import annotations

import re
from typing import Any

from evsys_sdk.answers import answer_in, has_answer, parsed_json, texts_between, wanted_answer

DEFAULT_SYSTEM = (
    "Choose the one tool that does what the user asks for. Answer with the tool's slug between <answer> and </answer>."
)
DEFAULT_SYSTEM_NO_THINK = f"{DEFAULT_SYSTEM} /no_think"
"""With the switch that keeps Qwen3 from thinking aloud."""

_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_CALL, _CALL_END = re.compile(r"<tool_call>"), re.compile(r"</tool_call>")
_SLUG = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
_OPEN = re.compile(r".*<answer>([^<]*)", re.DOTALL | re.IGNORECASE)
_AROUND = " \t\r\n\"'`.*"


def chat_messages(query: str, system: str | None = DEFAULT_SYSTEM) -> list[dict[str, Any]]:
    """The chat that asks for a slug."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": query}]


def qwen_chat_prompt(query: str, system: str | None = DEFAULT_SYSTEM) -> str:
    """The chat in Qwen's form (ChatML), up to where the assistant is to speak."""
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat_messages(query, system)]
    return "".join(turns) + "<|im_start|>assistant\n"


def qwen3_chat_template_prompt(
    query: str, system: str | None = DEFAULT_SYSTEM, *, enable_thinking: bool = False
) -> str:
    """The same as Qwen3's template writes it: without thinking, the assistant begins with an empty thought."""
    prompt = qwen_chat_prompt(query, system)
    return prompt if enable_thinking else f"{prompt}<think>\n\n</think>\n\n"


def extract_predicted_slug(completion: str) -> str | None:
    """The identifier that a completion answers with, or None where none can be read.

    What stands in `<answer>` tags comes first, also in a tag that a stop sequence or the limit on tokens left open,
    then a tool call's name, then an answer of one line, then the last word that looks like a slug (`GMAIL_SEND_EMAIL`).
    Thoughts are passed over, also one that never ends.
    """
    said = _THOUGHT.sub("", completion).strip()
    if has_answer(said):
        return _plain(answer_in(said))
    begun = _OPEN.match(said)
    if begun and begun[1].strip():
        return _plain(_first_line(begun[1]))
    blocks = (block.strip() for block in texts_between(said, _CALL, _CALL_END))
    calls = [block for block in blocks if block.startswith("{") and block.endswith("}")]
    if calls:
        call = parsed_json(calls[-1])
        return _plain(str(call["name"])) if isinstance(call, dict) and call.get("name") else None
    if said and "\n" not in said:
        return _plain(said)
    found = _SLUG.findall(said)
    return found[-1] if found else None


def _first_line(text: str) -> str:
    """What an answer that is not closed can mean: JSON over several lines as it is, else its first line."""
    return text if parsed_json(text) is not None else text.strip().splitlines()[0]


def _plain(text: str) -> str | None:
    fields = parsed_json(text)
    if isinstance(fields, dict):
        text = str(wanted_answer(fields)) if wanted_answer(fields) is not fields else ""
    return text.strip(_AROUND) or None
