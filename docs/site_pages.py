"""Pages of the site that are not files of docs/: README, examples, and a reference page per extension.

In: the repository and the registries. Out: files that mkdocs renders beside those of docs/, and links that fit their
new places. mkdocs loads this as a hook (mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from evsys_sdk.cli.registries import schema_rows
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.explain import described_schema
from evsys_sdk.registry import REGISTRIES, Registry, load_all

ROOT = Path(__file__).parents[1]
MOVED = {"README.md": "index.md"}
"""Files of the repository's root that have another name on the site."""
ABOUT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
SEARCH_WORKER = re.compile(r'src="https://[^"/]+/iframe-worker/shim"')
"""As the theme's offline plugin writes it; version 1.0.4 of that package, with its licence, is docs/vendor/."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)]*)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that follow from the repository."""
    load_all()
    filled = {
        "EXAMPLES": [str(path.relative_to(ROOT)) for path in _examples()],
        "DECISIONS": ["decisions/index.md", *(f"decisions/{path.name}" for path in _decisions())],
        "REFERENCE": [
            {"The YAML": "reference/config.md"},
            *(
                {one.plural.replace("_", " ").capitalize(): [f"reference/{one.kind}/{name}.md" for name in one.names()]}
                for one in REGISTRIES.values()
                if one.names()
            ),
        ],
    }
    config.nav = _fill(config.nav, filled)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the files of the examples that their pages link to."""
    for name in ("README.md", *ABOUT):
        files.append(File.generated(config, MOVED.get(name, name), content=(ROOT / name).read_text()))
    for page in _examples():
        files.append(File.generated(config, str(page.relative_to(ROOT)), content=page.read_text()))
        for match in LINK.finditer(page.read_text()):
            target = (page.parent / match[2]).resolve()
            if target.is_file() and target.suffix != ".md" and target.is_relative_to(ROOT / "examples"):
                name = str(target.relative_to(ROOT))
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, content=target.read_bytes()))
    decisions = [f"- [{path.read_text().splitlines()[0].removeprefix('# ')}]({path.name})" for path in _decisions()]
    listed = "# Decisions\n\n" + "\n".join(decisions) + "\n"
    files.append(File.generated(config, "decisions/index.md", content=listed))
    files.append(File.generated(config, "reference/config.md", content=_config_page()))
    for registry in REGISTRIES.values():
        for name in registry.names():
            page_name = f"reference/{registry.kind}/{name}.md"
            files.append(File.generated(config, page_name, content=_extension_page(registry, name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository as links between pages of the site."""
    source = page.file.src_uri
    # Where the page lies in the repository, from which its links were written.
    back = {site: name for name, site in MOVED.items()}
    home = back.get(source, source)
    in_docs = (ROOT / "docs" / source).is_file()
    folder = posixpath.dirname(posixpath.join("docs", source) if in_docs else home)

    def rewrite(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, link))
        if target == ".":
            target = "README.md"
        if (ROOT / target).is_dir():
            target = posixpath.join(target, "README.md" if (ROOT / target / "README.md").is_file() else "index.md")
        on_site = MOVED.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(on_site) is None:
            return match[0]  # mkdocs reports it as broken
        return f"{before}{posixpath.relpath(on_site, posixpath.dirname(source) or '.')}{after}"

    return LINK.sub(rewrite, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the worker that searches from files out of this repository: the theme would fetch it from the internet."""
    local = posixpath.relpath("vendor/iframe-worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return SEARCH_WORKER.sub(f'src="{local}"', output)


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs/decisions").glob("*.md"))


def _examples() -> list[Path]:
    return [ROOT / "examples/README.md", *sorted((ROOT / "examples").glob("[0-9]*/README.md"))]


def _fill(nav: Any, filled: dict[str, list[Any]]) -> Any:
    if isinstance(nav, list):
        return [_fill(one, filled) for one in nav]
    if isinstance(nav, dict):
        return {key: _fill(value, filled) for key, value in nav.items()}
    return filled.get(nav, nav)


def _extension_page(registry: Registry, name: str) -> str:
    entry = registry.entries[name]
    about = "\n".join(line.strip() for line in (entry.target.__doc__ or "").strip().splitlines())
    schema = registry.schema(name)
    return (
        f"# {name}\n\n{registry.kind.replace('_', ' ').capitalize()}. {about}\n\n"
        f"{_table(schema)}\n\nOn the command line: `evsys schema {registry.kind} {name}`. Module: `{entry.origin}`.\n"
    )


def _config_page() -> str:
    return f"# The YAML, key by key\n\n{_table(described_schema(ExperimentConfig))}\n"


def _table(schema: dict[str, Any]) -> str:
    rows = list(schema_rows(schema, schema.get("$defs", {})))
    if not rows:
        return "It takes no params."
    lines = ["| key | type | default | what it does |", "|---|---|---|---|"]
    for key, kind, default, text in rows:
        cells = [f"`{key}`", kind, f"`{default}`" if default else "", text]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text for a table's cell: no bar ends it, and what is not code holds no tag."""
    parts = text.replace("|", "\\|").split("`")  # every second part is code
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))
