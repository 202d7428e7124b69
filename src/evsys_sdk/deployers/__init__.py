"""Where trained weights go: one file per target, each answering `protocols.Deployer`."""

EXTENSIONS = ("fireworks", "folder", "hf_hub", "llama_cpp", "ollama", "serve", "sglang", "tinker", "vllm")
"""Modules of this room that register extensions."""
