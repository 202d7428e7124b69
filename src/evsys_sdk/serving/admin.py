"""Change what an endpoint serves while it runs: load weights under a name, move an alias, unload.

In: requests under `/admin/`, with a key that callers of the models do not have. Out: JSON. Loading never touches what
answers; an alias moves in one step; a request that began on weights ends on them, and only then are they unloaded. What
is served is in a file before it is served, so that a server that was killed begins with it again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, ValidationError

from evsys_engine.http import HttpRequest, HttpResponse, json_response
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import make_folder, write_json
from evsys_sdk.logs import get_logger
from evsys_sdk.serving.request import ApiError

if TYPE_CHECKING:
    from evsys_sdk.serving.endpoint import Endpoint, ServedModel

PREFIX = "/admin/"
ROUTES = (
    "GET /admin/models, POST /admin/models {name, path, digest, base_model}, POST /admin/aliases {alias, name}, "
    "DELETE /admin/models/<name>"
)


class LoadRequest(BaseModel):
    """Weights to load."""

    model_config = ConfigDict(extra="forbid")

    name: str
    path: str
    """As the server sees it."""
    base_model: str
    digest: str


class AliasRequest(BaseModel):
    """Which weights an alias means from now on."""

    model_config = ConfigDict(extra="forbid")

    alias: str
    name: str


class StoredModel(BaseModel):
    """Weights that are served under a name."""

    name: str
    path: str | None
    """None is the base model as it is."""
    digest: str | None


class ServingState(BaseModel):
    """What an endpoint served last."""

    base_model: str
    started_with: StoredModel
    """The weights on its command line. With other ones it is another server, which begins anew."""
    models: list[StoredModel]
    aliases: dict[str, str]


@dataclass(slots=True, kw_only=True)
class ModelAdmin:
    """The admin routes of one endpoint."""

    key: str
    base_model: str
    load: Callable[[str | None], Awaitable[ServedModel]]
    """Opens sampler weights over the base model that is served, and computes their digest."""
    first: StoredModel
    """The weights on the command line."""
    state_file: Path
    _models: dict[str, StoredModel] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def restore(self, alias: str) -> tuple[dict[str, ServedModel], dict[str, str]]:
        """What was served when the server stopped, as models and aliases; at first the command line's weights."""
        state = self._read_state()
        if state is None:
            state = ServingState(
                base_model=self.base_model, started_with=self.first, models=[self.first],
                aliases={alias: self.first.name},
            )  # fmt: skip
        models: dict[str, ServedModel] = {}
        for stored in state.models:
            try:
                loaded = await self.load(stored.path)
                if loaded.digest != stored.digest:
                    raise EvsysError(f"the weights at {stored.path} have changed since")
            except (EvsysError, OSError) as exc:
                used = [name for name, known in state.aliases.items() if known == stored.name]
                if used:
                    raise EvsysError(
                        f"{', '.join(used)} was served by {stored.name}, which cannot be loaded again: {exc}. Put the "
                        f"weights back, or delete {self.state_file} to begin with those of the command line"
                    ) from exc
                get_logger(__name__).warning("%s is no longer served: %s", stored.name, exc)
                continue
            models[stored.name], self._models[stored.name] = loaded, stored
        return models, state.aliases

    def _read_state(self) -> ServingState | None:
        try:
            state = ServingState.model_validate_json(self.state_file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as exc:
            said = f"{self.state_file} says what was served here, and cannot be read; delete it to begin anew: {exc}"
            raise EvsysError(said) from exc
        asked = (self.base_model, self.first.digest)
        return state if (state.base_model, state.started_with.digest) == asked else None

    def _note(self, models: dict[str, StoredModel], aliases: dict[str, str]) -> None:
        """Write what is served from now on; a change that cannot be written is not made."""
        state = ServingState(
            base_model=self.base_model, started_with=self.first, models=list(models.values()), aliases=aliases
        )
        try:
            make_folder(self.state_file.parent)
            write_json(self.state_file, state.model_dump())
        except OSError as exc:
            raise ApiError(500, f"{self.state_file} cannot be written: {exc.strerror}; nothing was changed") from exc
        self._models = models

    async def answer(self, endpoint: Endpoint, request: HttpRequest) -> HttpResponse:
        route = f"{request.method} {request.path.rstrip('/')}"
        if route == "GET /admin/models":
            return self._state(endpoint)
        async with self._changing:  # one change at a time; callers of the models do not wait for it
            if route == "POST /admin/models":
                await self._load(endpoint, _read(LoadRequest, request.body))
            elif route == "POST /admin/aliases":
                wanted = _read(AliasRequest, request.body)
                if wanted.name not in endpoint.models:
                    raise ApiError(404, f"no model {wanted.name!r} is loaded; load it first", param="name")
                self._note(self._models, {**endpoint.aliases, wanted.alias: wanted.name})
                endpoint.aliases[wanted.alias] = wanted.name
            elif route.startswith("DELETE /admin/models/"):
                await self._unload(endpoint, unquote(route.removeprefix("DELETE /admin/models/")))
            else:
                raise ApiError(404, f"there is no {route}; there are {ROUTES}")
            return self._state(endpoint)

    async def _load(self, endpoint: Endpoint, wanted: LoadRequest) -> None:
        if wanted.base_model != self.base_model:
            raise ApiError(
                409,
                f"this server has the base model {self.base_model!r}, and the weights were trained over "
                f"{wanted.base_model!r}",
                param="base_model",
            )
        there = endpoint.models.get(wanted.name)
        if there is not None and there.digest == wanted.digest:
            return
        if there is not None or wanted.name in endpoint.aliases:
            raise ApiError(409, f"the name {wanted.name!r} is taken by other weights", param="name")
        try:
            loaded = await self.load(wanted.path)
        except (EvsysError, OSError) as exc:
            raise ApiError(400, f"{wanted.path} cannot be loaded: {exc}", param="path") from exc
        if loaded.digest != wanted.digest:
            said = f"the weights at {wanted.path} have the digest {loaded.digest}, not {wanted.digest}"
            raise ApiError(409, said, param="digest")
        stored = StoredModel(name=wanted.name, path=wanted.path, digest=wanted.digest)
        self._note({**self._models, wanted.name: stored}, endpoint.aliases)
        endpoint.models[wanted.name] = loaded

    async def _unload(self, endpoint: Endpoint, name: str) -> None:
        used = [alias for alias, known in endpoint.aliases.items() if known == name]
        if used:
            raise ApiError(409, f"{name} answers as {', '.join(used)}; move the alias first", param="name")
        if name not in endpoint.models:
            return
        self._note({key: one for key, one in self._models.items() if key != name}, endpoint.aliases)
        model = endpoint.models.pop(name)  # no new request begins on it
        await endpoint.wait_for_requests()  # one of them may have taken these weights before they lost their name
        close = getattr(model.sampler, "close", None)
        if callable(close):
            close()

    def _state(self, endpoint: Endpoint) -> HttpResponse:
        models = [{"name": name, "digest": model.digest} for name, model in endpoint.models.items()]
        return json_response({"base_model": self.base_model, "models": models, "aliases": dict(endpoint.aliases)})


def _read[T: BaseModel](kind: type[T], body: bytes) -> T:
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as exc:
        found = exc.errors()[0]
        place = ".".join(map(str, found["loc"]))
        raise ApiError(400, f"{place}: {found['msg']}", param=place) from exc
    except ValueError as exc:
        raise ApiError(400, f"the body is not JSON: {exc}") from exc
