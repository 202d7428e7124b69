"""Where trained weights go: one file per target, each answering `protocols.Deployer`."""

EXTENSIONS = ("folder", "llama_cpp", "serve")
"""Modules of this room that register extensions."""
