"""The built-in transforms. Importing this registers all of them.

In: rows. Out: rows. Those that look at one row at a time can `stream`; the others need the whole list.
"""

from __future__ import annotations

from evsys_sdk.data.transforms.chat import JsonlToChat
from evsys_sdk.data.transforms.fields import Identity, MapFields
from evsys_sdk.data.transforms.sampling import Sample, Shuffle, Split
from evsys_sdk.data.transforms.selection import Dedupe, Filter
from evsys_sdk.data.transforms.tasks import ToHarborTask, ToPromptExample

__all__ = [
    "Dedupe",
    "Filter",
    "Identity",
    "JsonlToChat",
    "MapFields",
    "Sample",
    "Shuffle",
    "Split",
    "ToHarborTask",
    "ToPromptExample",
]
