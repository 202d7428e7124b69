"""Run the experiment in config.yaml beside this file: the same as `evsys run` on it."""

from pathlib import Path

from evsys_sdk import Experiment

if __name__ == "__main__":
    result = Experiment.from_yaml(Path(__file__).resolve().parent / "config.yaml").run()
    print(result.conclusion.text)
