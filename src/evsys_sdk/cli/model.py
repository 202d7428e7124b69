"""`evsys model`: which models are here, bring one here, look at one, hand a trained one to other programs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.data import format_size, print_json, print_table
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_engine.models import ModelCard, Shelved

NAME = "a built-in name, a local directory, a .gguf file, or a hub id (org/name)"


def add_parser(verbs: Any) -> None:
    about = "Models for `model.name`: built-in, local directory, .gguf file or hub id. Cache: $EVSYS_CACHE."
    parser = verbs.add_parser("model", help="models on this machine", description=about)
    inner = parser.add_subparsers(dest="model_verb", metavar="<model verb>", required=True)
    _verb(inner, "list", list_shelf, "built-in models and what is in the cache")
    pull = _verb(inner, "pull", pull_model, "fetch and convert a model, so that runs find it ready")
    info = _verb(inner, "info", show_model, "one model: size, vocabulary, context, memory to train it")
    for named in (pull, info):
        named.add_argument("name", help=NAME)
    export = _verb(inner, "export", export_weights, "a run's weights for other programs: PEFT, merged, GGUF")
    export.add_argument(
        "source", metavar="run", help="a run's directory, <experiment>/<run>, sampler weights, or a model"
    )
    export.add_argument(
        "--to", required=True, choices=("peft", "merged", "gguf"),
        help="the adapter; a whole Hugging Face model; one file for llama.cpp (llama, qwen2, qwen3)",
    )  # fmt: skip
    export.add_argument(
        "-o", "--output", metavar="PATH", help="where to write (default: ./<run>-<form> or ./<run>.gguf)"
    )
    export.add_argument(
        "--checkpoint", default="final", metavar="REF", help="final (the default) or step-N; also as <run>@step-N"
    )
    export.add_argument(
        "--type", dest="number_type", default="f16", choices=("f32", "f16", "bf16", "q8_0"),
        help="of the numbers in a GGUF file (default: f16)",
    )  # fmt: skip


def _verb(inner: Any, name: str, act: Any, text: str) -> Any:
    parser = inner.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=act)
    return parser


@contextmanager
def engine_errors() -> Iterator[None]:
    """What the engine refuses is a message to the user, not a traceback."""
    from evsys_engine.types import EngineError
    from evsys_sdk.errors import EvsysError

    try:
        yield
    except EngineError as exc:
        raise EvsysError(str(exc)) from exc


def list_shelf(args: argparse.Namespace) -> int:
    from evsys_engine.models import list_models
    from evsys_engine.models.cache import cache_folder

    found = list_models()
    if args.json:
        print_json({"cache": str(cache_folder()), "models": [asdict(model) for model in found]})
        return EXIT_OK
    print_table(["name", "source", "state", "size", "about"], [_cells(model) for model in found])
    print(f"cache: {cache_folder()}")
    return EXIT_OK


def pull_model(args: argparse.Namespace) -> int:
    from evsys_engine.models import describe_model, find_model

    begin = time.perf_counter()
    with engine_errors():
        card = describe_model(find_model(args.name, say=lambda line: print(line, file=sys.stderr)))
    seconds = time.perf_counter() - begin
    if args.json:
        print_json({**asdict(card), "seconds": round(seconds, 1)})
    else:
        print(f"{card.name}: ready, {format_size(card.disk_bytes)} at {card.path} ({seconds:.1f} s)")
    return EXIT_OK


def show_model(args: argparse.Namespace) -> int:
    from evsys_engine.models import describe_model, find_model

    with engine_errors():
        card = describe_model(find_model(args.name, fetch=False))
    if args.json:
        print_json(asdict(card))
    else:
        print_table([], [[label, text] for label, text in _lines(card)])
    return EXIT_OK


def export_weights(args: argparse.Namespace) -> int:
    from pathlib import Path

    from evsys_sdk.running.exporting import export_run

    out = Path(args.output) if args.output else None
    done = export_run(args.source, args.to, out, checkpoint=args.checkpoint, number_type=args.number_type)
    if args.json:
        print_json(asdict(done))
    else:
        print(f"{done.path}: {format_size(done.bytes)}, {done.form} of {done.checkpoint or done.base_model}")
    return EXIT_OK


def _cells(model: Shelved) -> list[str]:
    size = format_size(model.disk_bytes) if model.disk_bytes else ""
    if model.download_bytes:
        size = f"{format_size(model.download_bytes)} to fetch"
    return [model.name, model.source, model.state, size, model.about]


def _lines(card: ModelCard) -> Iterator[tuple[str, str]]:
    yield "name", f"{card.name} ({card.source})"
    yield "architecture", f"{card.architecture}, {_number(card.layers)} layers, hidden {_number(card.hidden_size)}"
    yield "parameters", _number(card.parameters)
    yield "vocabulary", _number(card.vocab_size)
    yield "context", f"{_number(card.context_length)} tokens"
    yield "chat template", "yes" if card.chat_template else "no"
    yield "memory to train", _memory(card)
    yield "disk", format_size(card.disk_bytes)
    yield "path", str(card.path)
    if card.sha256:
        yield "made from", f"GGUF sha256 {card.sha256}"


def _memory(card: ModelCard) -> str:
    if card.lora_bytes is None or card.full_bytes is None:
        return "unknown"
    lora, full = format_size(card.lora_bytes), format_size(card.full_bytes)
    return f"about {lora} with an adapter, {full} for all weights (fp32, 512 tokens at a time)"


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
