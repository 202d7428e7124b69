"""Who is measured, each in a separate process, and how they take turns; `perf/train.py` runs the contest."""
