"""The built-in transforms. Importing this registers all of them.

In: rows. Out: rows. Those that look at one row at a time can `stream`; the others need the whole list.
"""

from __future__ import annotations

from evsys_sdk.data.transforms.chat import JsonlToChat
from evsys_sdk.data.transforms.fields import Identity, MapFields
from evsys_sdk.data.transforms.formats import AlpacaToChat, SharegptToChat, ToPlainText, ToPreference
from evsys_sdk.data.transforms.sampling import Sample, Shuffle, Split
from evsys_sdk.data.transforms.selection import Dedupe, Filter
from evsys_sdk.data.transforms.tasks import ToHarborTask, ToPromptExample

__all__ = [
    "AlpacaToChat",
    "Dedupe",
    "Filter",
    "Identity",
    "JsonlToChat",
    "MapFields",
    "Sample",
    "SharegptToChat",
    "Shuffle",
    "Split",
    "ToHarborTask",
    "ToPlainText",
    "ToPreference",
    "ToPromptExample",
]
