"""Memory: what a run leaves behind, on disk first and on the dashboard second."""
