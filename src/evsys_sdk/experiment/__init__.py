"""Many runs: identity, planning, search, launchers, the verdict and the record of an experiment."""

EXTENSIONS = ("launchers", "ray")
"""Modules of this room that register extensions."""
