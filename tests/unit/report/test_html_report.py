"""`evsys report`: one file that holds everything, whatever the texts in the record are."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evsys_sdk.cli.main import main
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import EvalResult, Score
from evsys_sdk.record.models import ExperimentRecord, RecordedArm, RecordedRun, RecordedVerdict
from evsys_sdk.report.html import GENERATOR, Remark, ReportFacts, report_html, write_report
from evsys_sdk.report.recorded import recorded_facts, recorded_verdict
from evsys_sdk.report.svg import curve_svg, forest_svg, legend_svg, make_axis, ticks
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms
from evsys_sdk.stats.verdict import Verdict

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\ud800"


def judged(*arms: str) -> Verdict:
    scores = [
        ArmScores(
            arm=arm, seeds={s: {f"t{t}": float(t % 10 < 3 * n + s) for t in range(40)} for s in (1, 2)}, failed={}
        )
        for n, arm in enumerate(arms)
    ]
    return judge_arms(scores, metric="val.pass@1", mode="max", baseline_arm=arms[0], untrained=None, also=[])


def record(*arms: str, text: str = "fine", **fields: object) -> ExperimentRecord:
    verdict = judged(*arms)
    score = Score(metric="pass@1", value=0.5, low=0.4, high=0.6, n_tasks=40, n_rollouts=40, n_errors=2)
    runs = [
        RecordedRun(
            run_id=f"{text}/{arm}__s{seed}",
            status="completed",
            evals=[EvalResult(name=text, split="val", step=step, scores=[score]) for step in (10, 20, None)],
        )
        for arm in arms
        for seed in (1, 2)
    ]
    given = {
        "conclusion": f"Hypothesis: {text}\nBest arm: {text}\n  detail {text}",
        "hypothesis": text,
        "verdict": RecordedVerdict.model_validate(verdict.as_dict()),
        "best_arm": arms[-1],
        "arms": [RecordedArm(arm=arm, statuses=["completed"] * 2, scores=[0.1, 0.2]) for arm in arms],
        "runs": runs,
        "warnings": [text],
        "config": {"name": text, "run": {"model": {"name": text}}, "metadata": {"success_metric": "val.pass@1"}},
        **fields,
    }
    return ExperimentRecord(experiment=text, **given)


def report(found: ExperimentRecord, folder: Path, **fields: object) -> str:
    page = recorded_facts(found, folder / "x.experiment_result.json")
    return report_html(ReportFacts(record=found, page=page, **fields))


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def test_the_verdict_of_a_record_is_the_one_that_was_written() -> None:
    verdict = judged("base", "new")
    assert recorded_verdict(record("base", "new")) == verdict
    assert recorded_verdict(ExperimentRecord(experiment="x")) is None


def test_the_report_holds_everything_and_asks_for_nothing(tmp_path: Path) -> None:
    found = record("base", "new")
    text = report(found, tmp_path, remarks=[Remark(text="we keep it", by="ann", ts="2026")], why_invalid="wrong rows")
    page = Elements(text)
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles[:3] == ["Hypothesis", "Conclusion", "Arms"]
    assert {"Learning curves", "Benchmark scores", "Integrity", "Setup", "Config", "Every evaluation"} <= {*titles}
    assert "0.500 [0.400, 0.600], 40 tasks, 2 of 40 rollouts errored" in text
    assert "we keep it" in text and "wrong rows" in text
    addresses = [attrs[key] for _, attrs in page.tags for key in ("src", "href") if key in attrs]
    assert addresses == []
    assert "default-src 'none'" in text


def test_the_record_in_the_report_reads_back(tmp_path: Path) -> None:
    found = record("base", "new", text="a < b && c > d")
    page = Elements(report(found, tmp_path))
    assert json.loads(page.scripts[0]) == json.loads(json.dumps(found.as_dict()))


def test_no_text_of_others_becomes_markup(tmp_path: Path) -> None:
    def made(word: str) -> str:
        said = [Remark(text=word, by=word, ts=word)]
        return report(record("base", f"{word}2", text=word), tmp_path, remarks=said, why_invalid=word)

    text, harmless = made(EVIL), Elements(made("x"))
    page = Elements(text)
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in harmless.tags}
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert "\x1b" not in text


def test_figures_are_well_formed_with_hostile_names_and_values() -> None:
    verdict = judged("base", EVIL)
    ElementTree.fromstring(forest_svg(verdict, label=EVIL))
    curves = {"base": [{0: 1.0, 5: 0.5}, {0: 2.0, 5: 0.1}], EVIL: [{0: 1e300, 5: -1e300}]}
    ElementTree.fromstring(curve_svg(EVIL, curves, order=["base", EVIL], failed=[EVIL]))
    ElementTree.fromstring(legend_svg([f"{EVIL}{n}" for n in range(20)], [f"{EVIL}0"]))


def test_a_figure_of_nothing_is_empty() -> None:
    verdict = judged("base", "new")
    assert forest_svg(Verdict(**{**{f: getattr(verdict, f) for f in Verdict.__dataclass_fields__}, "arms": []})) == ""
    assert curve_svg("loss", {}, order=["base"]) == ""


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [1e-12, 2e-12], [-1e15, 1e15], [math.nan, math.inf], []])
def test_every_scale_has_ticks_within_it(values: list[float]) -> None:
    axis = make_axis(values, 0, 100)
    found = ticks(axis)
    assert 1 <= len(found) <= 7
    assert all(axis.low <= tick <= axis.high for tick in found)


def test_a_file_that_is_no_report_stays(tmp_path: Path) -> None:
    found = record("base", "new")
    facts = ReportFacts(record=found, page=recorded_facts(found, tmp_path / "x.experiment_result.json"))
    other = tmp_path / "thesis.html"
    other.write_text("<h1>mine</h1>")
    with pytest.raises(Exception, match="no report of evsys"):
        write_report(facts, other)
    assert other.read_text() == "<h1>mine</h1>"
    with pytest.raises(Exception, match="is a folder"):
        write_report(facts, tmp_path)
    with pytest.raises(EvsysError, match="cannot be written"):
        write_report(facts, other / "x.html")
    again = write_report(facts, write_report(facts, tmp_path / "x.html"))
    assert GENERATOR in again.read_text()


def test_the_command_writes_beside_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "outputs" / "lr.experiment_result.json"
    record("base", "new", text="lr", status="completed", ts="2026-01-01T00:00:00+00:00").write(path)
    assert main(["report", "lr"]) == 0
    assert GENERATOR in (tmp_path / "outputs" / "lr.html").read_text()
    capsys.readouterr()
    assert main(["report", "lr", "--html", "out/r.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(tmp_path / "out" / "r.html")
    assert (tmp_path / "out" / "r.html").exists()
    assert main(["report", "nothing"]) == 1


def test_an_experiment_without_a_record_is_refused_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "outputs" / "lr.experiment_result.json"
    path.parent.mkdir()
    path.write_text("{broken")
    assert main(["report", str(path)]) == 1
    assert "cannot be read" in capsys.readouterr().err
