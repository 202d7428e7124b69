"""Memory: what a run leaves behind, on disk first and on the dashboard second."""

EXTENSIONS = ("log_stores", "callbacks", "local_logger", "dashboard.logger", "trackers")
"""Modules of this room that register extensions."""
