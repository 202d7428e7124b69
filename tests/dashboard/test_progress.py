"""Progress: leaderboards with fates and noise, settings that go with the score, calibration, and hostile texts."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET

import pytest


def study(project):
    from evsys_dashboard.leaderboards import study_of

    return study_of(project)


def add(project, rows, name, scores, *, at: float = 0.0, own=None, other=None, **given):
    """An experiment with one arm of these seeds, that ended `at` days after the start."""
    fields = {key: given.pop(key) for key in ("status", "parent_experiment_id", "source") if key in given}
    ended = rows.START + at * rows.DAY
    arms = {"arm": (own or {}, scores), **(other or {})}
    record = rows.record_of(name, arms, ended=ended, **given)
    return rows.add_experiment(project, name, record=record, created=ended - 60, ended=ended, **fields)


def test_experiments_are_kept_discarded_or_undecided_against_the_best_of_their_time(project, rows):
    add(project, rows, "first", [0.50, 0.52], at=0)
    add(project, rows, "better", [0.80, 0.82], at=1, parent_experiment_id="first")
    add(project, rows, "same", [0.81, 0.82], at=2)
    add(project, rows, "worse", [0.30, 0.32], at=3)
    [leaderboard] = study(project).leaderboards
    assert [(dot.name, dot.fate) for dot in leaderboard.dots] == [
        ("first", "kept"),
        ("better", "kept"),
        ("same", "undecided"),
        ("worse", "discarded"),
    ]
    assert leaderboard.best.name == "better"
    assert 0 < leaderboard.noise_floor < 0.2
    assert (leaderboard.dots[1].low, leaderboard.dots[1].high) == pytest.approx((0.73, 0.89))


def test_leaderboards_are_apart_by_metric_tasks_model_and_mock(project, rows):
    add(project, rows, "a", [0.5], model="qwen")
    add(project, rows, "b", [0.5], model="smol")
    add(project, rows, "c", [0.5], suite="val/other")
    add(project, rows, "d", [0.9], model="qwen", backend="mock")
    found = study(project).leaderboards
    assert len(found) == 4
    assert [leaderboard.is_mock for leaderboard in found].count(True) == 1
    assert all(len(leaderboard.dots) == 1 for leaderboard in found)


def test_test_scores_alone_make_no_leaderboard(visitor, project, rows):
    add(project, rows, "a", [0.5], suite="test/tools")
    [leaderboard] = study(project).leaderboards
    assert (leaderboard.selects, leaderboard.dots) == (False, [])
    assert "Test scores choose nothing" in visitor.get(f"/p/{project.id}/progress").content.decode()


def test_invalid_failed_and_running_experiments_do_not_count(project, rows):
    add(project, rows, "good", [0.5])
    add(project, rows, "cheat", [1.0], at=1, status="invalid")
    add(project, rows, "broken", [0.9], at=2, status="failed")
    rows.add_experiment(project, "running", status="running")
    assert [dot.name for dot in study(project).leaderboards[0].dots] == ["good"]


def test_a_lower_loss_is_better_where_the_mode_says_so(project, rows):
    add(project, rows, "first", [0.5, 0.51], mode="min")
    add(project, rows, "lower", [0.1, 0.11], at=1, mode="min")
    assert study(project).leaderboards[0].best.name == "lower"


def test_a_change_of_an_experiment_is_seen_at_the_next_visit(project, rows):
    one = add(project, rows, "a", [0.5])
    assert study(project).leaderboards[0].best.score == pytest.approx(0.5)
    one.record = rows.record_of("a", {"arm": ({}, [0.7])}, ended=rows.START)
    one.updated += 1
    one.save()
    assert study(project).leaderboards[0].best.score == pytest.approx(0.7)
    one.delete()
    assert study(project).leaderboards == []


def test_a_record_that_cannot_be_read_costs_only_itself(visitor, project, rows):
    add(project, rows, "a", [0.5])
    for number, record in enumerate(({"arms": 7}, {"experiment": "x", "runs": "no"}, ["list"], "text")):
        rows.add_experiment(project, f"bad{number}", record=record)
    found = study(project)
    assert found.n_unreadable == 4
    assert len(found.leaderboards) == 1
    assert "4 records could not be read" in visitor.get(f"/p/{project.id}/progress").content.decode()


# Settings.


def test_below_eight_arms_nothing_is_said_about_settings(visitor, project, rows):
    for number in range(7):
        add(project, rows, f"e{number}", [0.1 * number], at=number, own={"learning_rate": 10.0**-number})
    assert study(project).leaderboards[0].importance == []
    assert "Too few: 7 arms" in visitor.get(f"/p/{project.id}/progress").content.decode()


def test_the_setting_that_makes_the_score_comes_first_and_chance_explains_little(project, rows):
    for number in range(16):
        own = {"learning_rate": 0.001 * (number + 1), "order": ["a", "b"][number % 2], "same": 1}
        add(project, rows, f"e{number}", [0.05 * number], at=number, own=own)
    first, second = study(project).leaderboards[0].importance
    assert first.setting == "algorithm.params.learning_rate"
    assert first.correlation == pytest.approx(1.0)
    assert first.explained == pytest.approx(1.0)
    assert (first.n, first.n_values, first.best) == (16, 16, "0.016")
    # Every second arm: the correlation ratio of the ranks is 16/340, below what chance gives with 16 arms.
    assert second.setting == "algorithm.params.order"
    assert second.explained == 0.0
    assert second.correlation is None


def test_a_setting_in_words_explains_the_variance_between_its_values(project, rows):
    from evsys_dashboard.leaderboards import ScoredArm, rank_settings

    scores = [1, 2, 3, 4, 11, 12, 13, 14]
    arms = [ScoredArm(settings={"order": "ab"[n // 4]}, score=score) for n, score in enumerate(scores)]
    [one] = rank_settings(arms, "max")
    # Ranks 1-4 and 5-8: 32 of 42 lie between the groups; adjusted, 1 - (1 - 32/42) * 7 / 6.
    assert one.explained == pytest.approx(1 - (10 / 42) * 7 / 6)
    assert one.best == "b"


def test_settings_that_changed_together_are_one_line(project, rows):
    from evsys_dashboard.leaderboards import ScoredArm, rank_settings

    arms = [ScoredArm(settings={"rank": n, "alpha": 2 * n, "name": f"n{n}"}, score=n) for n in range(10)]
    [one] = rank_settings(arms, "max")
    assert {one.setting, *one.together_with} == {"rank", "alpha"}


def test_true_is_no_number_and_a_missing_setting_is_a_value():
    from evsys_dashboard.leaderboards import ScoredArm, rank_settings

    arms = [ScoredArm(settings={"warmup": True} if n % 2 else {}, score=n % 2 + n / 100) for n in range(12)]
    [one] = rank_settings(arms, "max")
    assert (one.n_values, one.best) == (2, "True")
    assert one.explained > 0.5


# Calibration.


def test_calibration_has_brier_score_and_shares_with_their_intervals(project, rows):
    for number, (confidence, outcome) in enumerate(
        [(0.9, "supported"), (0.9, "supported"), (0.9, "refuted"), (0.3, "refuted"), (0.7, "inconclusive")]
    ):
        add(project, rows, f"e{number}", [0.5], at=number, hypothesis_result=rows.prediction(confidence, outcome))
    late = rows.prediction(1.0, "supported", known_before=True)
    add(project, rows, "late", [0.5], at=9, hypothesis_result=late)
    add(project, rows, "no confidence", [0.5], at=10, hypothesis_result=rows.prediction(None, "supported"))
    found = study(project).calibration
    assert (found.n, found.n_inconclusive, found.n_known_before) == (4, 1, 1)
    assert found.brier == pytest.approx((0.01 + 0.01 + 0.81 + 0.09) / 4)
    assert found.base_brier == pytest.approx(0.25)
    low, high = found.bins
    assert (low.n, low.predicted, low.happened) == (1, pytest.approx(0.3), 0.0)
    assert (high.n, high.predicted, high.happened) == (3, pytest.approx(0.9), pytest.approx(2 / 3))
    assert 0 < high.happened_low < 2 / 3 < high.happened_high < 1


# The page.


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def test_the_page_draws_what_the_study_has(visitor, project, rows):
    rows.add_study(project, 60)
    text = visitor.get(f"/p/{project.id}/progress").content.decode()
    dots = sum(len(leaderboard.dots) for leaderboard in study(project).leaderboards)
    assert dots > 40
    charts = [chart for chart in svgs(text) if chart.get("role") == "group"]
    assert sum(len(chart.findall("./a/circle")) for chart in charts) == dots
    for kind in ("band", "best", "lineage", "whisker", "bar-fill", "polyline", "diagonal"):
        assert f'class="{kind}' in text or f" {kind}" in text
    # Every dot is in a table too.
    assert text.count("<tr data-row=") == dots
    assert "Brier score" in text


def test_no_number_of_a_chart_lies_outside_of_it(visitor, project, rows):
    rows.add_study(project, 40)
    for query in ("", "?x=order", "?all=1"):
        for chart in svgs(visitor.get(f"/p/{project.id}/progress{query}").content.decode()):
            if chart.get("role") != "group":
                continue
            _, _, width, height = map(float, chart.get("viewBox").split())
            for circle in chart.iter("circle"):
                assert 0 <= float(circle.get("cx")) <= width
                assert 0 <= float(circle.get("cy")) <= height


def test_the_noise_band_and_the_axis_of_shares_end_at_1(visitor, project, rows):
    add(project, rows, "first", [0.80, 0.94], at=0)
    add(project, rows, "better", [0.98, 1.0], at=1)
    charts = svgs(visitor.get(f"/p/{project.id}/progress").content.decode())
    chart = next(one for one in charts if one.find("rect") is not None and one.get("role") == "group")
    [leaderboard] = study(project).leaderboards
    assert leaderboard.best.score + leaderboard.noise_floor > 1.0
    pairs = zip(chart.findall("line"), chart.findall("text"), strict=False)  # grid lines come first
    heights = {float(line.get("y1")): one.text for line, one in pairs}
    at_1 = next(y for y, text in heights.items() if text == "1")
    assert min(float(band.get("y")) for band in chart.findall("rect")) == at_1
    assert max(float(text) for text in heights.values() if "-" not in text) == 1.0


def test_the_noise_band_of_losses_is_not_cut(project, rows):
    add(project, rows, "a", [1.2, 1.9], mode="min", half_width=0.5)
    add(project, rows, "b", [1.1, 1.6], mode="min", half_width=0.5, at=1)
    [leaderboard] = study(project).leaderboards
    assert leaderboard.bounds == (float("-inf"), float("inf"))


def test_a_score_on_training_rows_is_marked_in_chart_table_and_csv(visitor, project, rows):
    record = rows.record_of("leaky", {"arm": ({}, [0.9, 0.92])})
    for run in record["runs"]:
        run["evals"][0]["on_training_rows"] = True
    rows.add_experiment(project, "leaky", record=record, ended=rows.START)
    [leaderboard] = study(project).leaderboards
    assert leaderboard.dots[0].training_mark == "on training rows"
    text = visitor.get(f"/p/{project.id}/progress").content.decode()
    assert text.count("on training rows") >= 3  # the best so far, the dot's title, the table
    [line] = csv.DictReader(io.StringIO(visitor.get(f"/p/{project.id}/progress.csv").content.decode()))
    assert line["training_mark"] == "on training rows"


@pytest.mark.parametrize("apart", [1.0, 40.0, 300.0, 7200.0, 90000.0, 9e6])
def test_the_time_axis_has_dates_however_close_the_experiments_are(visitor, project, rows, apart):
    for number in range(3):
        add(project, rows, f"e{number}", [0.5 + number / 10, 0.5], at=number * apart / rows.DAY)
    text = visitor.get(f"/p/{project.id}/progress").content.decode()
    dates = re.findall(r">(2026-\d\d-\d\d(?: \d\d:\d\d(?::\d\d)?)?|2027-\d\d-\d\d)</text>", text)
    assert 2 <= len(dates) <= 8 and len(set(dates)) == len(dates)


def test_one_experiment_is_drawn_too(visitor, project, rows):
    add(project, rows, "only", [0.5, 0.6])
    text = visitor.get(f"/p/{project.id}/progress").content.decode()
    assert "Best so far" in text
    assert "NaN" not in text and "nan" not in text
    assert "2026-09-21" in text


def test_csv_has_every_dot(visitor, project, rows):
    add(project, rows, "=a", [0.5])
    add(project, rows, "b", [0.9], at=1)
    lines = list(csv.DictReader(io.StringIO(visitor.get(f"/p/{project.id}/progress.csv").content.decode())))
    assert [line["name"] for line in lines] == ["'=a", "b"]
    assert lines[1]["fate"] in ("kept", "undecided")


def test_hostile_texts_are_only_shown(visitor, project, rows):
    for number, text in enumerate(rows.HOSTILE):
        for copy in range(2):
            add(
                project, rows, text[:300], [0.4 + 0.01 * copy], at=number + copy / 2, parent_experiment_id=text[:300],
                own={"order": text, text[:50]: copy}, other={text[:300]: ({"order": text}, [0.2])},
            )  # fmt: skip
    add(project, rows, "model", [0.5], model=rows.HOSTILE[0], suite="val/<script>alert(1)<")
    for query in ("", "?all=1"):
        text = visitor.get(f"/p/{project.id}/progress{query}").content.decode()
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert "<svg onload" not in text
        assert "x" * 500 not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2066]", text)
        svgs(text)


def test_an_empty_project_says_what_to_do_next(visitor, project):
    text = visitor.get(f"/p/{project.id}/progress").content.decode()
    assert "success_metric: val.pass@1" in text


def test_an_axis_of_numbers_some_arms_lack_has_them_by_size(django_ready):
    from evsys_dashboard.charts_progress import _axis

    _, labels = _axis([16, None, 2, 3.5, "auto"])
    assert [text for text, _ in labels] == ["2", "3.5", "16", "(not set)", "auto"]
