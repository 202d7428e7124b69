"""`evsys serve`: talk to a model, or to what a run made of it, through an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.constants import EXIT_OK, RUN_RESULT_FILE

if TYPE_CHECKING:
    from evsys_sdk.serving import Endpoint, Running

DEFAULT_BACKEND = "local"
TINKER = "tinker://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to be served, and where it lives."""

    name: str
    """What callers send as `model`."""
    model: str
    """The base model."""
    backend: str
    backend_params: dict[str, Any] = field(default_factory=dict)
    renderer_name: str | None = None
    checkpoint: str | None = None
    """Sampler weights; None serves the base model as it is."""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "serve",
        help="a model or a checkpoint as an OpenAI-compatible endpoint",
        description="Serve a model, or the weights a run ended with, to anything that speaks OpenAI's chat protocol, "
        "until Ctrl-C or SIGTERM.",
    )
    parser.add_argument("target", help="a run's directory, sampler weights (a run's final_sampler), or a model's name")
    parser.add_argument("--backend", help=f"where the model runs: local, mock, tinker (default: {DEFAULT_BACKEND})")
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
    import tempfile

    from evsys_sdk import registry
    from evsys_sdk.config.models import ModelConfig
    from evsys_sdk.serving import Address, serve

    address = Address(host=args.host, port=args.port, key=_key(args.api_key_env, os.environ))
    address.check()  # before minutes go into loading a model
    target = find_target(args)
    backend = registry.backends.build(target.backend, target.backend_params)
    model = ModelConfig(name=target.model, renderer_name=target.renderer_name)
    with tempfile.TemporaryDirectory(prefix="evsys-serve-") as folder:
        handles = backend.prepare(model=model, run_dir=Path(folder))
        try:
            serve(lambda: _endpoint(target, model, handles), address, on_ready=lambda at: _tell(args, target, at))
        finally:
            backend.teardown(handles)
    return EXIT_OK


def _key(variable: str | None, environ: Mapping[str, str]) -> str | None:
    from evsys_sdk.errors import EvsysError

    if variable is None:
        return None
    if not environ.get(variable):
        raise EvsysError(f"--api-key-env {variable}: that variable is not set; set it to the key callers must send")
    return environ[variable]


async def _endpoint(target: Target, model: Any, handles: dict[str, Any]) -> Endpoint:
    from evsys_sdk.errors import BackendError
    from evsys_sdk.serving import Endpoint, ServedModel
    from evsys_sdk.training.render import renderer_for

    service = handles.get("service")
    if service is None:
        raise BackendError(f"backend {target.backend!r} offers no training service to sample from")
    sampler = await service.create_sampling_client(target.checkpoint)
    renderer = renderer_for(model, service.get_tokenizer(), target.backend)
    info = getattr(getattr(service, "engine", None), "info", None)  # only the local backend has the model itself
    served = ServedModel(sampler=sampler, renderer=renderer, context_length=getattr(info, "max_length", None))
    return Endpoint({target.name: served})


def find_target(args: argparse.Namespace) -> Target:
    """What the words on the command line mean."""
    text, path = args.target, Path(args.target)
    run_dir = next((folder for folder in _around(path) if (folder / RUN_RESULT_FILE).is_file()), None)
    if args.model is not None:
        checkpoint = str(path.absolute()) if path.exists() else text
        return _given(args, args.model, name=args.name or args.model, checkpoint=checkpoint)
    if run_dir is not None:
        return _from_run(args, run_dir, None if run_dir == path.absolute() else str(path.absolute()))
    _refuse(path, text)
    return _given(args, text, name=args.name or path.name, checkpoint=None)


def _around(path: Path) -> list[Path]:
    """The path and the folders it lies in, as far up as a run's weights lie below their run."""
    return [path.absolute(), *path.absolute().parents[:3]] if path.exists() else []


def _refuse(path: Path, text: str) -> None:
    """Refuse what is neither a run, nor weights of one, nor a model."""
    from evsys_sdk.errors import EvsysError

    if text.startswith(TINKER):
        raise EvsysError(f"{text}: say which model these weights belong to, with --model")
    runs = sorted(str(found.parent) for found in path.glob(f"*/{RUN_RESULT_FILE}"))
    if runs:
        raise EvsysError(f"{text} is an experiment; serve one of its runs: {', '.join(runs)}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise EvsysError(
            f"{text} is neither a run (it has no {RUN_RESULT_FILE}) nor a model (it has no config.json); for weights "
            "that were moved out of their run, name the base model with --model"
        )
    if not path.exists() and text.startswith(("/", ".", "~")):
        raise EvsysError(f"{text}: there is nothing")


def _given(args: argparse.Namespace, model: str, *, name: str, checkpoint: str | None) -> Target:
    backend = args.backend or ("tinker" if (checkpoint or "").startswith(TINKER) else DEFAULT_BACKEND)
    return Target(name=name, model=model, backend=backend, backend_params=_params(args), checkpoint=checkpoint)


def _from_run(args: argparse.Namespace, run_dir: Path, checkpoint: str | None) -> Target:
    """The weights of a run, on the backend and with the base model that its record names."""
    from evsys_sdk.config.models import BackendConfig, ModelConfig
    from evsys_sdk.errors import EvsysError, blame

    with blame(EvsysError, f"reading {run_dir / RUN_RESULT_FILE}"):
        record = json.loads((run_dir / RUN_RESULT_FILE).read_text())
        model = ModelConfig(**record["hparams"]["model"])
        backend = BackendConfig(**record["hparams"].get("backend", {}))
        checkpoint = checkpoint or record["artifacts"].get("final_sampler")
    if checkpoint is None:
        raise EvsysError(f"{run_dir}: this run ({record['status']}) left no weights to sample from (final_sampler)")
    if args.backend not in (None, backend.kind):
        raise EvsysError(f"these weights were made on backend {backend.kind!r} and cannot move to {args.backend!r}")
    return Target(
        name=args.name or record["run"],
        model=model.name,
        backend=backend.kind,
        backend_params={**backend.params, **_params(args)},
        renderer_name=model.renderer_name,
        checkpoint=checkpoint,
    )


def _params(args: argparse.Namespace) -> dict[str, Any]:
    from evsys_sdk.config.document import parse_value
    from evsys_sdk.errors import EvsysError

    pairs = [text.partition("=") for text in args.params]
    wrong = next(("".join(pair) for pair in pairs if not pair[1]), None)
    if wrong is not None:
        raise EvsysError(f"--set takes param=value, e.g. --set device=cpu; got {wrong!r}")
    return {key: parse_value(value) for key, _, value in pairs}


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
