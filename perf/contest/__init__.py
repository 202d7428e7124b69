"""Who is measured, each in a process of its own, and how they take turns; `perf/train.py` runs the contest."""
