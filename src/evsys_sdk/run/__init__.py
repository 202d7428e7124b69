"""One run: plan, hooks of the training loop, evaluations, resume, budget, stop, record."""
