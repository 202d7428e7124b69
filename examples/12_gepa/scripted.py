"""Two models of a few lines, so that the lesson needs no key and no network.

`scripted_task` knows the tool of a request. Without a rule in the system prompt it says so in a sentence, and without
another one it writes three of the six names in small letters. `scripted_reflection` adds one rule that is missing from
the prompt that it is shown. Both are inference clients like `claude`, `openai` and `gemini`, and a config names them by
their kind.
"""

from __future__ import annotations

import re

from evsys_sdk import register_inference
from evsys_sdk.inference.base import AskingClient, Completion

TOOLS = {
    "GMAIL_SEND": "email|mailbox|inbox",
    "CALENDAR_ADD": "meeting|appointment|calendar",
    "GITHUB_ISSUE": "repository|pull-request|issue",
    "SLACK_POST": "channel|slack|thread",
    "DRIVE_UPLOAD": "document|spreadsheet|folder",
    "WEATHER_GET": "weather|temperature|forecast",
}
RULES = {"alone": "Answer with the tool's name alone.", "capitals": "Write the tool's name in capital letters."}


@register_inference("scripted_task")
class ScriptedTask(AskingClient):
    """Knows the tool; how it answers is up to the system prompt."""

    async def _ask(self, question):
        rules = next((m["content"] for m in question.messages if m["role"] == "system"), "")
        request = question.messages[-1]["content"]
        tool = next(name for name, words in TOOLS.items() if re.search(words, request))
        careless = tool in ("GMAIL_SEND", "CALENDAR_ADD", "DRIVE_UPLOAD") and RULES["capitals"] not in rules
        said = tool.lower() if careless else tool
        return Completion(text=said if RULES["alone"] in rules else f"That needs {said}, I think.", cost_usd=0.0)


@register_inference("scripted_reflection")
class ScriptedReflection(AskingClient):
    """Adds to the prompt that it is shown the first rule that is not yet in it."""

    async def _ask(self, question):
        asked = question.messages[-1]["content"]
        kept = [rule for rule in RULES.values() if rule in asked]
        missing = [rule for rule in RULES.values() if rule not in asked]
        prompt = " ".join(["Name the tool that the request needs.", *kept, *missing[:1]])
        return Completion(text=f"```\n{prompt}\n```", cost_usd=0.0)
