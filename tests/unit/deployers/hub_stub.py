"""The Hugging Face Hub on loopback, written from what the real client (huggingface_hub 1.33) sends and reads."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.unit.deployers.stubs import Answer, StubServer

Files = dict[str, bytes]
LARGE = (".safetensors", ".gguf")


class HubStub(StubServer):
    """Repositories with commits, branches and tags; large files go by the LFS protocol."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.private: dict[str, bool] = {}
        self.commits: dict[str, Files] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.large: dict[str, bytes] = {}
        self.fails_at = ""
        super().__init__(self._serve)

    def add_repo(self, name: str, *, private: bool) -> None:
        self.private[name], self.tags[name] = private, {}
        self.branches[name] = {"main": self._commit({".gitattributes": b"*.safetensors filter=lfs\n"}, "start")}

    def files(self, repo: str, revision: str) -> Files:
        return self.commits[self._resolve(repo, revision) or ""]

    def _commit(self, files: Files, message: str) -> str:
        oid = hashlib.sha1(repr((sorted(files.items()), message, len(self.commits))).encode()).hexdigest()
        self.commits[oid] = files
        return oid

    def _resolve(self, repo: str, revision: str) -> str | None:
        named = {**self.branches[repo], **self.tags[repo]}
        return named.get(revision, revision if revision in self.commits else None)

    def _serve(self, method: str, path: str, body: Any) -> Answer:
        route, _, query = path.partition("?")
        route = unquote(route)
        if self.fails_at and self.fails_at in f"{method} {route}":
            return 403, {"error": "You do not have permission."}
        if route.startswith("/large/"):  # storage of its own: the address is the permission
            self.large[route.removeprefix("/large/")] = body if isinstance(body, bytes) else json.dumps(body).encode()
            return 200, {}
        if self.headers[-1].get("authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header", "_headers": {}}
        if route == "/api/repos/create":
            name = f"{body['organization']}/{body['name']}"
            if name in self.private:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.add_repo(name, private=body.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{name}"}
        if route == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if route.startswith("/api/models/"):
            user, name, *rest = route.removeprefix("/api/models/").split("/")
            repo = f"{user}/{name}"
            if repo not in self.private:
                return 404, {"error": "Repository not found", "_headers": {"x-error-code": "RepoNotFound"}}
            return self._repo(method, repo, rest, body, query)
        user, name, verb, *rest = route.strip("/").split("/")
        if name.endswith(".git"):
            place = f"{self.url}/large/"
            objects = [{**one, "actions": {"upload": {"href": place + one["oid"]}}} for one in body["objects"]]
            return 200, {"objects": objects, "transfer": "basic"}
        return self._resolved(f"{user}/{name}", rest[0], "/".join(rest[1:])) if verb == "resolve" else (404, {})

    def _resolved(self, repo: str, revision: str, file: str) -> Answer:
        if repo not in self.private:
            return 404, {"error": "Repository not found", "_headers": {"x-error-code": "RepoNotFound"}}
        commit = self._resolve(repo, revision)
        if commit is None:
            return 404, {"error": "Invalid rev id", "_headers": {"x-error-code": "RevisionNotFound"}}
        content = self.commits[commit].get(file)
        if content is None:
            return 404, {"error": "Entry not found", "_headers": {"x-error-code": "EntryNotFound"}}
        marks = {"x-repo-commit": commit, "etag": f'"{_blob_id(content)}"', "content-length": str(len(content))}
        return 200, {"_headers": marks, "_content": content}

    def _repo(self, method: str, repo: str, rest: list[str], body: Any, query: str) -> Answer:
        verb, name = (rest[0] if rest else ""), "/".join(rest[1:])
        if verb in ("", "revision"):
            commit = self._resolve(repo, name or "main")
            if commit is None:
                return 404, {"error": "Invalid rev id", "_headers": {"x-error-code": "RevisionNotFound"}}
            siblings = [{"rfilename": file} for file in self.commits[commit]]
            return 200, {"id": repo, "private": self.private[repo], "sha": commit, "siblings": siblings, "tags": []}
        if verb == "refs":
            heads = [_ref("heads", *one) for one in self.branches[repo].items()]
            return 200, {
                "branches": heads,
                "converts": [],
                "tags": [_ref("tags", *one) for one in self.tags[repo].items()],
            }
        if verb in ("branch", "tag"):
            named = self.branches[repo] if verb == "branch" else self.tags[repo]
            if method == "DELETE":
                return (200, {}) if named.pop(name, None) else (404, {"error": "Reference not found"})
            wanted = name if verb == "branch" else body["tag"]
            if wanted in named:
                return 409, {"error": "Reference already exists"}
            named[wanted] = (
                self._resolve(repo, (body or {}).get("startingPoint", "main") if verb == "branch" else name) or ""
            )
            return 200, {}
        if verb == "tree":
            return 200, [_entry(file, content) for file, content in self.files(repo, name).items()]
        if verb == "paths-info":
            wanted_paths = parse_qs(body.decode())["paths"]
            there = self.files(repo, name)
            return 200, [_entry(file, there[file]) for file in wanted_paths if file in there]
        if verb == "preupload":
            paths = [one["path"] for one in body["files"]]
            modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
            return 200, {"files": [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]}
        assert verb == "commit", f"{method} {verb}"
        head = self.branches[repo][name]
        files, lines = dict(self.commits[head]), [json.loads(line) for line in body.splitlines()]
        if lines[0]["value"].get("parentCommit", head) != head:
            return 412, {"error": "The parent commit is not the head"}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        oid = self.branches[repo][name] = self._commit(files, lines[0]["value"]["summary"])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _ref(kind: str, name: str, commit: str) -> dict[str, str]:
    return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
    if path.endswith(LARGE):
        oid = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
    return found
