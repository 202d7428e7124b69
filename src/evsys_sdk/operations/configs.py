"""Is a config right, what can be named in one, and what does an extension take.

In: the path of a YAML file, or the name of a registry. Out: its runs and warnings, or names and JSON schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.sweep import count_trials
from evsys_sdk.errors import EvsysError, Problem
from evsys_sdk.registry import REGISTRIES, load_all, registry_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedConfig:
    """A config in which no mistake was found."""

    path: str
    config: ExperimentConfig
    runs: list[str]
    """Without their seeds; empty for a search, whose runs are not known before it has begun."""
    warnings: list[Problem]

    @property
    def n_trials(self) -> int | None:
        """How many trials a search may make; None where there is no search."""
        search = self.config.search
        return count_trials(search) if search is not None and search.kind != "grid" else None

    @property
    def n_runs(self) -> int:
        """How many runs it may make, seeds included."""
        trials = self.n_trials
        return (len(self.runs) if trials is None else trials) * self.config.n_repeats

    def plain(self) -> dict[str, Any]:
        warnings = [asdict(problem) for problem in self.warnings]
        return {"ok": True, "path": self.path, "runs": self.runs, "warnings": warnings}


def validate_config(
    path: str, *, shallow: bool = False, strict: bool = False, run_code: bool = True, overrides: Sequence[str] = ()
) -> ValidatedConfig:
    """Check a config: its structure and, unless `shallow`, every block, file and verifier. A mistake is a ConfigError.
    Unless `run_code` is False the project's own code is imported."""
    from evsys_sdk.checks.preflight import deep_warnings, ignored_settings, validate_yaml

    config = validate_yaml(path, deep=not shallow, strict=strict, overrides=overrides, run_code=run_code)
    # A grid is a search whose arms are all known before it begins.
    is_search = config.search is not None and config.search.kind != "grid"
    warnings = ignored_settings(config) + ([] if shallow else deep_warnings(config, run_code=run_code))
    runs = [] if is_search else [run.name for run in config.all_runs()]
    return ValidatedConfig(path=path, config=config, runs=runs, warnings=list(warnings))


def list_extensions(registry: str | None) -> dict[str, list[str]]:
    """The names in every registry, or in one."""
    load_all()
    chosen = [registry_for(registry)] if registry else list(REGISTRIES.values())
    return {found.plural: found.names() for found in chosen}


def schema_names() -> dict[str, list[str]]:
    """What `extension_schemas` knows: `config`, and the names in each registry."""
    load_all()
    return {"config": [], **{found.kind: found.names() for found in REGISTRIES.values()}}


def extension_schemas(kind: str, name: str | None = None) -> dict[str, dict[str, Any]]:
    """The JSON schemas of an extension's params, of all extensions of a registry, or of the whole YAML (`config`)."""
    if kind == "config":
        from evsys_sdk.explain import described_schema

        return {"config": described_schema(ExperimentConfig)}
    registry = registry_for(kind)
    return {key: registry.schema(key) for key in ([name] if name else registry.names())}


def plain_schema(kind: str | None, name: str | None) -> dict[str, Any]:
    """What `evsys schema KIND NAME --json` prints."""
    if kind is None and name is not None:
        raise EvsysError(f"name the kind that {name!r} belongs to as well; evsys schema lists the kinds")
    if kind is None:
        return dict(schema_names())
    schemas = extension_schemas(kind, name)
    return next(iter(schemas.values())) if name or kind == "config" else schemas
