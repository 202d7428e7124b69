"""Another chat template than the model's own: `chat_template` of a benchmark entry.

In: Jinja text, a file of it, or the name of a tinker-cookbook renderer. Out: a renderer. Which of the three is meant is
decided only here: text has Jinja's braces in it, a file ends as such files do, everything else is a name.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evsys_sdk.errors import BackendError, DataError, closest, shorten
from evsys_sdk.surface import Tokenizer
from evsys_sdk.training.render import ChatRenderer

WHERE = "chat_template"
ENDINGS = (".jinja", ".jinja2", ".j2")
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Of the assistant's words, for training: a tag that Jinja itself does not know."""


def renderer_with(template: str, tokenizer: Tokenizer, folders: Sequence[Path]) -> ChatRenderer:
    """A renderer by this template instead of the tokenizer's own."""
    text = template_text(template, folders)
    if text is None:
        from evsys_sdk.training.cookbook import CookbookRenderer

        return CookbookRenderer(template, tokenizer, WHERE)
    change: Any = getattr(tokenizer, "with_template", None)
    if change is None:
        raise BackendError(f"{WHERE}: a Hugging Face tokenizer is needed, and this backend has none; leave it out")
    return ChatRenderer(change(text))


def template_text(template: str, folders: Sequence[Path]) -> str | None:
    """The Jinja text; None where `template` names a renderer."""
    if "{%" in template or "{{" in template:
        return template
    if not template.endswith(ENDINGS):
        return None
    for folder in folders:
        if (folder / template).is_file():
            return (folder / template).read_text(encoding="utf-8")
    beside = {path.name for folder in folders for path in (folder / template).parent.glob("*")}
    near = closest(Path(template).name, beside)
    hint = f"; closest: {near}" if near else ""
    raise DataError(f"no template at {shorten(repr(template))}; looked in {', '.join(map(str, folders))}{hint}")


def template_problem(template: str, folders: Sequence[Path]) -> str | None:
    """What is wrong with it, as far as that can be said without a model."""
    try:
        text = template_text(template, folders)
    except (DataError, OSError, UnicodeDecodeError) as exc:
        return str(exc)
    if text is None:
        from evsys_sdk.training.cookbook import renderer_problem

        known = renderer_problem(template, WHERE)
        return known and f"{known}; or give Jinja text, or a file that ends in {' or '.join(ENDINGS)}"
    return _syntax_problem(text)


def _syntax_problem(text: str) -> str | None:
    if importlib.util.find_spec("jinja2") is None:
        return None  # the tokenizer that brings it will say so
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
    except TemplateSyntaxError as exc:
        return f"it is no Jinja template: line {exc.lineno}: {exc.message}"
    return None
