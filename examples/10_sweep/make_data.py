"""Make the rows of the mock example: which tool does this request need?

Out: `data/train.jsonl`, `data/val/tasks.jsonl`, `data/test/tasks.jsonl`. The sentences of the three are built from
different templates, so that no evaluation sentence stands in the training rows. Running it gives the committed files
again, byte for byte.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

HERE = Path(__file__).parent / "data"
TOOLS = {
    "GMAIL_SEND": ("email", "mailbox", "inbox"),
    "CALENDAR_ADD": ("meeting", "appointment", "calendar"),
    "GITHUB_ISSUE": ("repository", "pull-request", "issue"),
    "SLACK_POST": ("channel", "slack", "thread"),
    "DRIVE_UPLOAD": ("document", "spreadsheet", "folder"),
    "WEATHER_GET": ("weather", "temperature", "forecast"),
}
PEOPLE = ("Ada", "Lin", "Sam", "Noor")
TEMPLATES = {
    "train": (
        "Please help {who} with the {thing}",
        "{who} needs something done about the {thing}",
        "Can you look at this {thing} for {who}?",
    ),
    "val": ("The {thing} of {who} is waiting for you", "I have a question on a {thing}, says {who}"),
    "test": ("{who} would like you to take care of one {thing}", "What about the {thing} that {who} mentioned?"),
}


def sentences(split: str) -> list[tuple[str, str]]:
    made = [
        (template.format(who=who, thing=thing), tool)
        for tool, things in TOOLS.items()
        for template, thing, who in itertools.product(TEMPLATES[split], things, PEOPLE)
    ]
    return made if split == "train" else made[::3]


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    write(HERE / "train.jsonl", [{"query": query, "tool_slug": tool} for query, tool in sentences("train")])
    for split in ("val", "test"):
        tasks = [
            {
                "task_id": f"{split}-{number:03d}",
                "instruction": query,
                "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": tool},
                "metadata": {"toolkit": tool.split("_")[0].lower()},
            }
            for number, (query, tool) in enumerate(sentences(split))
        ]
        write(HERE / split / "tasks.jsonl", tasks)


if __name__ == "__main__":
    main()
