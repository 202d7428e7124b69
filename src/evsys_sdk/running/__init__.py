"""The runner's hands: what `runner.py` and `experiment.py` put together, one folder down."""
