"""Make the quickstart's rows: which tool does this request need?

Out: `data/train.jsonl`, `data/val/tasks.jsonl`, `data/test/tasks.jsonl`. Each split has its own wordings and words,
so an evaluation request is never a training request with a word changed. Running it gives the committed files again,
byte for byte.
"""

from __future__ import annotations

import json
import random
from itertools import product, zip_longest
from pathlib import Path
from string import Formatter

HERE = Path(__file__).parent / "data"
SPLITS = {"train": 36, "val": 8, "test": 8}
"""Requests per tool."""

TOOLS = {
    "mail": {
        "train": [
            "Write to {who} that {news}",
            "Send {who} an email about {topic}",
            "Reply to the message from {who} about {topic}",
            "Forward the letter on {topic} to {who}",
            "Let {who} know by email that {news}",
            "Draft an email: {news}",
        ],
        "val": ["Drop {who} a line by mail, {news}", "Answer {who}'s email on {topic}"],
        "test": [
            "Email {who} and say {news}",
            "I owe {who} a written reply concerning {topic}",
            "Has {who} answered my message about {topic} yet?",
            "My inbox is full of letters from {who}, clear it",
            "Compose a note for {who}: {news}",
            "Put {who} in copy when you answer on {topic}",
        ],
    },
    "calendar": {
        "train": [
            "Put {event} on {day} at {hour}",
            "Schedule {event} for {day}",
            "Move {event} to {day}, {hour}",
            "Book a slot on {day} for {event}",
            "Cancel {event} on {day}",
            "When am I free on {day}?",
        ],
        "val": ["Shift {event} from {day} to the week after", "Reserve {hour} on {day}, it is for {event}"],
        "test": [
            "Block {day} from {hour} onwards for {event}",
            "Which appointments do I have on {day}?",
            "Remind me of {event} on {day}",
            "Does {event} clash with anything on {day}?",
            "Push {event} back by an hour",
            "What does my {day} look like after {hour}?",
        ],
    },
    "files": {
        "train": [
            "Save {paper} in the {room} folder",
            "Upload {paper} to the drive",
            "Find {paper} on the drive",
            "Rename {paper} in the {room} folder",
            "Give {who} access to {paper}",
            "Delete the old copy of {paper}",
        ],
        "val": ["Where did {who} store {paper}?", "Copy {paper} into the folder of {room}"],
        "test": [
            "Download {paper} from the drive for {who}",
            "Make a folder called {room} and put {paper} there",
            "Who edited {paper} last?",
            "Convert {paper} to a PDF",
            "Restore yesterday's version of {paper}",
            "Is there a backup of {paper} somewhere?",
        ],
    },
    "weather": {
        "train": [
            "Will it rain in {city} on {day}?",
            "How warm is it in {city}?",
            "Do I need an umbrella in {city}?",
            "What is the forecast for {city} on {day}?",
            "Is it snowing in {city}?",
            "How windy will {city} be on {day}?",
        ],
        "val": ["Should I expect sun in {city} on {day}?", "What temperature does {city} have at {hour}?"],
        "test": [
            "Tell me if {city} gets a storm on {day}",
            "Is it going to be cold in {city} by {hour}?",
            "How hot does {city} get in summer?",
            "Can I leave my coat at home in {city}?",
            "Is there fog around {city} at {hour}?",
            "Any chance of hail in {city} on {day}?",
        ],
    },
    "maps": {
        "train": [
            "How do I get from {city} to {other}?",
            "Show the way to {place} in {city}",
            "How far is {city} from {other}?",
            "Find {place} near me",
            "What is the fastest route to {other}?",
            "Where is the nearest {place}?",
        ],
        "val": ["Is there {place} on the way to {city}?", "How long is the drive from {other} to {city}?"],
        "test": [
            "Give me directions to {place} in {city}",
            "Which road leads from {city} to {other}?",
            "Can I walk from {city} to {other} in a day?",
            "Guide me to {place} on foot",
            "Where exactly in {city} is {place}?",
            "How many miles lie between {city} and {other}?",
        ],
    },
    "music": {
        "train": [
            "Play something by {band}",
            "Add {band} to my playlist",
            "Skip this {genre} song",
            "Turn on some {genre}",
            "Play {genre} in the kitchen until {hour}",
            "What is the newest album of {band}?",
            "Turn up the {genre}",
        ],
        "val": ["Put on the best songs of {band}", "I feel like {genre} at {hour}, start a station"],
        "test": [
            "Shuffle the {genre} playlist at {hour}",
            "Repeat the last track of {band}",
            "I want to hear {band}",
            "Lower the volume of the {genre}",
            "Pause the song by {band}",
            "Which {genre} hits are popular right now?",
        ],
    },
}

