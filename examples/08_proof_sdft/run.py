"""Run both experiments beside this file in their order: the arms of the second start from the weights of the first."""

from pathlib import Path

from evsys_sdk import Experiment

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    for name in ("prepare.yaml", "two_stages.yaml"):
        result = Experiment.from_yaml(HERE / name).run()
        print(result.conclusion.text)
