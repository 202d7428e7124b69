"""Words and pictures of an experiment: conclusion, verdict text, page, figures."""
