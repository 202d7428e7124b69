"""`evsys engine serve`: the local engine as a server for code written for Tinker."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from evsys_sdk.constants import EXIT_OK

KEY_VARIABLE = "EVSYS_ENGINE_KEY"


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("engine", help="the local engine as a server", description="The local training engine.")
    inner = parser.add_subparsers(dest="engine_verb", metavar="<engine verb>", required=True)
    serve = inner.add_parser(
        "serve",
        help="speak the Tinker protocol over HTTP",
        description="Serve a model to tinker.ServiceClient(base_url=..., api_key='tml-local') until Ctrl-C or SIGTERM.",
    )
    serve.add_argument("--model", required=True, help="a built-in name, a directory, a .gguf file or a hub id")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen; beyond this machine a key is needed")
    serve.add_argument("--port", type=int, default=0, help="0 (the default) takes any free one and prints it")
    serve.add_argument("--key", help=f"what clients must send as api_key, tml-...; safer as ${KEY_VARIABLE}")
    serve.add_argument("--checkpoints", type=Path, default=Path(".evsys/engine"), help="where saved weights are kept")
    serve.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU if there is one")
    serve.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    serve.add_argument("--threads", type=int, help="CPU threads of torch")
    serve.add_argument("--json", action="store_true", help="print the address as JSON")
    serve.set_defaults(run=serve_engine)


def serve_engine(args: argparse.Namespace) -> int:
    from evsys_sdk.errors import EvsysError, need

    need("torch", extra="local")
    need("uvicorn", extra="local")
    from evsys_engine.types import EngineError

    try:
        stopped_in_time = _serve(args)
    except EngineError as exc:
        raise EvsysError(str(exc)) from exc
    if not stopped_in_time:  # a call of the engine is still running, and nobody is left to want its result
        sys.stdout.flush()
        os._exit(EXIT_OK)
    return EXIT_OK


def _serve(args: argparse.Namespace) -> bool:
    from evsys_engine.server import Address, serve

    address = Address(host=args.host, port=args.port, key=args.key or os.environ.get(KEY_VARIABLE) or None)
    address.check()  # before minutes go into loading a model
    engine = _load(args)
    return serve(engine, args.checkpoints, address, on_ready=lambda url: _tell(args, url, address.key is not None))


def _load(args: argparse.Namespace) -> Any:
    from evsys_engine.engine import Engine
    from evsys_engine.models import find_model

    folder = find_model(args.model, say=lambda line: print(line, file=sys.stderr))
    return Engine.load(folder.path, name=args.model, device=args.device, dtype=args.dtype, threads=args.threads)


def _tell(args: argparse.Namespace, url: str, needs_key: bool) -> None:
    if args.json:
        from evsys_sdk.atomic import to_json

        print(to_json({"url": url, "model": args.model, "checkpoints": str(args.checkpoints), "key": needs_key}))
    else:
        print(f"serving {args.model} on {url}, checkpoints in {args.checkpoints}{', key needed' if needs_key else ''}")
    sys.stdout.flush()
