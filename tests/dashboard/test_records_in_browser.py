"""The pages of experiments, runs, rollouts and comparisons in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("django_ready")


def experiment_path(sweep: Any) -> str:
    return f"/p/{sweep['sweep'].project_id}/experiments/{sweep['sweep'].pk}"


def test_curves_appear_and_zoom_asks_for_finer_points(open_page, sweep):
    page = open_page(experiment_path(sweep))
    page.wait_for_selector('[data-drawn="2"]')
    assert page.locator(".legend button").all_inner_texts() == ["half", "all"]
    chart = page.locator('.curve[data-metric-name="loss"]')
    chart.scroll_into_view_if_needed()  # the mouse only reaches what is on the screen
    box = chart.locator(".u-over").bounding_box()
    with page.expect_response(lambda answer: "from=" in answer.url) as found:
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=5)
        page.mouse.up()
    steps = found.value.json()["series"][0]["step"]
    assert 0 < len(steps) < 30 and steps[0] > 5
    page.wait_for_selector('.curve[data-metric-name="loss"][data-range*="-"]')
    with page.expect_response(lambda answer: "/curves" in answer.url and "from=" not in answer.url):
        page.mouse.dblclick(box["x"] + 100, box["y"] + 50)


def test_a_metric_is_chosen_and_the_raw_line_stays_below_the_smoothed_one(open_page, sweep):
    page = open_page(experiment_path(sweep))
    page.wait_for_selector('[data-drawn="2"]')
    page.locator("summary", has_text="Metrics").click()
    page.locator('[data-metric][value="grad_norm"]').check()
    page.wait_for_selector('[data-drawn="3"]')
    assert page.locator("[data-smooth-value]").inner_text() == "off"
    page.locator("[data-smooth]").fill("0.9")
    assert page.locator("[data-smooth-value]").inner_text() == "0.90"
    page.locator("[data-log]").check()
    assert page.locator(".curve canvas").count() == 3


def test_rollouts_are_walked_by_keyboard(open_page, sweep):
    run = sweep["sweep"].generations.get(name="half__s42")
    page = open_page(f"/p/{run.project_id}/rollouts?run={run.pk}")
    title = page.locator("#transcript-title")
    assert title.inner_text() == "Task bab"
    for key, task in (("n", "bad"), ("j", "baf"), ("p", "bad"), ("k", "bab")):
        page.keyboard.press(key)
        page.wait_for_function(
            "task => document.querySelector('#transcript-title').textContent === 'Task ' + task", arg=task
        )
    page.locator("select[name=passed]").select_option("0")
    page.wait_for_url("**passed=0**")
    assert page.locator("[data-rollout]").count() == 8
    page.go_back()


def test_a_growing_experiment_is_updated_without_a_reload(open_page, sweep):
    from evsys_dashboard.ingest import next_stamp

    page = open_page(experiment_path(sweep))
    page.wait_for_selector('[data-drawn="2"]')
    page.evaluate("window.notReloaded = true")
    row = sweep["sweep"]
    row.notes = [{"kind": "conclusion", "text": "half is not enough", "by": "ada", "ts": "today"}]
    row.source = ""  # else the page reads the notes of the folder again
    row.updated = next_stamp()
    row.save()
    page.wait_for_selector("text=half is not enough")
    assert page.evaluate("window.notReloaded")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_their_width_and_axe_finds_nothing_serious(open_page, sweep, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    run = sweep["sweep"].generations.get(name="half__s42")
    ids = f"e={sweep['slow'].pk}&e={sweep['sweep'].pk}"
    one = run.evals.get(step=30)
    for part in (f"experiments/{sweep['sweep'].pk}", f"runs/{run.pk}", f"rollouts?run={run.pk}", f"compare?{ids}",
                 f"rollouts?run={run.pk}&eval={one.pk}&task=god&side=1"):  # fmt: skip
        path = f"/p/{run.project_id}/{part}"
        page = open_page(path, color_scheme=scheme, width=width)
        if page.locator("[data-curves]").count():
            page.wait_for_selector("[data-drawn]")
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, path
        found = Axe().run(page).response["violations"]
        serious = [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found
                   if one["impact"] in ("serious", "critical")]  # fmt: skip
        assert serious == [], (path, serious)
