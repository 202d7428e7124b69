"""A hypothesis in the YAML: text, or a claim with a prediction that can be judged."""

from __future__ import annotations

import pytest
import yaml

from evsys_sdk.config.load import parse_config, plain
from evsys_sdk.config.metadata import Hypothesis, Metadata
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.errors import ConfigError
from evsys_sdk.explain import described_schema

RUN = {"name": "r", "data": {"path": "d.jsonl"}, "model": {"name": "m"}, "algorithm": {"kind": "sft"}}
TYPED = {
    "claim": "Rank 16 routes better than rank 4.",
    "prediction": {"metric": "pass@1", "arm": "r16", "vs": "r4", "direction": "increase", "at_least": 0.05},
    "confidence": 0.7,
}


def parsed(hypothesis, tmp_path):
    data = {"name": "e", "run": RUN, "metadata": {"hypothesis": hypothesis}}
    return parse_config(Document(label="config.yaml", data=data), folder=tmp_path)


def problems(hypothesis, tmp_path):
    with pytest.raises(ConfigError) as caught:
        parsed(hypothesis, tmp_path)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_text_stays_text(tmp_path):
    assert parsed("more data helps", tmp_path).metadata.hypothesis == "more data helps"
    assert Metadata().hypothesis == ""


def test_a_typed_hypothesis_is_read_and_reads_well(tmp_path):
    found = parsed(TYPED, tmp_path).metadata.hypothesis
    assert isinstance(found, Hypothesis) and found.prediction.direction == "higher"
    assert str(found) == (
        "Rank 16 routes better than rank 4.\n"
        "Prediction: pass@1 of r16 is higher than that of r4 by at least 0.05 (confidence 0.7)"
    )


def test_it_survives_the_way_to_plain_data_and_back(tmp_path):
    config = parsed(TYPED, tmp_path)
    again = yaml.safe_load(yaml.safe_dump(plain(config)))
    assert ExperimentConfig.model_validate(again).metadata.hypothesis == config.metadata.hypothesis


def test_mistakes_in_it_are_told_with_their_place(tmp_path):
    wrong = {"clam": "x", "prediction": {"arm": "a", "direction": "sideways", "at_least": -1}, "confidence": 70}
    found = problems(wrong, tmp_path)
    assert found["metadata.hypothesis.clam"] == "unknown key; closest: claim"
    assert found["metadata.hypothesis.claim"] == "is missing; it has no default"
    assert found["metadata.hypothesis.prediction.direction"] == "must be one of higher, lower"
    assert "greater than or equal to 0" in found["metadata.hypothesis.prediction.at_least"]
    assert "less than or equal to 1" in found["metadata.hypothesis.confidence"]


def test_what_is_neither_text_nor_a_mapping_is_refused(tmp_path):
    assert problems(["a", "b"], tmp_path) == {"metadata.hypothesis": "must be text"}


def test_the_schema_shows_both_forms():
    schema = described_schema(ExperimentConfig)
    forms = schema["$defs"]["Metadata"]["properties"]["hypothesis"]["oneOf"]
    assert {"type": "string"} in forms and {"$ref": "#/$defs/Hypothesis"} in forms
