"""`evsys_sdk.runner`: the import path that the published documents give; the code is in `experiment/`."""

from evsys_sdk.experiment.experiment import run_experiment

__all__ = ["run_experiment"]
