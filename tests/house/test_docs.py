"""The shape of the docs pages (STYLE.md, "Voice")."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LONGEST_LINE = 120


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_a_line_of_the_docs_has_at_most_120_characters(page):
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert [f"{page.name}:{number}" for number, line in lines if len(line) > LONGEST_LINE] == []
