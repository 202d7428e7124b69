"""Train/test overlap: do the training rows hold tasks of a benchmark? Texts, index, audit, report."""
