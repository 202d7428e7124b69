"""Lab, Progress, Settings, datasets and benchmarks in a real browser: keyboard, URL, colours, phone, live rows, axe."""

from __future__ import annotations

import re
import time

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="browser tests need playwright").expect
LONG = 60_000
"""Milliseconds that anything may take on a busy machine."""
expect.set_options(timeout=LONG)


def row(page, one):
    return page.locator(f'[data-row="{one.id}"]')


def cursor(page):
    return page.locator("[data-row].cursor a[data-open]")


def test_a_walk_by_keyboard_through_the_list(open_page, project, rows):
    experiments = [rows.add_experiment(project, name) for name in ("oldest", "middle", "newest")]
    page = open_page(f"/p/{project.id}/")
    page.keyboard.press("j")
    expect(cursor(page)).to_have_text("newest")
    expect(cursor(page)).to_be_focused()
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(cursor(page)).to_have_text("oldest")
    page.keyboard.press("k")
    expect(cursor(page)).to_have_text("middle")
    expect(page.locator("[data-compare-button]")).to_be_disabled()
    page.keyboard.press("x")
    expect(page.locator("[data-selection-count]")).to_have_text("2")
    assert row(page, experiments[1]).locator("input").is_checked()
    page.keyboard.press("Escape")
    expect(page.locator("[data-selection]")).to_be_hidden()
    expect(cursor(page)).to_have_count(0)
    page.keyboard.press("/")
    expect(page.locator("[data-filter]")).to_be_focused()
    page.keyboard.type("jkxc?")
    expect(page.locator("[data-filter]")).to_have_value("jkxc?")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    expect(page.locator("#help")).to_contain_text("status:running,failed")
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()


def test_the_selected_experiments_are_compared(open_page, project, rows):
    one, two = rows.add_experiment(project, "one"), rows.add_experiment(project, "two")
    page = open_page(f"/p/{project.id}/")
    row(page, one).locator("input[data-select]").check()
    row(page, two).locator("input[data-select]").check()
    page.keyboard.press("c")
    page.wait_for_url(re.compile(rf"/p/{project.id}/compare\?e={one.id}&e={two.id}$"), timeout=LONG)


def test_enter_opens_the_row_under_the_cursor(open_page, project, rows):
    one = rows.add_experiment(project, "one")
    page = open_page(f"/p/{project.id}/")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"/p/{project.id}/experiments/{one.id}$"), timeout=LONG)


def test_filter_group_order_and_columns_are_in_the_url(open_page, project, rows):
    rows.add_experiment(project, "plain", best_value=0.2)
    rows.add_experiment(project, "tagged", tags=["lora"], model="qwen3", best_value=0.8)
    page = open_page(f"/p/{project.id}/")
    page.fill("[data-filter]", "tag:lora score>=0.5")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"\?q=tag%3Alora\+score%3E%3D0\.5$"), timeout=LONG)
    expect(page.locator("[data-row]")).to_have_count(1)
    page.select_option("select[name=group]", "model")
    page.wait_for_url(re.compile("group=model"), timeout=LONG)
    expect(page.locator("tr.group")).to_contain_text("qwen3")
    page.click("text=Columns")
    page.check("input[name=cols][value=model]")
    page.click("text=Show these")
    page.wait_for_url(re.compile("cols="), timeout=LONG)
    page.click("thead >> text=Model")
    page.wait_for_url(re.compile("sort=model"), timeout=LONG)
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Model")
    address = page.url
    page.reload()
    assert page.url == address
    assert "q=tag%3Alora" in address and "group=model" in address
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page.locator("[data-filter]")).to_have_value("tag:lora score>=0.5")


def test_more_rows_come_on_scroll_and_none_twice(open_page, project, rows):
    rows.add_study(project, 230)
    page = open_page(f"/p/{project.id}/")
    expect(page.locator("[data-row]").first).to_be_visible()
    for wanted in (200, 230):
        page.locator("[data-more]").scroll_into_view_if_needed()
        expect(page.locator("[data-row]").nth(wanted - 1)).to_be_attached(timeout=LONG)
    expect(page.locator("[data-row]")).to_have_count(230)
    expect(page.locator("[data-more]")).to_have_count(0)
    ids = page.eval_on_selector_all("[data-row]", "found => found.map(one => one.dataset.row)")
    assert len(set(ids)) == 230


def test_a_row_changes_and_a_new_one_appears_without_reload(open_page, project, rows):
    one = rows.add_experiment(project, "running one", status="running")
    page = open_page(f"/p/{project.id}/")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.evaluate("window.isSamePage = true")
    one.status, one.verdict, one.best_value, one.updated = "completed", "supported", 0.875, time.time()
    one.save()
    new = rows.add_experiment(project, "brand new", updated=time.time())
    expect(row(page, one).locator(".badge")).to_have_text("supported", timeout=LONG)
    expect(row(page, one)).to_contain_text("0.875")
    expect(row(page, new)).to_be_visible(timeout=LONG)
    # In its place, the newest first; selection and cursor stay.
    ids = page.eval_on_selector_all("[data-row]", "found => found.map(one => one.dataset.row)")
    assert ids == [new.id, one.id]
    assert row(page, one).locator("input").is_checked()
    expect(cursor(page)).to_have_text("running one")
    assert page.evaluate("window.isSamePage")


