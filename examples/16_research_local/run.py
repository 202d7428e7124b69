"""Research from config.yaml beside this file: the same as `evsys research` on it."""

from pathlib import Path

from evsys_sdk.research.launch import run_research

if __name__ == "__main__":
    report = run_research(Path(__file__).resolve().parent / "config.yaml")
    print("\n".join(report.lines))
