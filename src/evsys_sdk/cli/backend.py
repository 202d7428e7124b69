"""`evsys backend check`: what can this backend really do?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.backends.check import Finding


CHECK_SECONDS = 20.0


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("backend", help="try a backend", description="Look at training backends.")
    own = parser.add_subparsers(dest="backend_verb", metavar="<verb>", required=True)
    check = own.add_parser(
        "check",
        help="run golden calls and print what the backend can do",
        description="Run golden calls against a backend and print its capability card. Exit code 2 if one is wrong, "
        "1 if the backend cannot be reached.",
    )
    check.add_argument("kind", help="the backend, e.g. mock")
    check.add_argument("--model", default="tiny-random", help="the model to try it with (default: tiny-random)")
    check.add_argument("--base-url", help="the server to try, for a backend that has one")
    check.add_argument(
        "--set", dest="params", action="append", default=[], metavar="PARAM=VALUE", help="a backend param"
    )
    check.add_argument("--sampler-path", help="weights that a check saved before the server was started again")
    check.add_argument("--json", action="store_true", help="print as JSON")
    check.set_defaults(run=check_backend)


def check_backend(args: argparse.Namespace) -> int:
    import tempfile
    from pathlib import Path

    from evsys_sdk import registry
    from evsys_sdk.asyncs import run_async
    from evsys_sdk.backends.check import check_service
    from evsys_sdk.config.models import ModelConfig
    from evsys_sdk.errors import BackendError

    backend = registry.backends.build(args.kind, _params(args))
    with tempfile.TemporaryDirectory(prefix="evsys-check-") as folder:
        handles = backend.prepare(model=ModelConfig(name=args.model), run_dir=Path(folder))
        try:
            service = handles.get("service")
            if service is None:
                raise BackendError(f"backend {args.kind!r} offers no training service, so there is nothing to check")
            findings = run_async(check_service(service, sampler_path=args.sampler_path))
        finally:
            backend.teardown(handles)
    _print(args, findings)
    return EXIT_OK if all(found.ok for found in findings) else EXIT_RUN_FAILED


def _print(args: argparse.Namespace, findings: list[Finding]) -> None:
    from dataclasses import asdict

    from evsys_sdk.atomic import to_json

    lacks = sorted({word for found in findings for word in found.lacks})
    if args.json:
        card = {"backend": args.kind, "model": args.model, "findings": [asdict(f) for f in findings], "lacks": lacks}
        print(to_json(card, indent=2))
        return
    width = max(len(found.question) for found in findings)
    for found in findings:
        print(f"{'ok   ' if found.ok else 'WRONG'} {found.question:<{width}}  {found.detail}")
    if lacks and args.kind == "tinker":
        print(f"for the config: backend.params.lacks: [{', '.join(lacks)}]")


def _params(args: argparse.Namespace) -> dict[str, Any]:
    from evsys_sdk.config.document import parse_value
    from evsys_sdk.errors import EvsysError

    # A person waits for the answer: a server that is not there is not waited for as long as in a run.
    server = {"base_url": args.base_url, "timeout_seconds": CHECK_SECONDS}
    params: dict[str, Any] = {} if args.base_url is None else server
    for text in args.params:
        key, equals, value = text.partition("=")
        if not equals:
            raise EvsysError(f"--set takes param=value, e.g. --set latency_ms=5; got {text!r}")
        params[key] = parse_value(value)
    return params
