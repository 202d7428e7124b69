"""`evsys init-project` and `evsys new-experiment`: a research project, and the next experiment in it."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.options import HistoryPlace, complete_experiments, json_option, place_options, verb
from evsys_sdk.cli.output import print_json, short_path
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.scaffold.experiment import ConfigOrigin


def read_date(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime.date:
    try:
        return datetime.datetime.strptime(value, "%Y%m%d").date() if value else datetime.date.today()
    except ValueError:
        raise click.BadParameter(f"is {value!r}; give a date as YYYYMMDD, e.g. 20261231") from None


date_option = click.option(
    "--date", callback=read_date, metavar="YYYYMMDD", help="the date in the experiment's name (default: today)"
)


@verb("init-project")
@click.argument("name", help="the folder to make; `.` adopts the current one")
@date_option
@json_option
def init_project(name: str, date: datetime.date, as_json: bool) -> int:
    """Make a research project: data/, src/, experiments/ and a small example that runs as it is. Files that exist are
    kept and listed."""
    from evsys_sdk.scaffold.project import init_project as scaffold

    if not name:  # an unset variable of a script, which Path would take for the current folder
        raise click.BadParameter("is empty; name a folder, or `.` for the current one", param_hint="NAME")
    made = scaffold(Path(name), date=date)
    config = f"experiments/{made.experiment}/config.yaml"
    enter = "" if made.root == Path.cwd() else f"cd {shlex.quote(os.path.relpath(made.root))} && "
    can_train = find_spec("torch") is not None
    if as_json:
        about = {"root": str(made.root), "name": made.name, "experiment": made.experiment}
        files = {"written": made.written, "kept": made.kept, "notes": made.notes}
        print_json({**about, "config": str(made.root / config), **files, "has_torch": can_train})
        return EXIT_OK
    print(f"{made.name}: wrote {len(made.written)} files in {short_path(made.root)}, kept {len(made.kept)}")
    for path in made.kept:
        print(f"  kept {path}")
    for note in made.notes:
        print(f"note: {note}")
    if not can_train:
        print(
            "note: Training here needs torch: pip install 'evsys-sdk[local]'. Without it: --set run.backend.kind=mock"
        )
    print(f"next: {enter}evsys run {config}{'' if can_train else ' --set run.backend.kind=mock'}")
    return EXIT_OK


@verb("new-experiment")
@click.argument("slug", help="what it is about, such as higher_rank")
@click.option(
    "--from",
    "source",
    metavar="EXPERIMENT",
    shell_complete=complete_experiments,
    help="copy the config of this one and name it as the parent: its name, the beginning of it, its slug, or the path "
    "of its config, folder or record",
)
@click.option("--hypothesis", metavar="TEXT", help="why it is run: metadata.hypothesis of the new config")
@date_option
@place_options
def new_experiment(
    slug: str, source: str | None, hypothesis: str | None, date: datetime.date, place: HistoryPlace, as_json: bool
) -> int:
    """Write experiments/<yyyymmdd>_<slug>/ with config.yaml and run.py. With --from, the diff between the two configs
    is the change: name, output folder and parent are set, everything else stays as written."""
    from evsys_sdk.config.project import project_root
    from evsys_sdk.scaffold.experiment import new_experiment as scaffold

    root = project_root(Path.cwd())
    origin = find_origin(root, source, place) if source is not None else None
    made = scaffold(root, slug, date=date, origin=origin, hypothesis=hypothesis)
    if as_json:
        about = {"name": made.name, "parent": made.parent, "config": str(made.config), "script": str(made.script)}
        print_json({**about, "notes": made.notes})
        return EXIT_OK
    child_of = f" (child of {made.parent})" if made.parent else ""
    print(f"wrote {short_path(made.config)} and {made.script.name}{child_of}")
    for note in made.notes:
        print(f"note: {note}")
    enter = "" if root == Path.cwd() else f"cd {shlex.quote(os.path.relpath(root))} && "
    print(f"next: {enter}evsys validate {shlex.quote(str(made.config.relative_to(root)))}")
    return EXIT_OK


def find_origin(root: Path, ref: str, place: HistoryPlace) -> ConfigOrigin:
    """The config that `ref` means: a path, a folder of `experiments/` by name or slug, or an experiment's record."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.history.history import slug_of
    from evsys_sdk.scaffold.experiment import CONFIG, origin_at, origin_of

    path = Path(ref)
    if path.suffix in (".yaml", ".yml") or (path / CONFIG).is_file():
        return origin_at(path)
    folders = [file.parent for file in sorted(root.glob(f"experiments/*/{CONFIG}"))]
    named = [folder for folder in folders if ref in (folder.name, slug_of(folder.name))]
    begin = named or [folder for folder in folders if ref and folder.name.startswith(ref)]
    if named or len(begin) == 1:
        if len(named) > 1:
            print(f"note: {len(named)} experiments have the slug {ref}; taking {named[-1].name}", file=sys.stderr)
        return origin_at(begin[-1])
    try:
        return origin_of(place.find(ref).entry)
    except EvsysError as exc:
        known = ", ".join(folder.name for folder in begin or folders)
        raise EvsysError(f"{exc}\nin experiments/: {known or 'none'}") from None
