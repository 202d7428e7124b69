"""Tests of the engine need torch (extra `local`); without it they are left out, and pytest says how many ran."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["engine/*"]
