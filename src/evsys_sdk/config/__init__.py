"""Stage 1, what was asked: YAML in, checked and expanded `ExperimentConfig` out."""
