"""What can be known to be wrong before anything is spent: one file per subject, config in, problems out."""
