"""Settings that have no effect by the meaning of others are named, with the reason."""

from __future__ import annotations

from evsys_sdk.checks.preflight import ignored_settings
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document


def ignored(tmp_path, *, metadata=None, **run):
    base = {"name": "a", "data": {"path": "r.jsonl"}, "model": {"name": "m"}, "algorithm": {"kind": "sft"}, **run}
    data = {"name": "e", "run": {"backend": {"kind": "mock"}, **base}, "metadata": metadata or {}}
    config = parse_config(Document(label="config", data=data), folder=tmp_path)
    return {problem.path: problem.message for problem in ignored_settings(config)}


def test_settings_of_another_source(tmp_path):
    found = ignored(tmp_path, data={"path": "r.jsonl", "hf_split": "test", "rows": []})
    assert found == dict.fromkeys(["run.data.hf_split", "run.data.rows"], "unread setting: source_kind is jsonl")


def test_the_mock_has_one_template(tmp_path):
    named = {"name": "m", "renderer_name": "qwen3"}
    entry = {"path": "bench", "chat_template": "{{ messages[0].content }}"}
    found = ignored(tmp_path, model=named, metadata={"benchmark": entry})
    assert list(found) == ["run.model.renderer_name", "metadata.benchmark[0].chat_template"]
    assert all("the mock backend has its own template" in message for message in found.values())
    assert ignored(tmp_path, model=named, backend={"kind": "local"}, metadata={"benchmark": entry}) == {}
