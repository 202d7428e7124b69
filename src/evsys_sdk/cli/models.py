"""`evsys model`, `engine`, `serve` and `backend`: models here, models as servers, and the backends that train them."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.options import group, json_option, listen_options, parse_params, set_option, verb
from evsys_sdk.cli.output import format_size, print_json, print_table
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.experiment.export import Form, NumberType
    from evsys_sdk.run.open_model import Target
    from evsys_sdk.serving import Endpoint, RunningEndpoint

NAME = "a built-in name, a local directory, a .gguf file, or a hub id (org/name)"
ENGINE_KEY_VARIABLE = "EVSYS_ENGINE_KEY"
SERVED = Path(".evsys/serve")
"""What servers with admin routes serve: a file for each name."""
CHECK_SECONDS = 20.0
"""How long `evsys backend check` waits for a server: a person waits for the answer, unlike in a run."""


@group("model")
def model() -> None:
    """Models for `model.name`: built-in, local directory, .gguf file or hub id. Cache: $EVSYS_CACHE."""


@contextmanager
def engine_errors() -> Iterator[None]:
    """What the engine refuses is a message to the user, not a traceback."""
    from evsys_engine.types import EngineError
    from evsys_sdk.errors import EvsysError

    try:
        yield
    except EngineError as exc:
        raise EvsysError(str(exc)) from exc


@model.command("list")
@json_option
def list_models(as_json: bool) -> int:
    """Built-in models and what is in the cache."""
    from evsys_engine.models import list_models
    from evsys_engine.models.cache import cache_folder

    found = list_models()
    if as_json:
        print_json({"cache": str(cache_folder()), "models": [asdict(model) for model in found]})
        return EXIT_OK
    rows = []
    for model in found:
        size = format_size(model.disk_bytes) if model.disk_bytes else ""
        size = f"{format_size(model.download_bytes)} to fetch" if model.download_bytes else size
        rows.append([model.name, model.source, model.state, size, model.about])
    print_table(["name", "source", "state", "size", "about"], rows)
    print(f"cache: {cache_folder()}")
    return EXIT_OK


@model.command("pull")
@click.argument("name", help=NAME)
@json_option
def pull_model(name: str, as_json: bool) -> int:
    """Fetch and convert a model, so that runs find it ready."""
    from evsys_engine.models import describe_model, find_model

    begin = time.perf_counter()
    with engine_errors():
        card = describe_model(find_model(name, say=lambda line: print(line, file=sys.stderr)))
    seconds = time.perf_counter() - begin
    if as_json:
        print_json({**asdict(card), "seconds": round(seconds, 1)})
    else:
        print(f"{card.name}: ready, {format_size(card.disk_bytes)} at {card.path} ({seconds:.1f} s)")
    return EXIT_OK


@model.command("info")
@click.argument("name", help=NAME)
@json_option
def show_model(name: str, as_json: bool) -> int:
    """One model: size, vocabulary, context, memory to train it."""
    from evsys_engine.models import describe_model, find_model

    with engine_errors():
        card = describe_model(find_model(name, fetch=False))
    if as_json:
        print_json(asdict(card))
        return EXIT_OK
    memory = "unknown"
    if card.lora_bytes is not None and card.full_bytes is not None:
        lora, full = format_size(card.lora_bytes), format_size(card.full_bytes)
        memory = f"about {lora} with an adapter, {full} for all weights (fp32, 512 tokens at a time)"
    rows = [
        ["name", f"{card.name} ({card.source})"],
        ["architecture", f"{card.architecture}, {_number(card.layers)} layers, hidden {_number(card.hidden_size)}"],
        ["parameters", _number(card.parameters)],
        ["vocabulary", _number(card.vocab_size)],
        ["context", f"{_number(card.context_length)} tokens"],
        ["chat template", "yes" if card.chat_template else "no"],
        ["memory to train", memory],
        ["disk", format_size(card.disk_bytes)],
        ["path", str(card.path)],
    ]
    print_table([], rows + ([["made from", f"GGUF sha256 {card.sha256}"]] if card.sha256 else []))
    return EXIT_OK


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


number_type_option = click.option(
    "--type",
    "number_type",
    default="f16",
    type=click.Choice(["f32", "f16", "bf16", "q8_0"]),
    help="of the numbers in a GGUF file (default: f16)",
)


@model.command("export")
@click.argument("source", metavar="RUN", help="a run's directory or name, <run>@step-12, sampler weights, or a model")
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(["peft", "merged", "gguf"]),
    help="the adapter; a whole Hugging Face model; one file for llama.cpp (llama, qwen2, qwen3)",
)
@click.option("-o", "--output", metavar="PATH", help="where to write (default: ./<run>-<form> or ./<run>.gguf)")
@click.option(
    "--checkpoint", default="final", metavar="REF", help="final (the default), latest or step-N; also as <run>@step-N"
)
@number_type_option
@json_option
def export(source: str, form: Form, output: str | None, checkpoint: str, number_type: NumberType, as_json: bool) -> int:
    """A run's weights for other programs: PEFT, merged, GGUF."""
    from evsys_sdk.experiment.export import export_run

    out = Path(output) if output else None
    done = export_run(source, form, out, checkpoint=checkpoint, number_type=number_type)
    if as_json:
        print_json(asdict(done))
    else:
        print(f"{done.path}: {format_size(done.bytes)}, {done.form} of {done.checkpoint or done.base_model}")
    return EXIT_OK


