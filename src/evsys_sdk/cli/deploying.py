"""`evsys deploy`, `deployments` and `export`: weights on their way out of an experiment."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.models import number_type_option
from evsys_sdk.cli.options import (
    NAMED,
    HistoryPlace,
    experiment_argument,
    import_option,
    parse_params,
    place_options,
    verb,
)
from evsys_sdk.cli.output import format_size, print_json, print_text, prints_to_stderr
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED
from evsys_sdk.operations.place import import_extensions

if TYPE_CHECKING:
    from evsys_sdk.config.base import DeploySpec
    from evsys_sdk.experiment.export import Form, NumberType
    from evsys_sdk.history.history import ExperimentEntry
    from evsys_sdk.record.models import ExperimentRecord

arm_option = click.option("--arm", metavar="ARM", help="an arm, or a run of one (default: the verdict's best arm)")


@verb("deploy")
@experiment_argument()
@arm_option
@click.option("--to", "kind", metavar="KIND", help="a deployer, see evsys list deployers (default: the config's)")
@click.option("--set", "params", multiple=True, metavar="PARAM=VALUE", help="a param of the deployer; repeatable")
@import_option
@place_options
def deploy(
    experiment: str, arm: str | None, kind: str | None, params: tuple[str, ...], imports: tuple[str, ...],
    place: HistoryPlace, as_json: bool,
) -> int:  # fmt: skip
    """Ship an arm's weights. What answers at the target is compared with the weights that were scored before it counts;
    a failed comparison is rolled back (exit code 2). The same weights twice change nothing."""
    from evsys_sdk.experiment.deployment import deploy_arm
    from evsys_sdk.report.page import write_page
    from evsys_sdk.report.recorded import recorded_facts

    entry, record = finished(experiment, place)
    with prints_to_stderr():
        import_extensions(list(imports))
        done = deploy_arm(record, entry.record, spec_for(record, kind, params), arm=arm)
        write_page(recorded_facts(record, entry.record))
    if as_json:
        print_json({"experiment": entry.name, "record": str(entry.record), **done.model_dump()})
    else:
        print_text(done.line)
    return EXIT_OK if done.state in ("deployed", "unchanged") else EXIT_RUN_FAILED


def finished(experiment: str, place: HistoryPlace) -> tuple[ExperimentEntry, ExperimentRecord]:
    """The experiment called so, which has ended and left a record."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.record.models import ExperimentRecord

    entry = place.find(experiment).entry
    record = ExperimentRecord.load(entry.record)
    if record is None:
        raise EvsysError(f"{entry.name} is {entry.state} and has no record yet; evsys status shows how far it is")
    return entry, record


def spec_for(record: ExperimentRecord, kind: str | None, params: tuple[str, ...]) -> DeploySpec:
    """The deployer that is meant: the config's block, with the params of the command line over it."""
    from evsys_sdk.config.base import DeploySpec
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.registry import deployers

    given = parse_params(params, example="path=releases")
    block = record.config.get("deploy")
    own = DeploySpec.model_validate(block) if isinstance(block, dict) else None
    if kind is None and own is None:
        known = ", ".join(deployers.names())
        raise EvsysError(f"the config of {record.experiment} has no deploy block; say where to with --to: {known}")
    if own is not None and kind in (None, own.kind):
        return DeploySpec(kind=own.kind, params={**own.params, **given})
    return DeploySpec(kind=str(kind), params=given)


@verb("deployments")
@experiment_argument(f"{NAMED} (default: all experiments)", required=False)
@place_options
def deployments(experiment: str | None, place: HistoryPlace, as_json: bool) -> int:
    """List where weights were deployed, oldest first, with the probe's finding and what was replaced."""
    from evsys_sdk.record.deployments import read_deployments

    history = place.history()
    entries = [place.find(experiment, history).entry] if experiment else list(history.entries)
    found = [(entry.name, one) for entry in entries for one in read_deployments(entry.record)]
    found.sort(key=lambda pair: pair[1].time)
    if as_json:
        print_json({"deployments": [{"experiment": name, **one.model_dump()} for name, one in found]})
        return EXIT_OK
    for name, one in found:
        print_text(f"{one.time} {name}: {one.line}")
    if not found:
        print("nothing was deployed; evsys deploy <experiment> --to <deployer> does it")
    return EXIT_OK


@verb("export")
@experiment_argument()
@arm_option
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(["peft", "merged", "gguf"]),
    help="the adapter; a whole Hugging Face model; one file for llama.cpp (llama, qwen2, qwen3)",
)
@click.option("-o", "--output", metavar="PATH", help="where to write (default: ./<run>-<form> or ./<run>.gguf)")
@number_type_option
@place_options
def export(
    experiment: str, arm: str | None, form: Form, output: str | None, number_type: NumberType, place: HistoryPlace,
    as_json: bool,
) -> int:  # fmt: skip
    """Write the weights of an experiment's best arm to files, and nothing else: evsys model export with the run found
    by the verdict. evsys deploy also checks them and notes them in the record."""
    from evsys_sdk.experiment.deployment import find_shipped_run
    from evsys_sdk.experiment.export import export_run

    entry, record = finished(experiment, place)
    shipped = find_shipped_run(record, entry.record, arm)
    done = export_run(str(shipped.run_dir), form, Path(output) if output else None, number_type=number_type)
    if as_json:
        print_json({"experiment": entry.name, "arm": shipped.arm, **asdict(done)})
    else:
        print(f"{done.path}: {format_size(done.bytes)}, {done.form} of {done.checkpoint or done.base_model}")
    return EXIT_OK
