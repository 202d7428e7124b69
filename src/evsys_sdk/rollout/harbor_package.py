"""The one door to the harbor package.

In: nothing. Out: harbor, or the command that installs it. Two settings must be there before its first import: they are
made when this module is loaded, which the folder's `__init__` sees to before any other module of it.
"""

from __future__ import annotations

import os

from evsys_sdk.errors import need

os.environ.setdefault("HARBOR_TELEMETRY", "0")  # else its Job and CLI report model names, rewards and costs
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else a price list is looked for on the network


def need_harbor() -> None:
    """Say how to install harbor where it is missing."""
    need("harbor", extra="harbor")
