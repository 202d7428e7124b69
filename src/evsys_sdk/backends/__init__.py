"""Where the model lives while it trains: one file per backend, each answering the surface in `surface.py`."""
