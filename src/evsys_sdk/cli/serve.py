"""`evsys serve`: talk to a model, or to what a run made of it, through an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.flags import parse_params
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.running.opening import OpenModel, Target
    from evsys_sdk.serving import Endpoint, Running


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "serve",
        help="a model or a checkpoint as an OpenAI-compatible endpoint",
        description="Serve a model, or the weights a run ended with, to anything that speaks OpenAI's chat protocol, "
        "until Ctrl-C or SIGTERM.",
    )
    parser.add_argument(
        "target",
        help="a run's directory, a checkpoint (<run>@final, <run>@step-12), sampler weights, or a model's name",
    )
    parser.add_argument("--backend", help="where the model runs: local, mock, tinker (default: local)")
    parser.add_argument("--model", help="the base model of weights that do not lie in their run's directory")
    parser.add_argument("--name", help="what callers send as `model` (default: the run's or the model's name)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; beyond this machine a key is needed")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes any free one and prints it")
    parser.add_argument("--api-key-env", metavar="VAR", help="environment variable with the key that callers must send")
    parser.add_argument(
        "--set", dest="params", action="append", default=[], metavar="PARAM=VALUE", help="a backend param"
    )
    parser.add_argument("--json", action="store_true", help="print the address as JSON")
    parser.set_defaults(run=serve_model)


def serve_model(args: argparse.Namespace) -> int:
    from evsys_sdk.running.opening import open_model
    from evsys_sdk.serving import Address, serve

    address = Address(host=args.host, port=args.port, key=_key(args.api_key_env, os.environ))
    address.check()  # before minutes go into loading a model
    target = find_target(args)
    with open_model(target) as model:
        serve(lambda: _endpoint(model), address, on_ready=lambda at: _tell(args, target, at))
    return EXIT_OK


def _key(variable: str | None, environ: Mapping[str, str]) -> str | None:
    from evsys_sdk.errors import EvsysError

    if variable is None:
        return None
    if not environ.get(variable):
        raise EvsysError(f"--api-key-env {variable}: that variable is not set; set it to the key callers must send")
    return environ[variable]


async def _endpoint(model: OpenModel) -> Endpoint:
    from evsys_sdk.serving import Endpoint, ServedModel

    served = ServedModel(sampler=await model.sampler(), renderer=model.renderer(), context_length=model.context_length)
    return Endpoint({model.target.name: served})


def find_target(args: argparse.Namespace) -> Target:
    """What the words on the command line mean."""
    from evsys_sdk.running import opening

    params = parse_params(args.params)
    wish = opening.Wish(text=args.target, backend=args.backend, base_model=args.model, name=args.name, params=params)
    return opening.find_target(wish)


def _tell(args: argparse.Namespace, target: Target, at: Running) -> None:
    if args.json:
        told = {
            "url": at.url,
            "base_url": at.base_url(),
            "model": target.name,
            "base_model": target.model,
            "backend": target.backend,
            "checkpoint": target.checkpoint,
            "key": args.api_key_env,
        }
        print(json.dumps(told))
    else:
        of = f" ({target.checkpoint})" if target.checkpoint else ""
        print(f"serving {target.name}{of} on {at.base_url()}\ntry: {_curl(args, target, at)}")
    sys.stdout.flush()


def _curl(args: argparse.Namespace, target: Target, at: Running) -> str:
    body = {"model": target.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    key = f' -H "Authorization: Bearer ${args.api_key_env}"' if args.api_key_env else ""
    return f"curl {at.base_url()}/chat/completions -H 'Content-Type: application/json'{key} -d " + shlex.quote(
        json.dumps(body)
    )
