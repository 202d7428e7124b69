"""`evsys validate` and `evsys run`: is this config right; train, score, conclude."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from evsys_sdk.cli.options import POSITIVE, json_option, override_option, quiet_option, verb
from evsys_sdk.cli.output import check_result_path, print_json, print_text, prints_to_stderr, short_path, write_result
from evsys_sdk.constants import ENV_LAUNCH_FD, EXIT_BAD_INPUT, EXIT_OK, EXIT_RUN_FAILED


@verb("validate")
@click.argument("path", help="the YAML file")
@click.option("--shallow", is_flag=True, help="check the structure only, not blocks, files and verifiers")
@click.option("--deep", is_flag=True, help="the default; accepted for older scripts")
@click.option("--no-code", is_flag=True, help="do not import the project's own code; what it registers is not checked")
@click.option("--strict", is_flag=True, help="settings that nothing will read are errors")
@override_option
@json_option
def validate(
    path: str, shallow: bool, deep: bool, no_code: bool, strict: bool, overrides: tuple[str, ...], as_json: bool
) -> int:
    """Check a config and list its runs: structure, every kind/params block, data file, agent and verifier. This imports
    the project's own code (`imports`, `src/`, agents, tools); --no-code does not."""
    from evsys_sdk.operations.configs import validate_config

    if shallow and deep:
        raise click.UsageError("--shallow and --deep exclude each other; keep one")
    with prints_to_stderr():
        found = validate_config(path, shallow=shallow, strict=strict, run_code=not no_code, overrides=overrides)
    if as_json:
        print_json(found.plain())
        return EXIT_OK
    config, runs = found.config, found.runs
    what = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    if config.search is not None and found.n_trials is not None:
        axes = f"{len(config.search.space)} setting{'' if len(config.search.space) == 1 else 's'}"
        what = f"a search ({config.search.kind}) of {found.n_trials} trials over {axes}"
    print(f"{path}: ok, {what}{f' x {config.n_repeats} seeds' if config.n_repeats > 1 else ''}")
    for name in runs:
        print(f"  {name}")
    for problem in found.warnings:
        text = f"warning: line {problem.line or '?'}  {problem.path}   {problem.message}"
        print_text(text, stream=sys.stderr)
    return EXIT_OK


@verb("run", epilog="Exit codes: 0 all runs completed, 1 the config was refused, 2 a run did not complete.")
@click.argument("path", help="the YAML file")
@click.option("-o", "--output", metavar="FILE", help="also write the JSON summary to FILE")
@click.option("--dry", is_flag=True, help="rehearse: 2 steps, 4 tasks, results under <output_dir>/dry")
@click.option("--steps", type=POSITIVE, metavar="N", help="at most N training steps per run")
@click.option(
    "--fresh",
    is_flag=True,
    help="start every run again; without it, finished runs are reused and an interrupted run resumes from its last "
    "checkpoint",
)
@click.option("--fork", is_flag=True, help="where the settings have changed since the launch, run a child experiment")
@override_option
@click.option("--strict", is_flag=True, help="settings that nothing reads are errors")
@click.option(
    "--detach",
    is_flag=True,
    help="run in a separate process and print its launch record; see evsys status, logs and stop",
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="print the summary (or the launch record) as JSON")
@click.pass_obj
def run(
    words: list[str], path: str, output: str | None, dry: bool, steps: int | None, fresh: bool, fork: bool,
    overrides: tuple[str, ...], strict: bool, detach: bool, quiet: bool, as_json: bool,
) -> int:  # fmt: skip
    """Run every arm and seed of a config. Results go to stdout, progress and logs to stderr."""
    # Set in a process that `run_detached` started: where that one waits for the launch. Our children do not inherit it.
    starter = int(text) if (text := os.environ.pop(ENV_LAUNCH_FD, None)) else None
    if detach and starter is None:
        return run_detached(words, as_json=as_json)
    if starter is not None:
        os.set_inheritable(starter, False)
    from evsys_sdk.cli.run_log import RunLog
    from evsys_sdk.cli.summary import print_summary
    from evsys_sdk.config.sweep import REHEARSALS
    from evsys_sdk.errors import ConfigError, RunLocked
    from evsys_sdk.experiment.experiment import Experiment, RunOptions
    from evsys_sdk.experiment.outcome import strict_problems, summarise
    from evsys_sdk.files import to_json
    from evsys_sdk.run.status import resume_lines, unscored_lines

    log = RunLog(["evsys", *words], starter=starter)
    if output:
        check_result_path(output)
    experiment = Experiment.from_yaml(path, overrides=overrides)
    with log.display(live=not as_json, quiet=quiet) as watchers:
        options = RunOptions(
            max_steps=steps,
            dry=dry,
            fresh=fresh,
            fork=fork,
            strict=strict,
            watchers=watchers,
            launched=log.launched,
        )
        try:
            result = experiment.run(options)
        except RunLocked as exc:
            config = experiment.config
            ref = str(Path(config.output_dir) / REHEARSALS) if dry else config.name
            raise RunLocked(f"{exc}\nnext: evsys status {shlex.quote(ref)}") from None
    log.summary(result)
    summary = to_json(summarise(result).as_dict(), indent=2)
    if output:
        write_result(output, summary + "\n")
    if as_json and not detach:
        print(summary)
    elif not detach:
        print_summary(result, brief=quiet)
    for line in [*unscored_lines(result.runs), *resume_lines(result.runs, log.command)]:
        print(line, file=sys.stderr)
    if not result.completed:
        return EXIT_RUN_FAILED
    if strict and result.unread_settings:
        print_text(str(ConfigError(path, strict_problems(result, experiment.config))), stream=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


def run_detached(words: Sequence[str], *, as_json: bool) -> int:
    """Start `evsys` with these words in a new session and print its launch record; it says itself why it is refused."""
    from evsys_sdk.operations.launch import launch_detached

    found = launch_detached(words)
    if found.record is None and found.code > 0:  # it has said why on the stderr that it shares
        return found.code
    if found.record is None:
        print(f"the process ended before it was launched (signal {-found.code})", file=sys.stderr)
        return EXIT_RUN_FAILED
    launch = found.record
    if as_json:
        print_json(launch)
        return EXIT_OK
    from evsys_sdk.record.processes import reference_of

    ref = reference_of(launch["experiment"], Path(launch["record"]))
    print(f"{launch['experiment']}: launched as process {launch['pid']}")
    if launch["log"]:
        print(f"log: {short_path(Path(launch['log']))}")
    print(f"next: evsys status {ref}, evsys logs {ref} -f, evsys stop {ref}")
    return EXIT_OK
