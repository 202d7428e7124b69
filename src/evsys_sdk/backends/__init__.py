"""Where the model lives while it trains: one file per backend, each answering the calls in `training_api.py`."""

EXTENSIONS = ("mock", "local", "tinker")
"""Modules of this room that register extensions."""
