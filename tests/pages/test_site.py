"""`make docs`: the site builds without a warning, has a page for every extension, and is searched without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evsys_sdk.registry import REGISTRIES, load_all

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_extension_has_a_page(site):
    load_all()
    for registry in REGISTRIES.values():
        for name, entry in registry.entries.items():
            if entry.origin.startswith("evsys_sdk"):
                assert (site / "reference" / registry.kind / f"{name}.html").is_file(), (registry.kind, name)
    page = (site / "reference/algorithm/sft.html").read_text()
    assert "<code>learning_rate</code>" in page and "Of the optimiser, at its highest." in page


def test_every_page_of_docs_is_in_the_navigation(site):
    start = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in start, f"docs/{page.name} is not in the nav of mkdocs.yml"


class Links(HTMLParser):
    """Addresses that a page loads or leads to, and the ids it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag in ("script", "img", "link") and (address := given.get("src") or given.get("href")):
            self.loads.append(address)
        if tag == "a" and given.get("href"):
            self.leads.append(str(given["href"]))


def test_no_link_is_broken_and_no_page_loads_anything_from_elsewhere(site):
    pages = {}
    for path in site.rglob("*.html"):
        found = Links()
        found.feed(path.read_text())
        pages[path] = found
    for path, found in pages.items():
        if path.name == "404.html":  # its addresses are absolute, for a server
            continue
        for address in found.loads:
            assert not re.match(r"(https?:)?//", address), f"{path} loads {address}"
            assert (path.parent / address.partition("?")[0]).is_file(), f"{path} loads {address}, which is not there"
        for address in found.leads:
            if re.match(r"[a-z]+:", address):
                continue
            file, _, anchor = address.partition("#")
            target = (path.parent / file).resolve() if file not in ("", ".") else path
            assert target.is_file(), f"{path} leads to {address}, which is not there"
            if anchor and not anchor.startswith("__") and target in pages:
                assert anchor in pages[target].ids, f"{path} leads to {address}: no such place on that page"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_the_search_finds_a_page_from_files_alone(site):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        try:
            page = browser.new_page()
            page.context.set_offline(True)
            page.goto(f"file://{site}/index.html")
            page.locator("input.md-search__input").fill("importance_sampling")
            hit = page.locator(".md-search-result__link").first
            hit.wait_for(timeout=120_000)
            assert hit.get_attribute("href")
        finally:
            browser.close()
