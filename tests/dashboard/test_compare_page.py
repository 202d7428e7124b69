"""Experiments side by side: the numbers and words of `evsys compare`, and the tasks that flipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("django_ready")


def evsys_compare(folder: Any, *names: str, as_json: bool = True) -> Any:
    more = ["--json"] if as_json else []
    command = [sys.executable, "-m", "evsys_sdk.cli.main", "compare", *names, *more, "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=folder)
    return json.loads(done.stdout) if as_json else done.stdout


def compared(sweep: dict[str, Any], names: list[str], arms: dict[str, list[str]] | None = None) -> Any:
    from evsys_dashboard.pages.compare import compare_rows

    wanted = {sweep[name].pk: found for name, found in (arms or {}).items()}
    return compare_rows([sweep[name] for name in names], wanted, None)[0]


@pytest.mark.parametrize(
    ("names", "arms", "spoken"),
    [
        (["slow", "sweep"], {}, ["slow", "sweep"]),
        (["sweep"], {"sweep": ["half", "all"]}, ["sweep:half", "sweep:all"]),
    ],
)
def test_the_comparison_is_that_of_evsys_compare(sweep, sweep_folder, names, arms, spoken):
    told = evsys_compare(sweep_folder, *spoken)
    found = compared(sweep, names, arms)
    assert [side.label for side in found.sides] == [side["label"] for side in told["sides"]]
    verdicts = [{"split": one.split, "benchmark": one.name, **one.verdict.as_dict()} for one in found.verdicts]
    assert json.loads(json.dumps(verdicts)) == told["verdicts"]
    assert (found.settings, found.scores, found.notes) == (told["settings"], told["scores"], told["notes"])


def test_the_page_has_the_sentences_that_the_command_prints(visitor, sweep, sweep_folder):
    printed = evsys_compare(sweep_folder, "slow", "sweep", as_json=False)
    query = {"e": [sweep["slow"].pk, sweep["sweep"].pk]}
    text = visitor.get(f"/p/{sweep['slow'].project_id}/compare", query).content.decode()
    words = " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())
    block = printed.partition("against slow")[2].partition("\n\n")[0]
    lines = [" ".join(line.split()) for line in block.splitlines()[1:] if line.startswith("  ")]
    assert lines and "No best arm by pass@1" in " ".join(lines)
    joined = " ".join(lines)
    for sentence in re.split(r"(?<=[.;]) ", joined):
        assert sentence in words, sentence


def test_the_page_has_the_scores_that_the_command_prints(visitor, sweep, sweep_folder):
    printed = evsys_compare(sweep_folder, "slow", "sweep", as_json=False)
    query = {"e": [sweep["slow"].pk, sweep["sweep"].pk]}
    text = visitor.get(f"/p/{sweep['slow'].project_id}/compare", query).content.decode()
    table = text.partition("Scores (means over seeds)")[2].partition("</table>")[0]
    shown = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[2:]]
    lines = printed.partition("scores (means over seeds):\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert [unescape(" ".join(cells)) for cells in shown] == [" ".join(line.split()) for line in lines]
    assert any(cells[0] == "steps" and cells[1].isdigit() for cells in shown)


def test_the_arm_that_stands_for_an_experiment_is_named(visitor, sweep):
    query = {"e": [sweep["slow"].pk, sweep["sweep"].pk]}
    text = visitor.get(f"/p/{sweep['slow'].project_id}/compare", query).content.decode()
    assert re.findall(r"compared: ([^<]*)\.</span>", text) == ["all"]


def test_tasks_that_flipped_link_to_both_rollouts(visitor, sweep):
    row = sweep["sweep"]
    arms = [f"{row.pk}:half", f"{row.pk}:all"]
    text = visitor.get(f"/p/{row.project_id}/compare", {"e": row.pk, "arm": arms}).content.decode()
    assert "18 shared tasks: 8 better, 0 worse." in text
    links = re.findall(r'<a href="([^"]*rollouts[^"]*task=god[^"]*)"', text)
    assert len(links) == 2
    shown = [visitor.get(unescape(link)).content.decode() for link in links]
    assert "failed" in shown[0].partition('data-part="transcript"')[2]
    assert 'class="badge passed"' in shown[1].partition('data-part="transcript"')[2]


def test_both_ways_are_told_apart_where_lower_is_better(sweep):
    from dataclasses import replace

    from evsys_dashboard.pages.compare import compare_rows, flipped_tasks

    row = sweep["sweep"]
    found, sides = compare_rows([row], {row.pk: ["half", "all"]}, None)
    [judged] = found.verdicts
    turned = replace(judged, verdict=replace(judged.verdict, mode="min"))
    assert flipped_tasks(judged, *sides, row.project).n_gained == 8
    assert flipped_tasks(turned, *sides, row.project).n_lost == 8


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_say_what_to_choose(visitor, sweep, count):
    ids = [sweep["slow"].pk][:count]
    text = visitor.get(f"/p/{sweep['slow'].project_id}/compare", {"e": ids}).content.decode()
    assert "a comparison takes two" in text


def test_an_experiment_without_a_result_and_one_of_another_project_are_named(visitor, sweep, project):
    from evsys_dashboard.models import ExperimentRow

    begun = ExperimentRow.objects.create(
        id=f"b-{project.pk}", project=project, name="begun", status="running", created=1.0, updated=1.0
    )
    text = visitor.get(f"/p/{project.pk}/compare", {"e": [begun.pk, sweep["slow"].pk, "elsewhere"]}).content.decode()
    assert "begun is running and has no result to compare yet" in text and "<code>elsewhere</code>" in text