@group("engine")
def engine() -> None:
    """The local training engine."""


@engine.command("serve")
@click.option("--model", required=True, help="a built-in name, a directory, a .gguf file or a hub id")
@listen_options
@click.option("--key", help=f"what clients must send as api_key, tml-...; safer as ${ENGINE_KEY_VARIABLE}")
@click.option("--checkpoints", type=Path, default=Path(".evsys/engine"), help="where saved weights are kept")
@click.option("--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU if there is one")
@click.option("--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16"]))
@click.option("--threads", type=int, help="CPU threads of torch")
@json_option
def serve_engine(
    model: str, host: str, port: int, key: str | None, checkpoints: Path, device: str, dtype: str,
    threads: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Speak the Tinker protocol over HTTP. Serves a model to tinker.ServiceClient(base_url=..., api_key='tml-local')
    until Ctrl-C or SIGTERM."""
    from evsys_sdk.errors import need
    from evsys_sdk.files import to_json
    from evsys_sdk.redaction import add_secrets

    need("torch", extra="local")
    need("uvicorn", extra="local")
    from evsys_engine.engine import Engine
    from evsys_engine.models import find_model
    from evsys_engine.server import ServerAddress, serve

    address = ServerAddress(host=host, port=port, key=key or os.environ.get(ENGINE_KEY_VARIABLE) or None)
    add_secrets([address.key])

    def announce(url: str) -> None:
        needs_key = address.key is not None
        if as_json:
            print(to_json({"url": url, "model": model, "checkpoints": str(checkpoints), "key": needs_key}))
        else:
            print(f"serving {model} on {url}, checkpoints in {checkpoints}{', key needed' if needs_key else ''}")
        sys.stdout.flush()

    with engine_errors():
        address.check()  # before minutes go into loading a model
        folder = find_model(model, say=lambda line: print(line, file=sys.stderr))
        loaded = Engine.load(folder.path, name=model, device=device, dtype=dtype, threads=threads)
        stopped_in_time = serve(loaded, checkpoints, address, on_ready=announce)
    if not stopped_in_time:  # a call of the engine is still running, and no client waits for its result
        sys.stdout.flush()
        os._exit(EXIT_OK)
    return EXIT_OK


@verb("serve")
@click.argument(
    "target",
    help="a run's directory or name, a checkpoint (<run>@final, <run>@step-12), sampler weights, or a model's name",
)
@click.option("--backend", help="where the model runs: local, mock, tinker (default: local)")
@click.option("--model", help="the base model of weights that do not lie in their run's directory")
@click.option("--name", help="what callers send as `model` (default: the run's or the model's name)")
@listen_options
@click.option("--api-key-env", metavar="VAR", help="environment variable with the key that callers must send")
@click.option(
    "--admin-key-env", metavar="VAR", help="environment variable with the key of /admin/, through which evsys deploy "
    "changes the weights"
)  # fmt: skip
@set_option
@json_option
def serve(
    target: str, backend: str | None, model: str | None, name: str | None, host: str, port: int,
    api_key_env: str | None, admin_key_env: str | None, params: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Serve a model, or the weights a run ended with, to anything that speaks OpenAI's chat protocol, until Ctrl-C or
    SIGTERM."""
    import asyncio
    from contextlib import nullcontext
    from dataclasses import replace
    from urllib.parse import quote

    from evsys_sdk.errors import EvsysError
    from evsys_sdk.experiment.deployment import NAME_DIGITS, digest_weights
    from evsys_sdk.redaction import add_secrets
    from evsys_sdk.run.open_model import ModelRef, find_target, open_model
    from evsys_sdk.serving import Endpoint, ListenAddress, ModelAdmin, ServedModel, StoredModel
    from evsys_sdk.serving import serve as serve_endpoint

    def key_in(flag: str, variable: str | None) -> str | None:
        if variable is None:
            return None
        found = os.environ.get(variable)
        if not found:
            raise EvsysError(f"{flag} {variable}: that variable is not set; set it to the key callers must send")
        add_secrets([found])
        return found

    key, admin_key = key_in("--api-key-env", api_key_env), key_in("--admin-key-env", admin_key_env)
    address = ListenAddress(host=host, port=port, key=key)
    address.check()  # before minutes go into loading a model
    ref = ModelRef(text=target, backend=backend, base_model=model, name=name, params=parse_params(params))
    weights = find_target(ref)
    state_file = SERVED / f"{quote(weights.name, safe='')}.json"
    with open_model(weights) as opened:

        async def load(checkpoint: str | None) -> ServedModel:
            return ServedModel(
                sampler=await opened.service.create_sampling_client(checkpoint),
                renderer=opened.renderer(),
                context_length=opened.context_length,
                digest=await asyncio.to_thread(digest_weights, replace(weights, checkpoint=checkpoint)),
            )

        async def endpoint() -> Endpoint:
            if admin_key is None:
                return Endpoint({weights.name: await load(weights.checkpoint)})
            # The weights have their own name, so that the alias can leave them and they can be unloaded.
            digest = await asyncio.to_thread(digest_weights, weights)
            first = StoredModel(name=f"{weights.name}-{digest[:NAME_DIGITS]}", path=weights.checkpoint, digest=digest)
            admin = ModelAdmin(key=admin_key, base_model=weights.model, load=load, first=first, state_file=state_file)
            models, aliases = await admin.restore(weights.name)
            return Endpoint(models, aliases=aliases, admin=admin)

        with nullcontext() if admin_key is None else hold_state(state_file):
            serve_endpoint(endpoint, address, on_ready=lambda at: announce(at, weights, api_key_env, as_json=as_json))
    return EXIT_OK


@contextmanager
def hold_state(file: Path) -> Iterator[None]:
    """Keep what is served under a name to one server."""
    from evsys_sdk.errors import EvsysError, RunLocked
    from evsys_sdk.files import make_folder
    from evsys_sdk.record.layout import hold

    make_folder(file.parent)
    lock, what = file.with_suffix(".lock"), f"{file}, which says what is served,"
    try:
        with hold(lock, what):
            yield
    except RunLocked as exc:
        raise EvsysError(f"{str(exc).split(';')[0]}; give this server another --name") from exc


def announce(at: RunningEndpoint, target: Target, key_variable: str | None, *, as_json: bool) -> None:
    """Print where the endpoint listens, and a curl command that tries it."""
    from evsys_sdk.errors import shorten

    if as_json:
        address = {
            "url": at.url,
            "base_url": at.base_url(),
            "model": target.name,
            "base_model": target.model,
            "backend": target.backend,
            "checkpoint": target.checkpoint,
            "system_prompt": target.system_prompt,
            "key": key_variable,
        }
        print(json.dumps(address))
    else:
        of = f" ({target.checkpoint})" if target.checkpoint else ""
        body = {"model": target.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
        key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
        curl = f"curl {at.base_url()}/chat/completions -H 'Content-Type: application/json'{key}"
        print(f"serving {target.name}{of} on {at.base_url()}\ntry: {curl} -d {shlex.quote(json.dumps(body))}")
        if target.system_prompt:
            print(f"system prompt before every chat: {shorten(target.system_prompt, 200)}")
    sys.stdout.flush()


@group("backend")
def backend() -> None:
    """Look at training backends."""


@backend.command("check")
@click.argument("kind", help="the backend, e.g. mock")
@click.option("--model", default="tiny-random", help="the model to try it with (default: tiny-random)")
@click.option("--base-url", help="the server to try, for a backend that has one")
@set_option
@click.option("--sampler-path", help="weights that a check saved before the server was started again")
@json_option
def check_backend(
    kind: str, model: str, base_url: str | None, params: tuple[str, ...], sampler_path: str | None, as_json: bool
) -> int:
    """Run golden calls against a backend and print its capability card. Exit code 2 if one is wrong, 1 if the backend
    cannot be reached."""
    import tempfile

    from evsys_sdk import registry
    from evsys_sdk.backends.check import check_service
    from evsys_sdk.concurrency import run_async
    from evsys_sdk.config.schema import ModelConfig
    from evsys_sdk.errors import BackendError

    server = {} if base_url is None else {"base_url": base_url, "timeout_seconds": CHECK_SECONDS}
    tried = registry.backends.build(kind, server | parse_params(params, example="latency_ms=5"))
    with tempfile.TemporaryDirectory(prefix="evsys-check-") as folder:
        handles = tried.prepare(model=ModelConfig(name=model), run_dir=Path(folder))
        try:
            service = handles.get("service")
            if service is None:
                raise BackendError(f"backend {kind!r} offers no training service, so there is nothing to check")
            findings = run_async(check_service(service, sampler_path=sampler_path))
        finally:
            tried.teardown(handles)
    lacks = sorted({word for found in findings for word in found.lacks})
    if as_json:
        print_json({"backend": kind, "model": model, "findings": [asdict(f) for f in findings], "lacks": lacks})
    else:
        width = max(len(found.question) for found in findings)
        for found in findings:
            print(f"{'ok   ' if found.ok else 'WRONG'} {found.question:<{width}}  {found.detail}")
        if lacks and kind == "tinker":
            print(f"for the config: backend.params.lacks: [{', '.join(lacks)}]")
    return EXIT_OK if all(found.ok for found in findings) else EXIT_RUN_FAILED