WORDS = {
    "train": {
        "who": ["Ada", "Sam", "Noor", "Lin"],
        "news": ["the invoice is late", "the build is green", "lunch is at noon", "the contract is signed"],
        "topic": ["the budget", "the new office", "the holidays", "the price list"],
        "event": ["the dentist", "the team lunch", "a call with Ada", "the yearly review"],
        "day": ["Monday", "Tuesday", "Friday"],
        "hour": ["nine", "noon", "half past two"],
        "room": ["design", "sales", "random", "support"],
        "paper": ["the report", "my slides", "the signed contract", "the photo"],
        "city": ["Oslo", "Lima", "Cairo", "Boston"],
        "other": ["Bergen", "Cusco", "Aswan", "Salem"],
        "place": ["pharmacy", "the station", "the museum", "gas station"],
        "band": ["Queen", "Nina Simone", "Radiohead", "the Beatles"],
        "genre": ["jazz", "techno", "piano music", "rock"],
    },
    "val": {
        "who": ["Priya", "Tom", "Mei"],
        "news": ["the offer was accepted", "the server is back", "the tickets are sold out"],
        "topic": ["the audit", "the summer party", "the lease"],
        "event": ["the interview", "the gym", "a demo"],
        "day": ["Wednesday", "Saturday"],
        "hour": ["eight", "a quarter to five"],
        "room": ["legal", "research", "travel"],
        "paper": ["the spreadsheet", "the draft", "our logo"],
        "city": ["Rome", "Delhi", "Perth"],
        "other": ["Naples", "Agra", "Albany"],
        "place": ["a bakery", "a hotel", "a charger"],
        "band": ["Adele", "Miles Davis", "Daft Punk"],
        "genre": ["reggae", "folk", "opera"],
    },
    "test": {
        "who": ["Igor", "Zoe", "Hana"],
        "news": ["we won the bid", "the printer is fixed", "the shipment has arrived"],
        "topic": ["the insurance", "the workshop", "the survey"],
        "event": ["the haircut", "yoga", "the board meeting"],
        "day": ["Thursday", "Sunday"],
        "hour": ["ten", "six"],
        "room": ["finance", "welcome", "hiring"],
        "paper": ["the invoice", "the meeting notes", "her thesis"],
        "city": ["Paris", "Seoul", "Denver"],
        "other": ["Lyon", "Busan", "Boulder"],
        "place": ["the library", "a parking lot", "the harbour"],
        "band": ["Bach", "Rihanna", "Metallica"],
        "genre": ["blues", "salsa", "hip hop"],
    },
}


def question(request: str) -> str:
    """The request as the model reads it: the tools are named, so that an untrained model could answer too."""
    names = list(TOOLS)
    choice = f"{', '.join(names[:-1])} or {names[-1]}"
    return f"{request}\nWhich tool is this for: {choice}? Answer as <answer>tool</answer>."


def requests(split: str) -> list[tuple[str, str, str]]:
    """Distinct requests, each with its template and the tool it needs, the tools in turn."""
    rng = random.Random(f"quickstart {split}")
    by_tool = {tool: _of_tool(wordings[split], WORDS[split], SPLITS[split], rng) for tool, wordings in TOOLS.items()}
    return [
        (request, template, tool)
        for row in zip(*by_tool.values(), strict=True)
        for (request, template), tool in zip(row, by_tool, strict=True)
    ]


def _of_tool(
    templates: list[str], words: dict[str, list[str]], count: int, rng: random.Random
) -> list[tuple[str, str]]:
    """`count` distinct requests, the templates in turn for as long as each has something new to say."""
    said = [rng.sample(every := _fillings(template, words), len(every)) for template in templates]
    turns = [
        (request, template)
        for turn in zip_longest(*said)
        for request, template in zip(turn, templates, strict=True)
        if request is not None
    ]
    return turns[:count]


def _fillings(template: str, words: dict[str, list[str]]) -> list[str]:
    holes = [hole for _, hole, _, _ in Formatter().parse(template) if hole]
    combinations = product(*(words[hole] for hole in holes))
    return [template.format(**dict(zip(holes, choice, strict=True))) for choice in combinations]


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    rows = [{"query": question(request), "tool_slug": tool} for request, _, tool in requests("train")]
    write(HERE / "train.jsonl", rows)
    for split in ("val", "test"):
        tasks = [
            {
                "task_id": f"{split}-{number:03d}",
                "instruction": question(request),
                "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": tool},
                "metadata": {"tool": tool, "template": template},
            }
            for number, (request, template, tool) in enumerate(requests(split))
        ]
        write(HERE / split / "tasks.jsonl", tasks)


if __name__ == "__main__":
    main()
