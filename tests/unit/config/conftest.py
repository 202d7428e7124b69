"""A small world for config tests: YAML text in, config or message out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from evsys_sdk.config.load import load_yaml
from evsys_sdk.config.schema import ExperimentConfig


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ExperimentConfig]:
    def _load(text: str, **options: object) -> ExperimentConfig:
        path = tmp_path / "config.yaml"
        path.write_text(dedent(text).lstrip("\n"))
        return load_yaml(path, **options)  # type: ignore[arg-type]

    return _load
