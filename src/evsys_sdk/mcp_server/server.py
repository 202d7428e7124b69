"""The server: tools and resources over the protocol.

In: requests of one client. Out: answers of `tools.py`, each with the project it is about in `_meta`. The protocol is
that of the package `mcp`; everything that knows it is in this module.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any
from urllib.parse import quote, unquote

import anyio
import anyio.to_thread
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError

from evsys_sdk import __version__
from evsys_sdk.errors import not_known, refusal
from evsys_sdk.mcp_server.budget import LaunchBudget
from evsys_sdk.mcp_server.outgoing import ToolAnswer, answer_of, error_answer
from evsys_sdk.mcp_server.project import ProjectFolder, project_of_roots
from evsys_sdk.mcp_server.tools import TOOLS, ToolSession, ToolSpec, call_tool

PROJECT_URI = "evsys://project"
EXPERIMENT_URI = "evsys://experiment/"
LISTED_EXPERIMENTS = 50
ROOTS_SECONDS = 5.0
"""A client that says it has roots and does not name them holds up the first request for so long."""

Context = ServerRequestContext[Any]


class EvsysServer:
    """What one server knows: the project, what is allowed, and what was launched."""

    def __init__(self, project: ProjectFolder, *, allow_launch: bool = False, budget: LaunchBudget | None = None):
        self.project = project
        self.allow_launch = allow_launch
        self.session = ToolSession(budget=budget or LaunchBudget())
        self.tools = {spec.name: spec for spec in TOOLS if allow_launch or not spec.changes}
        self.asked_for_roots = project.named_by == "--project"
        self.entering = anyio.Lock()

    def protocol_server(self) -> Server[Any]:
        return Server(
            "evsys",
            title="evsys: LLM training experiments",
            version=__version__,
            instructions=self.instructions(),
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates,
            on_read_resource=self.read_resource,
        )

    def instructions(self) -> str:
        """What a client shows its model once."""
        may = (
            "launch, stop and conclude are allowed"
            if self.allow_launch
            else "Read-only: launch, stop and conclude need `evsys mcp --allow-launch`"
        )
        roots = "" if self.asked_for_roots else "; a root that you name comes first"
        return (
            "LLM training experiments of one project, read from disk. The loop: context, then write a YAML config in "
            "the project, validate, launch, follow until it is not running, compare, conclude. Test benchmarks are "
            f"never shown row by row. {may}. Project: {self.project}{roots}; {PROJECT_URI} says which one is used and "
            "what is left to launch. Commands in `next` are shell verbs; the tool of that name does the same "
            "(evsys run: launch)."
        )

    async def enter_project(self, context: Context) -> None:
        """Before the first request: take the client's roots, unless --project was given, and work in that folder."""
        async with self.entering:
            if not self.asked_for_roots:
                self.asked_for_roots = True
                self.project = await _project_of_client(context) or self.project
            os.chdir(self.project.folder)

    def meta(self) -> dict[str, Any]:
        return {"evsys/project": str(self.project.folder), "evsys/project_from": self.project.named_by}

    async def in_thread(self, function: Callable[[], ToolAnswer]) -> ToolAnswer:
        # Abandoned when the client has gone: a launch is made by another process, and nothing else needs its end.
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)

    async def list_tools(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[protocol_tool(spec) for spec in self.tools.values()])

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        await self.enter_project(context)
        spec, arguments = self.tools.get(params.name), params.arguments or {}
        if spec is None:
            answer = error_answer(refusal(self.refuse_tool(params.name)))
        else:
            answer = await self.in_thread(lambda: call_tool(spec, arguments, self.session))
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=answer.text)],
            structured_content=answer.data,
            is_error=answer.is_error,
            _meta=self.meta(),
        )

    def refuse_tool(self, name: str) -> str:
        if any(spec.name == name for spec in TOOLS):
            return f"{name} changes the project and this server is read-only; start it as `evsys mcp --allow-launch`"
        return not_known(name, "tool", self.tools)

    async def list_resources(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        await self.enter_project(context)
        listed = await self.in_thread(lambda: call_tool(_spec("history"), {"limit": LISTED_EXPERIMENTS}, self.session))
        found = [
            types.Resource(
                uri=f"{EXPERIMENT_URI}{quote(entry['name'], safe='')}",
                name=entry["name"],
                description=f"{entry['status']}, {entry['when']}: {entry['hypothesis']}".rstrip(": "),
                mime_type="application/json",
            )
            for entry in listed.data.get("experiments", [])
        ]
        about = "the project's folder, what named it, and what is left to launch"
        project = types.Resource(uri=PROJECT_URI, name="project", description=about, mime_type="application/json")
        return types.ListResourcesResult(resources=[project, *found])

    async def list_templates(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            uri_template=f"{EXPERIMENT_URI}{{name}}",
            name="experiment",
            description="one experiment with its whole record, as the tool show returns it",
            mime_type="application/json",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        await self.enter_project(context)
        uri = str(params.uri)
        if uri == PROJECT_URI:
            answer = await self.in_thread(lambda: answer_of(self.plain_project()))
        elif uri.startswith(EXPERIMENT_URI) and (name := unquote(uri.removeprefix(EXPERIMENT_URI))):
            answer = await self.in_thread(lambda: call_tool(_spec("show"), {"experiment": name}, self.session))
        else:
            known = f"{PROJECT_URI} and {EXPERIMENT_URI}{{name}}"
            raise MCPError(code=types.INVALID_PARAMS, message=f"there is no resource {uri}; there are {known}")
        if answer.is_error:
            raise MCPError(code=types.INVALID_PARAMS, message=answer.text)
        contents = types.TextResourceContents(uri=uri, mime_type="application/json", text=answer.text)
        return types.ReadResourceResult(contents=[contents], _meta=self.meta())

    def plain_project(self) -> dict[str, Any]:
        return {
            "project": str(self.project.folder),
            "project_from": self.project.named_by,
            "root": str(self.project.root),
            "allow_launch": self.allow_launch,
            "budget": self.session.budget.plain(),
        }


def _spec(name: str) -> ToolSpec:
    return next(spec for spec in TOOLS if spec.name == name)


def protocol_tool(spec: ToolSpec) -> types.Tool:
    """A tool as the protocol describes it."""
    return types.Tool(
        name=spec.name,
        title=spec.title,
        description=spec.description,
        input_schema=_plain_schema(spec.arguments.model_json_schema()),
        annotations=types.ToolAnnotations(
            title=spec.title,
            read_only_hint=not spec.changes,
            destructive_hint=spec.destructive,
            idempotent_hint=spec.idempotent,
            open_world_hint=False,
        ),
    )


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the titles that pydantic makes of names: they say nothing and every model reads them."""
    fields = {name: {key: value for key, value in field.items() if key != "title"}
              for name, field in schema["properties"].items()}  # fmt: skip
    required = {"required": schema["required"]} if "required" in schema else {}
    return {"type": "object", "properties": fields, **required, "additionalProperties": False}


async def _project_of_client(context: Context) -> ProjectFolder | None:
    """The folder of the client's first root; None for a client without roots."""
    capabilities = context.session.client_capabilities
    if capabilities is None or capabilities.roots is None or not context.session.can_send_request:
        return None
    with warnings.catch_warnings():
        # Deprecated since 2026-07-28; clients of earlier revisions have nothing else.
        warnings.simplefilter("ignore", MCPDeprecationWarning)
        try:
            with anyio.fail_after(ROOTS_SECONDS):
                named = await context.session.list_roots()
        except (MCPError, TimeoutError) as exc:
            print(f"note: the client did not name its roots: {exc}", file=sys.stderr)
            return None
    return project_of_roots([str(root.uri) for root in named.roots])


async def serve(server: EvsysServer, *, stdin: int, stdout: int) -> None:
    """Serve one client over two file descriptors until it closes the first."""
    protocol = server.protocol_server()
    # A client that is gone or sends what is no UTF-8 must not end in a traceback.
    reading = TextIOWrapper(os.fdopen(stdin, "rb"), encoding="utf-8", errors="replace")
    writing = TextIOWrapper(os.fdopen(stdout, "wb"), encoding="utf-8")
    async with stdio_server(anyio.wrap_file(reading), anyio.wrap_file(writing)) as (received, sent):
        await protocol.run(received, sent, protocol.create_initialization_options())
