"""Make the example's tasks: questions about four stones to train on, and about twelve others to be scored on.

Out: `data/train.jsonl` and `data/unseen/tasks.jsonl`. What a stone weighs and measures is in the task's metadata, for
the tools to tell; the model reads the question only. Running it gives the committed files again, byte for byte.
"""

from __future__ import annotations

import json
from itertools import cycle, product
from pathlib import Path

HERE = Path(__file__).parent / "data"
SEEN = "red green blue black"
UNSEEN = "white grey brown pink orange yellow purple silver golden violet scarlet crimson"
SIZES = list(product((90, 10), (10, 90)))
"""Weight and length."""


def tasks(stones: str) -> list[dict]:
    """Each stone, asked for its weight and for its length."""
    rows = []
    for stone, (weight, length) in zip(stones.split(), cycle(SIZES), strict=False):
        for word, tool, number in (("heavy", "scale", weight), ("long", "ruler", length)):
            expected = f"{tool}: {'yes' if number > 50 else 'no'}"
            rows.append(
                {
                    "task_id": f"{stone}-{word}",
                    "instruction": f"Is the {stone} stone {word}?",
                    "verifier": {"kind": "in_process", "fn_name": "tool_then_answer", "expected": expected},
                    "metadata": {"weight": weight, "length": length, "tool": tool},
                }
            )
    return rows


def main() -> None:
    for name, stones in (("train.jsonl", SEEN), ("unseen/tasks.jsonl", UNSEEN)):
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in tasks(stones)))


if __name__ == "__main__":
    main()
