from __future__ import annotations

from pydantic import BaseModel

from evsys_sdk.config.base import Params
from evsys_sdk.config.files import plain
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.reading import forget, listening, note_read, read, settings_of, unread


def _config() -> ExperimentConfig:
    run = {
        "name": "r",
        "data": {"path": "p", "hf_split": "s", "transforms": [{"kind": "a", "params": {}}]},
        "model": {"name": "m"},
        "algorithm": {"kind": "sft"},
    }
    config = ExperimentConfig.model_validate({"name": "x", "run": run})
    forget(config)
    return config


def test_only_given_settings_that_nobody_read_are_unread():
    config = _config()
    assert config.name and config.run.model.name and config.run.data.path and config.run.data.transforms[0].kind
    assert set(unread(config)) == {
        "run.name", "run.data.hf_split", "run.data.transforms[0].params", "run.algorithm",
    }  # fmt: skip


def test_writing_the_config_down_is_not_reading_it():
    config = _config()
    plain(config)
    assert list(unread(config)) == ["name", "run"]


def test_what_another_copy_read_counts_down_to_the_setting_inside():
    here, elsewhere = _config(), _config()
    assert elsewhere.run.data.path and elsewhere.run.data.transforms[0].kind and here.name
    assert set(read(elsewhere)) == {
        "run", "run.data", "run.data.path", "run.data.transforms", "run.data.transforms[0].kind",
    }  # fmt: skip
    note_read(here, set(read(elsewhere)))
    assert set(unread(here)) == {
        "run.name", "run.data.hf_split", "run.data.transforms[0].params", "run.model", "run.algorithm",
    }  # fmt: skip
    assert list(read(here, but=["run"])) == ["name"]


def test_dumping_a_model_counts_as_reading_all_of_it():
    config = _config()
    config.model_dump()
    assert list(unread(config)) == []


def test_notes_do_not_disturb_equality_or_serialisation():
    first, second = _config(), _config()
    assert first.run.name and first == second and first.model_dump() == second.model_dump()


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
    extension = listening(Foreign)(a=1, b=2)
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

    assert listening(Bare) is Bare and settings_of(Bare()) is None
    assert listening(Ours) is Ours and settings_of(Ours(n=2)) is None
