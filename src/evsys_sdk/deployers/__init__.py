"""Where trained weights go: one file per target, each answering `protocols.Deployer`."""

EXTENSIONS = ("fireworks", "folder", "llama_cpp", "ollama", "serve", "sglang", "vllm")
"""Modules of this room that register extensions."""
