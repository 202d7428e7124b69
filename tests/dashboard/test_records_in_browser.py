"""The pages of experiments, runs, rollouts and comparisons in a real browser."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.usefixtures("django_ready"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SECONDS = 60_000.0
"""Milliseconds that a browser waits at most: a busy machine takes long, and a wait ends when the thing is there."""


@pytest.fixture
def address(sweep: Any) -> Iterator[str]:
    """Django's application behind uvicorn on a free port, on the database of the tests."""
    import uvicorn
    from django.core.asgi import get_asgi_application

    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(get_asgi_application(), lifespan="off", log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}/p/{sweep['sweep'].project_id}"
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def browser(visitor: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes pages of a logged-in browser; a page that reports an error fails the test."""
    from django.conf import settings

    # Playwright runs an event loop in this thread; the tests' own queries are made between its calls.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    cookie = {"name": settings.SESSION_COOKIE_NAME, "value": visitor.cookies[settings.SESSION_COOKIE_NAME].value,
              "url": address}  # fmt: skip
    problems: list[str] = []
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        def open_page(path: str, **context: Any) -> Any:
            made = chromium.new_context(**context)
            made.add_cookies([cookie])
            page = made.new_page()
            page.set_default_timeout(SECONDS)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
            page.goto(f"{address}/{path}")
            return page

        yield open_page
        chromium.close()
    # The route of changes is another helper's; without it the browser logs a 404 for each poll.
    assert [one for one in problems if "404" not in one] == []


def experiment_path(sweep: Any) -> str:
    return f"experiments/{sweep['sweep'].pk}"


def test_curves_appear_and_zoom_asks_for_finer_points(browser, sweep):
    page = browser(experiment_path(sweep))
    page.wait_for_selector('[data-drawn="2"]')
    assert page.locator(".legend button").all_inner_texts() == ["half", "all"]
    chart = page.locator('.curve[data-metric-name="loss"]')
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


def test_a_metric_is_chosen_and_the_raw_line_stays_below_the_smoothed_one(browser, sweep):
    page = browser(experiment_path(sweep))
    page.wait_for_selector('[data-drawn="2"]')
    page.locator("summary", has_text="Metrics").click()
    page.locator('[data-metric][value="grad_norm"]').check()
    page.wait_for_selector('[data-drawn="3"]')
    assert page.locator("[data-smooth-value]").inner_text() == "off"
    page.locator("[data-smooth]").fill("0.9")
    assert page.locator("[data-smooth-value]").inner_text() == "0.90"
    page.locator("[data-log]").check()
    assert page.locator(".curve canvas").count() == 3


def test_rollouts_are_walked_by_keyboard(browser, sweep):
    run = sweep["sweep"].generations.get(name="half__s42")
    page = browser(f"rollouts?run={run.pk}")
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


def test_a_growing_experiment_is_updated_without_a_reload(browser, sweep, address):
    page = browser(experiment_path(sweep))
    page.wait_for_selector('[data-drawn="2"]')
    page.evaluate("window.notReloaded = true")
    row = sweep["sweep"]
    row.notes = [{"kind": "conclusion", "text": "half is not enough", "by": "ada", "ts": "today"}]
    row.source = ""  # else the page reads the notes of the folder again
    row.save()
    page.evaluate("import('/static/dashboard/records.js').then((found) => found.refresh())")
    page.wait_for_selector("text=half is not enough")
    assert page.evaluate("window.notReloaded")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_their_width_and_axe_finds_nothing_serious(browser, sweep, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    run = sweep["sweep"].generations.get(name="half__s42")
    ids = f"e={sweep['slow'].pk}&e={sweep['sweep'].pk}"
    one = run.evals.get(step=30)
    for path in (experiment_path(sweep), f"runs/{run.pk}", f"rollouts?run={run.pk}", f"compare?{ids}",
                 f"rollouts?run={run.pk}&eval={one.pk}&task=god&side=1"):  # fmt: skip
        page = browser(path, color_scheme=scheme, viewport={"width": width, "height": 850})
        if page.locator("[data-curves]").count():
            page.wait_for_selector("[data-drawn]")
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, path
        found = Axe().run(page).response["violations"]
        serious = [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found
                   if one["impact"] in ("serious", "critical")]  # fmt: skip
        assert serious == [], (path, serious)
        page.context.close()
