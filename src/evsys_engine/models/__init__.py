"""Where models come from: a name goes in, a local Hugging Face folder comes out.

`find_model` takes a built-in name, a directory, a `.gguf` file or a hub id; `describe_model` and `list_models` say what
there is. Nothing here loads torch.
"""

from evsys_engine.models.card import CachedModel, ModelCard, describe_model, list_models
from evsys_engine.models.errors import ModelError
from evsys_engine.models.find import ModelFolder, find_model

__all__ = ["ModelCard", "ModelError", "ModelFolder", "CachedModel", "describe_model", "find_model", "list_models"]
