"""Make the rows of the RL proof: questions to be answered with yes or no, and with nothing more.

Out: `data/train.jsonl` and `data/test/tasks.jsonl`: half animals, half things, and no noun in both. Running it gives
the committed files again, byte for byte.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path

HERE = Path(__file__).parent / "data"
ANIMALS = (
    "dog cat horse cow pig sheep goat lion tiger bear wolf fox rabbit mouse deer monkey elephant giraffe zebra "
    "camel kangaroo whale shark dolphin seal otter frog snake lizard turtle crocodile duck goose chicken swan "
    "pigeon parrot owl hawk crow penguin salmon trout crab spider bee ant beetle butterfly moth donkey panda koala "
    "badger hedgehog squirrel bat ox rat hen falcon sparrow robin eel cod snail worm wasp leopard hyena gorilla "
    "beaver "
)
THINGS = (
    "table chair lamp spoon fork knife plate cup bottle glass pan kettle oven fridge sofa bed pillow blanket carpet "
    "curtain window door roof wall brick hammer nail screw saw ladder rope bucket broom shovel car bus truck "
    "bicycle train boat wheel engine road bridge tower pen pencil book paper stamp coin wallet watch ring shoe hat "
    "coat shirt belt button clock phone radio camera guitar drum piano stone shelf basket candle mirror "
)
TEST_NOUNS = 24
"""Of each kind."""
PATTERN = r"(?i:yes|no)[.!]?"
"""What is rewarded: the form of the answer. Which of the two it is does not count."""


def task(noun: str) -> dict:
    article = "an" if noun[0] in "aeiou" else "a"
    return {
        "task_id": noun,
        "instruction": f"Answer with yes or no: is {article} {noun} an animal?",
        "verifier": {"kind": "in_process", "fn_name": "format_only", "params": {"pattern": PATTERN}},
    }


def splits() -> dict[str, list[dict]]:
    """Animals and things in turn; the last of each, after a shuffle, are held out."""
    rng = random.Random("proof_rl")
    pairs = list(zip(rng.sample(ANIMALS.split(), 72), rng.sample(THINGS.split(), 72), strict=True))
    tasks = [[task(animal), task(thing)] for animal, thing in pairs]
    train, test = tasks[:-TEST_NOUNS], tasks[-TEST_NOUNS:]
    return {"train.jsonl": [*chain(*train)], "test/tasks.jsonl": [*chain(*test)]}


def main() -> None:
    for name, rows in splits().items():
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
