"""Which records are read for earlier looks: parsing one takes long, and most are about other arms."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.experiment import looks
from evsys_sdk.files import write_json
from evsys_sdk.record.layout import ATTEMPTS

QUESTION = looks.Question(arms={"fast": "0123456789abcdef", "größer": "fedcba9876543210"}, tasks={})
OWN = "own.experiment_result.json"


@pytest.fixture
def outputs(tmp_path):
    """A folder in a parent without other experiments: those of the parent are looked at too."""
    folder = tmp_path / "project" / "outputs"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def read(outputs, monkeypatch):
    """The names of the records that are parsed for an experiment `own` in this folder."""
    monkeypatch.setattr(looks, "workspaces_of", lambda config: [])
    parsed = []
    monkeypatch.setattr(looks, "read_one", lambda path: parsed.append(path.name.partition(".")[0]))

    def read_all() -> list[str]:
        found = looks._earlier(outputs / OWN, outputs, None, QUESTION, {"pass@1"})
        assert list(found) == []
        return sorted(set(parsed))

    return read_all


def record(folder, name, **content):
    write_json(folder / f"{name}.experiment_result.json", {"experiment": name, **content})


def test_a_record_that_shares_no_arm_is_not_parsed(outputs, read):
    record(outputs, "by_name", arms=[{"arm": "fast"}])
    record(outputs, "by_identity", looks={"arms": {"another name": "fedcba9876543210"}})
    record(outputs, "other", arms=[{"arm": "slow"}], looks={"arms": {"slow": "ffffffffffffffff"}})
    assert read() == ["by_identity", "by_name", "own"]


def test_a_name_counts_in_whichever_way_json_writes_it(outputs, read):
    (outputs / "ascii.experiment_result.json").write_text(json.dumps({"arms": [{"arm": "größer"}]}))
    record(outputs, "plain", arms=[{"arm": "größer"}])
    assert read() == ["ascii", "own", "plain"]


def test_an_experiment_whose_attempts_were_set_aside_is_parsed(outputs, read):
    record(outputs, "other", arms=[{"arm": "slow"}])
    (outputs / f"other.{ATTEMPTS}").mkdir()
    assert read() == ["other", "own"]
