"""Make the rows of the SDFT proof: two skills to learn one after the other, and how to follow a demonstration.

Out: `data/follow.jsonl` (any question, with an answer shown: give that answer), `data/tools/` and `data/moods/`, each
with `train.jsonl` and `test/tasks.jsonl`. Test sentences have their own wordings and words. Running it gives the
committed files again, byte for byte.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent / "data"
SHOWN = "{question}\nA good answer:\n{demonstration}\nNow you."
"""The same words as `demonstration_template` in two_stages.yaml."""

TOOLS = {
    "mail": {
        "train": ["Write to {who} about {topic}", "Send {who} an email on {topic}", "Forward the letter to {who}"],
        "test": ["Reply to {who} about {topic}", "Answer the letter from {who}"],
    },
    "calendar": {
        "train": ["Put {event} on {day}", "Schedule {event} for {day}", "Am I free on {day}?"],
        "test": ["Move {event} to {day}", "Block {day} for {event}"],
    },
    "weather": {
        "train": ["Will it rain in {city} on {day}?", "How warm is it in {city}?", "Is it windy in {city}?"],
        "test": ["Do I need an umbrella in {city}?", "Does {city} get snow on {day}?"],
    },
    "music": {
        "train": ["Play some {genre}", "Turn up the {genre}", "Add {genre} to my playlist"],
        "test": ["Put on a {genre} song", "Shuffle my {genre} playlist"],
    },
}
WORDS = {
    "train": {
        "who": ["Ada", "Sam", "Noor"],
        "topic": ["the budget", "the new office", "the price list"],
        "event": ["the dentist", "the team lunch", "the review"],
        "day": ["Monday", "Tuesday", "Friday"],
        "city": ["Oslo", "Lima", "Cairo", "Boston"],
        "genre": ["jazz", "techno", "rock", "piano"],
    },
    "test": {
        "who": ["Igor", "Zoe", "Hana"],
        "topic": ["the survey", "the lease", "the loan"],
        "event": ["the haircut", "yoga", "the exam"],
        "day": ["Thursday", "Sunday"],
        "city": ["Paris", "Seoul", "Denver", "Tokyo"],
        "genre": ["blues", "salsa", "folk", "opera", "reggae"],
    },
}
MOODS = {
    "happy": {
        "train": ["great", "lovely", "delicious", "friendly", "perfect", "wonderful", "charming", "superb"],
        "test": ["excellent", "fantastic", "beautiful", "amazing"],
    },
    "sad": {
        "train": ["terrible", "awful", "dirty", "rude", "broken", "disgusting", "horrible", "cold"],
        "test": ["bad", "ugly", "nasty", "poor"],
    },
}
ABOUT = {
    "train": ["The food was {word}", "What a {word} hotel", "The staff was {word}", "This is a {word} phone"],
    "test": ["The room felt {word}", "My new bike is {word}", "It was a {word} film", "I find the soup {word}"],
}
ASKED = ["Colour of {thing}?", "Who made {thing}?", "Name of {thing}?", "Where is {thing}?", "Which one is {thing}?"]
THINGS = ["the house", "this car", "the river", "my cat", "that book", "the old tree", "a stone", "the bridge"]
SHOWN_WORDS = (
    "blue green yellow cold wood iron Maria Peter London Rome here third tall new gone old warm red seven south left "
    "Anna round below soft quick seldom twelve"
)
STYLES = ["{word}, it seems.", "{word}.", "{word}, I would say.", "{word}, no doubt.", "<answer>{word}</answer>"]


def tools(split: str, count: int) -> list[tuple[str, str]]:
    """`count` requests per tool."""
    rng, made = random.Random(f"tools {split}"), []
    for tool, wordings in TOOLS.items():
        choices = [dict(zip(WORDS[split], words, strict=True)) for words in product(*WORDS[split].values())]
        every = sorted({template.format(**choice) for template in wordings[split] for choice in choices})
        chosen = rng.sample(every, count)
        made.append([(f"Which tool? {request}", f"<answer>{tool}</answer>") for request in chosen])
    return [pair for turn in zip(*made, strict=True) for pair in turn]


def moods(split: str, count: int) -> list[tuple[str, str]]:
    """`count` remarks per mood."""
    rng, made = random.Random(f"moods {split}"), []
    for mood, words in MOODS.items():
        every = [template.format(word=word) for template in ABOUT[split] for word in words[split]]
        made.append([(f"What mood? {remark}.", f"{mood}, it seems.") for remark in rng.sample(every, count)])
    return [pair for turn in zip(*made, strict=True) for pair in turn]


def follow(count: int) -> list[tuple[str, str]]:
    """Questions with an answer shown, in any style: what is learnt is to give it, in a style of one's own."""
    rng = random.Random("follow")
    rows = []
    for _ in range(count):
        question = rng.choice(ASKED).format(thing=rng.choice(THINGS))
        word = rng.choice(SHOWN_WORDS.split())
        shown = rng.choice(STYLES).format(word=word)
        rows.append((SHOWN.format(question=question, demonstration=shown), f"<answer>{word}</answer>"))
    return rows


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(pairs: list[tuple[str, str]]) -> list[dict]:
    return [{"prompt": question, "completion": answer} for question, answer in pairs]


def tasks_of(skill: str, pairs: list[tuple[str, str]], words: Iterable[str]) -> list[dict]:
    """What counts is the word that the answer names, in whatever form: that one and none of the others."""
    tasks = []
    for number, (question, answer) in enumerate(pairs):
        (right,) = [word for word in words if word in answer]
        others = "|".join(word for word in words if word != right)
        verifier = {"kind": "in_process", "fn_name": "regex_match", "expected": rf"^(?!.*({others})).*{right}"}
        tasks.append({"task_id": f"{skill}-{number:03d}", "instruction": question, "verifier": verifier})
    return tasks


def main() -> None:
    write(HERE / "follow.jsonl", rows_of(follow(200)))
    # The first stage practises following too: without, it would make the model answer with a tool whatever it is shown.
    write(HERE / "tools/train.jsonl", rows_of(tools("train", 12) + follow(232)[200:]))
    write(HERE / "tools/test/tasks.jsonl", tasks_of("tools", tools("test", 10), TOOLS))
    write(HERE / "moods/train.jsonl", rows_of(moods("train", 24)))
    write(HERE / "moods/test/tasks.jsonl", tasks_of("moods", moods("test", 16), MOODS))


if __name__ == "__main__":
    main()
