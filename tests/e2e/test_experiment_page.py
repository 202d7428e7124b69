"""The page at the end of an experiment, from YAML to Markdown."""

from __future__ import annotations

FAILING = """
from evsys_sdk import register_algorithm

@register_algorithm("always_fails")
class AlwaysFails:
    def train(self, ctx):
        raise RuntimeError("no luck")
"""


def test_a_chain_and_an_arm_that_fails_end_on_one_page(project, minimal_run):
    project.write_tasks()
    chain = minimal_run(name="chain")
    stages = [{"name": name, "data": chain["data"]} for name in ("one", "two")]
    del chain["data"]
    chain |= {"eval": {"enabled": False}, "continual": {"stages": stages}}
    broken = minimal_run(name="broken", eval={"enabled": False}, algorithm__kind="always_fails", algorithm__params={})
    (project.root / "always_fails.py").write_text(FAILING)
    entry = {"name": "colours", "path": "bench", "split": "val", "temperature": 0, "baseline": True}
    path = project.config(
        run=None,
        imports=["always_fails"],
        runs=[chain, broken],
        description="What it is for.",
        metadata={"benchmark": [entry], "success_metric": "val.pass@1", "hypothesis": "It learns colours."},
    )
    assert project.evsys("run", path).returncode == 2
    page = (project.root / "outputs/hello_sft.experiment.md").read_text()
    assert page.startswith("# hello_sft\n\nWhat it is for.\n\n2 arms, 2 runs: 1 completed, 1 failed.\n")
    assert "## Hypothesis\n\nIt learns colours.\n" in page and page.count("It learns colours.") == 1
    assert "\n| benchmark | untrained | after one | after two | forgetting | transfer before two |\n" in page
    assert "\n| val/colours pass@1 | 0.000 | 1.000 | 1.000 | +0.000 | +1.000 |\n" in page
    assert "\n- broken: failed (RuntimeError: no luck)\n" in page
    assert "- `chain/`: chain, completed" in page and "| training steps | " in page
