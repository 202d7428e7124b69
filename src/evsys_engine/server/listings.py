"""What there is: models, sessions, training runs, checkpoints.

In: a request. Out: the protocol's descriptions, made from the checkpoints' folder and the living sessions.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

from evsys_engine.http import HttpRequest
from evsys_engine.server import bodies
from evsys_engine.server.checkpoints import TinkerPath, UnknownCheckpoint
from evsys_engine.server.service import Service
from evsys_engine.server.sessions import Model, NotFound
from evsys_engine.types import BadRequest, JsonObject

OWNER = "local"
ARCHIVES_PATH = "/api/v1/archives/"


class Listings:
    """Reading, and putting away, what clients have made."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.checkpoints

    async def capabilities(self, _: HttpRequest) -> JsonObject:
        length = self._service.engine.info.max_length
        can = {"max_context_length": length, "trainable": True, "sampleable": True}
        models = [{"model_name": name, **can} for name in self._service.naming.known]
        # Not in the protocol; clients that do not know it pass over it.
        return {"supported_models": models, "features": self._service.engine.info.extra.get("features")}

    async def weights_info(self, body: bodies.WeightsInfo) -> JsonObject:
        path = TinkerPath.parse(body.tinker_path)
        facts = await self._service.in_worker(self._store.facts, path)
        self._service.naming.check_facts(str(path), facts)
        lora = facts["lora"]
        return {
            "base_model": self._service.naming.answer(facts.get("asked_as")),
            "is_lora": True,  # said of rank 0 as well: the client resumes LoRA runs only
            "lora_rank": lora["rank"],
            **{key: lora[key] for key in ("train_attn", "train_mlp", "train_unembed")},
        }

    async def sampler(self, _: HttpRequest, sampler_id: str) -> JsonObject:
        sampling = self._service.sessions.sampling(sampler_id)
        base_model = self._service.naming.public  # whatever was asked for: the client loads the tokenizer by it
        return {"sampler_id": sampler_id, "base_model": base_model, "model_path": sampling.model_path}

    async def sessions(self, request: HttpRequest) -> JsonObject:
        ids = [session.session_id for session in self._service.sessions.all()]
        return {"sessions": _page(request, ids, 20)[0]}

    async def session(self, _: HttpRequest, session_id: str) -> JsonObject:
        session = self._service.sessions.get(session_id)
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplings),
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    async def finish_session(self, _: HttpRequest, session_id: str) -> JsonObject:
        return await self._service.finish_session(session_id)

    async def training_runs(self, request: HttpRequest) -> JsonObject:
        runs = sorted({*self._living(), *await self._service.in_worker(self._store.runs)})
        page, cursor = _page(request, runs, 20)
        described = []
        for run in page:
            with suppress(NotFound, UnknownCheckpoint):  # its last checkpoint was deleted since it was listed
                described.append(await self._service.in_worker(self._describe, run, self._living().get(run)))
        return {"training_runs": described, "cursor": cursor}

    async def training_run(self, _: HttpRequest, run: str) -> JsonObject:
        described: JsonObject = await self._service.in_worker(self._describe, run, self._living().get(run))
        return described

    async def checkpoints_of(self, _: HttpRequest, run: str) -> JsonObject:
        return {"checkpoints": await self._service.in_worker(self._checkpoints, [run])}

    async def checkpoints(self, request: HttpRequest) -> JsonObject:
        every = await self._service.in_worker(lambda: self._checkpoints(self._store.runs()))
        page, cursor = _page(request, sorted(every, key=lambda found: found["time"], reverse=True), 100)
        return {"checkpoints": page, "cursor": cursor}

    async def delete_checkpoint(self, _: HttpRequest, run: str, kind: str, name: str) -> JsonObject:
        await self._service.in_worker(self._store.delete, _path(run, kind, name))
        return {}

    async def archive(self, request: HttpRequest, run: str, kind: str | None, name: str) -> JsonObject:
        """The address of the packed checkpoint. Without a kind, the weights to sample from are meant."""
        folder = await self._service.in_worker(self._store.find, _path(run, kind or "sampler_weights", name))
        ticket = await self._service.in_worker(self._service.archives.make, folder)
        expires = datetime.now(UTC) + timedelta(seconds=self._service.archives.seconds)
        url = f"http://{request.headers.get('host', 'localhost')}{ARCHIVES_PATH}{ticket}"
        return {"url": url, "expires": expires.isoformat()}

    async def set_ttl(self, request: HttpRequest, run: str, kind: str, name: str) -> JsonObject:
        body = bodies.read_body(bodies.SetTtl, request.body)
        await self._service.in_worker(self._store.set_ttl, _path(run, kind, name), body.ttl_seconds)
        return {}

    async def publish(self, _: HttpRequest, run: str, kind: str, name: str) -> JsonObject:
        """Noted and listed; callers of this server have one key, so every one of them can load a checkpoint anyway."""
        await self._service.in_worker(self._store.set_public, _path(run, kind, name), True)
        return {}

    async def unpublish(self, _: HttpRequest, run: str, kind: str, name: str) -> JsonObject:
        await self._service.in_worker(self._store.set_public, _path(run, kind, name), False)
        return {}

    def _living(self) -> dict[str, Model]:
        return {name: model for session in self._service.sessions.all() for name, model in session.models.items()}

    def _checkpoints(self, runs: list[str]) -> list[JsonObject]:
        found = []
        for path in [path for run in runs for path in self._store.of_run(run)]:
            with suppress(UnknownCheckpoint, FileNotFoundError):  # deleted since it was listed
                found.append(self._store.describe(path))
        return found

    def _describe(self, run: str, model: Model | None) -> JsonObject:
        paths = self._store.of_run(run)
        if not paths and model is None:
            raise NotFound(f"there is no training run {run!r} here")
        facts = self._store.facts(paths[-1]) if paths else {}
        rank = model.settings.rank if model else facts["lora"]["rank"]
        last = {path.kind: self._store.describe(path) for path in paths}
        return {
            "training_run_id": run,
            "base_model": self._service.naming.answer(model.base_model if model else facts.get("asked_as")),
            "model_owner": OWNER,
            "is_lora": rank > 0,
            "lora_rank": rank,
            "last_request_time": model.used_at.isoformat() if model else facts["time"],
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": model.user_metadata if model else facts["run_metadata"],
        }


def _path(run: str, kind: str, name: str) -> TinkerPath:
    return TinkerPath.parse(f"tinker://{run}/{kind}/{name}")


def _page[T](request: HttpRequest, items: list[T], default_limit: int) -> tuple[list[T], dict[str, int]]:
    try:
        limit, offset = int(request.query.get("limit", default_limit)), int(request.query.get("offset", 0))
    except ValueError as exc:
        raise BadRequest("limit and offset must be whole numbers") from exc
    if limit < 0 or offset < 0:
        raise BadRequest("limit and offset must not be negative")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