def test_a_row_that_leaves_the_filter_goes(open_page, project, rows):
    one = rows.add_experiment(project, "one", status="running")
    rows.add_experiment(project, "two", status="running")
    page = open_page(f"/p/{project.id}/?q=status:running")
    expect(page.locator("[data-row]")).to_have_count(2)
    one.status, one.updated = "completed", time.time()
    one.save()
    expect(row(page, one)).to_have_count(0, timeout=LONG)
    expect(page.locator("[data-row]")).to_have_count(1)


def test_the_first_experiment_replaces_the_empty_page(open_page, project, rows):
    page = open_page(f"/p/{project.id}/")
    expect(page.locator(".empty")).to_contain_text("No experiment yet")
    one = rows.add_experiment(project, "first", updated=time.time())
    expect(row(page, one)).to_be_visible(timeout=LONG)
    expect(page.locator(".empty")).to_have_count(0)


def test_colours_follow_the_system_and_the_toggle_is_remembered(open_page, project, rows):
    rows.add_experiment(project, "a")
    dark, light = "rgb(19, 20, 24)", "rgb(251, 251, 252)"
    page = open_page(f"/p/{project.id}/", color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == dark
    page.click("[data-theme-toggle]")
    expect(page.locator("[data-theme-toggle]")).to_have_text("Light")
    assert page.evaluate(background) == light
    page.reload()
    expect(page.locator("[data-theme-toggle]")).to_have_text("Light")
    assert page.evaluate(background) == light
    page.click("[data-theme-toggle]")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == dark
    page.click("[data-theme-toggle]")
    expect(page.locator("[data-theme-toggle]")).to_have_text("Auto")
    assert page.evaluate(background) == light


def fill(project, rows) -> None:
    """A project with something on every page, hostile texts among it."""
    from evsys_dashboard.models import SuiteRow, SuiteVersion

    rows.add_study(project, 30)
    for number, text in enumerate(rows.HOSTILE):
        rows.add_experiment(
            project, text[:300], hypothesis=text, tags=[text], best_value=0.5, best_arm=text[:300], metric=text[:200],
            record=rows.record_of(text[:200], {text[:100]: ({"order": text}, [0.4, 0.5])}),
        )  # fmt: skip
        suite = SuiteVersion.objects.create(
            id=f"{project.id}-{number}", project=project, kind="benchmark", name=text[:300], split="test", created=1.0,
            complete=True, description=text, lineage={text[:90]: text}, version=text[:50], sha256="ab" * 32, n_rows=1,
        )  # fmt: skip
        SuiteRow.objects.create(suite=suite, number=0, text=text)


PAGES = ("", "?group=tag", "progress", "datasets", "benchmarks", "suites/{id}-1", "suites/{id}-9", "settings")


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_no_hostile_text_runs(open_page, project, rows, key, color_scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    fill(project, rows)
    for place in PAGES:
        page = open_page(f"/p/{project.id}/{place.format(id=project.id)}", color_scheme=color_scheme)
        page.on("dialog", lambda dialog: pytest.fail(f"a script of a text ran: {dialog.message}"))
        for summary in page.locator("main details > summary").all():
            summary.click()
        found = axe.run(page).response["violations"]
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], place
        page.close()


@pytest.mark.parametrize("place", PAGES)
def test_a_phone_needs_no_sideways_scrolling(open_page, project, rows, key, place):
    fill(project, rows)
    page = open_page(f"/p/{project.id}/{place.format(id=project.id)}", width=360, height=780)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    expect(page.locator("nav[aria-label=Pages] a", has_text="Settings")).to_be_in_viewport()


def test_a_phone_shows_the_newest_experiment_of_a_chart_first(open_page, project, rows):
    for number in range(12):
        ended = rows.START + number * rows.DAY
        record = rows.record_of(f"e{number}", {"arm": ({}, [0.5, 0.55])}, ended=ended)
        rows.add_experiment(project, f"e{number}", record=record, created=ended, ended=ended)
    page = open_page(f"/p/{project.id}/progress", width=360, height=780)
    expect(page.locator("svg.chart a circle")).to_have_count(12)
    # The chart is wider than the phone, and begins at its right end.
    box = page.locator("svg.chart a circle").last.bounding_box()
    assert 0 < box["x"] < 360


def test_a_key_is_made_and_revoked_in_the_browser(open_page, project):
    page = open_page(f"/p/{project.id}/settings")
    page.fill("form[action$=keys] input[name=name]", "laptop")
    page.select_option("select[name=scope]", "agent")
    page.click("text=Make a key")
    expect(page.locator("[data-new-key]")).to_contain_text("EVSYS_API_KEY=evk_")
    page.goto(f"/p/{project.id}/settings")
    expect(page.locator("[data-new-key]")).to_have_count(0)
    page.click("button:has-text('Revoke')")
    expect(page.locator("main table")).to_contain_text("revoked")
    assert project.keys.get().revoked is not None


def test_a_dot_of_the_progress_chart_opens_its_experiment(open_page, project, rows):
    rows.add_study(project, 12)
    page = open_page(f"/p/{project.id}/progress")
    dot = page.locator("svg.chart a").first
    title = dot.locator("title").text_content()
    one = project.experiments.get(name=title.partition(":")[0])
    dot.locator("circle").click()
    page.wait_for_url(re.compile(rf"/p/{project.id}/experiments/{one.id}$"), timeout=LONG)
