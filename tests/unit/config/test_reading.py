from __future__ import annotations

from pydantic import BaseModel, Field

from evsys_sdk.config.base import Params
from evsys_sdk.config.reading import forget, note_read, read, settings_of, track_reads, unread
from evsys_sdk.config.schema import DataConfig, ExperimentConfig


class Inner(Params):
    kind: str
    size: int = 1


class Outer(Params):
    name: str
    split: str = "train"
    parts: list[Inner] = Field(default_factory=list)
    spec: Inner | None = None


def _settings() -> Outer:
    given = {"name": "x", "split": "s", "parts": [{"kind": "a", "size": 2}], "spec": {"kind": "b"}}
    return Outer.model_validate(given)


def test_only_given_settings_that_no_code_read_are_unread():
    settings = _settings()
    assert settings.name and settings.parts[0].kind
    assert set(unread(settings)) == {"split", "parts[0].size", "spec"}


def test_the_config_itself_is_not_tracked():
    run = {"name": "r", "data": {"path": "p"}, "model": {"name": "m"}, "algorithm": {"kind": "sft"}}
    config = ExperimentConfig.model_validate({"name": "x", "run": run})
    assert config.name and not [key for key in vars(config) if key not in ExperimentConfig.model_fields]

    class Holds(Params):
        data: DataConfig

    holder = Holds(data={"path": "p", "hf_split": "s"})
    assert holder.data.path and list(unread(holder)) == [], "what is read of it is not known, so it is one setting"


def test_what_another_copy_read_counts_down_to_the_setting_inside():
    here, elsewhere = _settings(), _settings()
    assert elsewhere.split and elsewhere.parts[0].kind and here.name
    assert set(read(elsewhere)) == {"split", "parts", "parts[0].kind"}
    note_read(here, set(read(elsewhere)))
    assert set(unread(here)) == {"parts[0].size", "spec"}
    forget(here)
    assert set(unread(here)) == {"name", "split", "parts", "spec"} and list(read(here)) == []


def test_dumping_a_model_counts_as_reading_all_of_it():
    settings = _settings()
    settings.model_dump()
    assert list(unread(settings)) == []


def test_notes_do_not_disturb_equality_or_serialisation():
    first, second = _settings(), _settings()
    assert first.name and first == second and first.model_dump() == second.model_dump()


class Foreign:
    """Somebody's extension, with a plain pydantic Config."""

    class Config(BaseModel):
        a: int = 1
        b: int = 2
        c: int = 3

    def __init__(self, **params):
        self.cfg = self.Config(**params)
        self.early = self.cfg.a


def test_a_foreign_extension_is_watched_too_also_in_its_init():
    extension = track_reads(Foreign)(a=1, b=2)
    assert isinstance(extension, Foreign) and type(extension).__name__ == "Foreign"
    assert list(unread(settings_of(extension))) == ["b"]
    assert extension.cfg.b == 2
    assert list(unread(settings_of(extension))) == []


def test_an_extension_that_keeps_no_settings_is_left_alone():
    class Bare: ...

    class Ours:
        class Config(Params):
            n: int = 1

        def __init__(self, **params):
            self.n = self.Config(**params).n

    assert track_reads(Bare) is Bare and settings_of(Bare()) is None
    assert track_reads(Ours) is Ours and settings_of(Ours(n=2)) is None
