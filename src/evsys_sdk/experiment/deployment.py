"""Ship the weights of an experiment, and note what came of it.

In: an experiment's record, an arm and a deployer. Out: a `RecordedDeployment` in `<experiment>.deployments.jsonl`. The
intent is written before anything is done; a deployment counts when a probe found that what answers at the target is
what was scored. A failed probe leaves the alias where it was.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from evsys_sdk import registry
from evsys_sdk.concurrency import run_async
from evsys_sdk.config.base import KindSpec
from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import Cancelled, EvsysError, error_boundary, need, not_known
from evsys_sdk.experiment.model_card import SHIPPED, model_card
from evsys_sdk.protocols import Deployer, Deployment, Fingerprint, ModelArtifact, ProbeCase
from evsys_sdk.record.deployments import RecordedDeployment, RecordedProbe, add_deployment
from evsys_sdk.record.layout import hold, stem_of
from evsys_sdk.record.models import ExperimentRecord, RecordedRun, RunRecord
from evsys_sdk.redaction import learn_from_settings
from evsys_sdk.run.open_model import ModelRef, Target, find_target, open_model
from evsys_sdk.training_api import ModelInput, SamplingClient, SamplingParams

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Question: What is 17 + 25?\nAnswer:",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "def add(a, b):\n    return a + b\n",
)
"""What every probe asks. Fixed, so that fingerprints of different days can be compared."""
TOP = 10
GREEDY_TOKENS = 8
NAME_DIGITS = 12
LONGEST_SLUG = 40


class DeployError(EvsysError):
    """A deployment that could not be made."""


def why_not_shipped(record: ExperimentRecord) -> str | None:
    """Why the experiment's best arm is not to be deployed by itself; None where it is."""
    if record.best_arm is None:
        why = (record.verdict.model_extra or {}).get("why_no_best")
        return "the verdict names no best arm" + (f" ({why})" if why else "")
    judged = next((arm for arm in record.verdict.arms if arm.arm == record.best_arm), None)
    against = {
        "untrained model": judged and judged.vs_untrained,
        "baseline arm": judged and judged.vs_baseline,
    }
    found = {name: one.verdict for name, one in against.items() if one}
    # Of several arms the verdict has compared the best with the others. One arm alone must be shown to be better than
    # what was there before: the untrained model.
    if not found and len(record.verdict.arms) < 2:
        return (
            f"nothing was compared with the arm {record.best_arm}; set baseline: true on a benchmark, so that the "
            "untrained model is scored too"
        )
    for name, verdict in found.items():
        if verdict == "worse" or (verdict != "better" and name == "untrained model"):
            said = "is worse than" if verdict == "worse" else "was not shown to be better than"
            return f"the arm {record.best_arm} {said} the {name}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedRun:
    """The run whose weights are meant by an experiment and an arm."""

    arm: str
    run_dir: Path
    run: RunRecord
    target: Target


def find_shipped_run(record: ExperimentRecord, path: Path, arm: str | None = None) -> ShippedRun:
    """The run to take of `arm` (an arm's name, or a run's), by default of the best arm.

    Of an arm with several seeds, the first completed seed: it was fixed before there were scores, so its score is not
    one that was picked."""
    arms = record.runs_of()
    if arm is None:
        arm = record.best_arm
        if arm is None:
            names = ", ".join(found.arm for found, _ in arms)
            raise EvsysError(f"{record.experiment}: {why_not_shipped(record)}; name an arm with --arm: {names}")
    of_arm = next((runs for found, runs in arms if found.arm == arm), None)
    if of_arm is None:
        named = {run.run_id.rpartition("/")[2]: (found.arm, run) for found, runs in arms for run in runs}
        if arm not in named:
            raise EvsysError(f"{record.experiment}: {not_known(arm, 'arm', [found.arm for found, _ in arms])}")
        arm, run = named[arm]
        of_arm = [run]
    completed = [run for run in of_arm if run.status == "completed"]
    if not completed:
        raise EvsysError(f"{record.experiment}: no run of the arm {arm} was completed, so it has no weights to ship")
    run_dir = _run_dir(completed[0], path)
    stored = RunRecord.load(run_dir)
    if stored is None:
        raise EvsysError(f"{run_dir}: the run's record ({RUN_RESULT_FILE}) is gone, and with it which weights it left")
    return ShippedRun(arm=arm, run_dir=run_dir, run=stored, target=find_target(ModelRef(text=str(run_dir))))


def _run_dir(run: RecordedRun, record: Path) -> Path:
    """The folder of a run, or of the run that was taken over for it, beside the record wherever that was moved to."""
    if run.reused_from:
        return (record.parent / run.reused_from).resolve()
    given = Path(run.run_dir or run.run_id)
    beside = record.parent / given.name
    return beside if beside.is_dir() else given


def make_artifact(record: ExperimentRecord, shipped: ShippedRun) -> ModelArtifact:
    """The weights with their name, their fingerprint from the backend that scored them, and their card."""
    target = shipped.target
    if target.checkpoint is None:
        raise EvsysError(f"{shipped.run_dir}: the run left no weights")
    digest = digest_weights(target)
    slug = re.sub(r"[^a-z0-9]+", "-", record.experiment.lower()).strip("-")[:LONGEST_SLUG].strip("-") or "model"
    name = f"{slug}-{digest[:NAME_DIGITS]}"
    return ModelArtifact(
        name=name,
        digest=digest,
        experiment=record.experiment,
        arm=shipped.arm,
        run=shipped.run.run or shipped.run_dir.name,
        run_dir=shipped.run_dir,
        base_model=target.model,
        backend=target.backend,
        checkpoint=target.checkpoint,
        fingerprint=take_fingerprint(target),
        card=model_card(name, digest, record, shipped.arm, shipped.run, base_model=target.model),
    )


def digest_weights(target: Target) -> str:
    """sha256 of the weights and of the base model's name. Of weights that live at a service, which cannot be read here,
    of their path: the service never changes what is at one."""
    digest = hashlib.sha256(json.dumps(target.model).encode())
    place = Path(target.checkpoint or "")
    if target.checkpoint is None or not place.exists():
        digest.update(str(target.checkpoint).encode())
        return digest.hexdigest()
    files = [place] if place.is_file() else sorted(found for found in place.rglob("*") if found.is_file())
    # The other files name paths of this machine; rank and scale of an adapter come from its config.
    weights = [file for file in files if file.suffix in (".safetensors", ".npz", ".bin")] or files
    for file in weights:
        with open(file, "rb") as handle:
            digest.update(f"{file.name} {hashlib.file_digest(handle, 'sha256').hexdigest()}".encode())
    config = place / "adapter_config.json"
    if config.is_file():
        settings = json.loads(config.read_text())
        digest.update(json.dumps([settings.get("r"), settings.get("lora_alpha")]).encode())
    return digest.hexdigest()


def take_fingerprint(target: Target) -> Fingerprint:
    """Ask the weights, and the base model, what they make of the fixed prompts."""

    async def ask() -> Fingerprint:
        trained: SamplingClient = await opened.service.create_sampling_client(target.checkpoint)
        base: SamplingClient = await opened.service.create_sampling_client(None)
        tokenizer, cases, contrast = opened.service.get_tokenizer(), [], 0.0
        for text in PROMPTS:
            tokens = tokenizer.encode(text)
            given, one = ModelInput.from_ints(tokens), SamplingParams(max_tokens=1, temperature=0.0)
            scored = await trained.sample(given, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=TOP)
            greedy = await trained.sample(given, 1, SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0))
            logprobs = [value for value in (scored.prompt_logprobs or [])[1:] if value is not None]
            if len(logprobs) != len(tokens) - 1:
                raise EvsysError(f"the backend {target.backend} gave no log probabilities of the prompt {text!r}")
            before = [value for value in (await base.compute_logprobs(given))[1:] if value is not None]
            contrast = max(contrast, *(abs(a - b) for a, b in zip(logprobs, before, strict=True)))
            rows = scored.topk_prompt_logprobs or []
            cases.append(
                ProbeCase(
                    text=text,
                    tokens=tuple(tokens),
                    logprobs=tuple(logprobs),
                    top=tuple((token, value) for token, value in (rows[len(tokens) - 1] if rows else None) or ()),
                    greedy=tokenizer.decode(
                        [token for token in greedy.sequences[0].tokens if token != tokenizer.eos_token_id]
                    ),
                )
            )
        return Fingerprint(cases=tuple(cases), contrast=contrast, precision=precision)

    precision: Literal["float32", "backend"] = "backend"
    if target.backend == "local" and _computes_on_cpu(target):
        # In bfloat16, the default where the CPU has it, rounding alone moves log probabilities by some hundredths.
        precision = "float32"
        target = replace(target, backend_params={**target.backend_params, "dtype": "float32"})
    with open_model(target) as opened:
        return run_async(ask())


def _computes_on_cpu(target: Target) -> bool:
    device = target.backend_params.get("device", "auto")
    return device == "cpu" or (device == "auto" and not need("torch", extra="local").cuda.is_available())


def build_deployer(spec: KindSpec) -> Deployer:
    """The deployer that `{kind, params}` names."""
    learn_from_settings(spec.params)
    made: Deployer = registry.deployers.build(spec.kind, dict(spec.params))
    return made


def deploy_best(record: ExperimentRecord, path: Path, spec: KindSpec) -> str:
    """Deploy the best arm if the verdict names one; the sentence for the conclusion, whatever happens. A target that
    fails costs the experiment nothing but this deployment."""
    why, command = why_not_shipped(record), f"evsys deploy {shlex.quote(record.experiment)}"
    if why is not None:
        return f"{SHIPPED}Not deployed to {spec.kind}: {why}. Ship an arm by hand: {command} --arm ARM"
    try:
        return f"{SHIPPED}{deploy_arm(record, path, spec).line}"
    except Cancelled:
        raise
    except EvsysError as exc:
        return f"{SHIPPED}Not deployed to {spec.kind}: {str(exc).rstrip('.')}. Try again with: {command}"


def deploy_arm(record: ExperimentRecord, path: Path, spec: KindSpec, *, arm: str | None = None) -> RecordedDeployment:
    """Deploy an arm's weights, by default those of the best arm; `path` is the record's."""
    deployer = build_deployer(spec)
    artifact = make_artifact(record, find_shipped_run(record, path, arm))
    with hold(path.with_name(f".{stem_of(path)}.deploy.lock"), f"the deployment of {record.experiment!r}"):
        return deploy_artifact(artifact, deployer, spec, path)


def deploy_artifact(artifact: ModelArtifact, deployer: Deployer, spec: KindSpec, path: Path) -> RecordedDeployment:
    """Load, probe, switch the alias, take away what was replaced; every state goes into the experiment's file."""
    notes = DeploymentNotes(path, artifact, spec)
    notes.add("started")
    loaded = False
    try:
        with error_boundary(DeployError, f"deployer {spec.kind!r}"):
            before = deployer.current()
            if before is not None and before.digest == artifact.digest:
                return _check_again(notes, deployer, before, artifact)
            replaced = before.name if before else None
            loaded = True  # from here on the target may have the weights, also where `deploy` fails halfway
            made = deployer.deploy(artifact)
            probe = RecordedProbe.model_validate(asdict(deployer.probe(made, artifact)))
            if probe.ok is False:
                deployer.retire(made.name)
                return notes.add("rolled back", made, probe=probe, replaced=replaced)
            # A target that fails in here may have switched already: what the alias names is not taken away.
            loaded = False
            deployer.route(made)
            answering = deployer.current()
            if answering is None or answering.digest != artifact.digest:
                raise DeployError("the alias was switched, and the target still names other weights")
    except EvsysError as exc:
        if loaded:
            _take_back(deployer, artifact.name)
        notes.add("failed", error=str(exc))
        raise
    warning = _retire_replaced(deployer, replaced)
    return notes.add("deployed", made, probe=probe, replaced=replaced, warning=warning)


def _check_again(
    notes: DeploymentNotes, deployer: Deployer, found: Deployment, artifact: ModelArtifact
) -> RecordedDeployment:
    """The target has these weights already: it is probed all the same, and nothing is changed."""
    probe = RecordedProbe.model_validate(asdict(deployer.probe(found, artifact)))
    if probe.ok is False:
        raise DeployError(
            f"{found.name} is what the target names, but it no longer answers like the weights that were scored: "
            f"{probe.detail}"
        )
    return notes.add("unchanged", found, probe=probe, replaced=found.replaced)


def _take_back(deployer: Deployer, name: str) -> None:
    try:
        deployer.retire(name)
    except Exception:  # the target failed once already, and that error is the one to report
        return


def _retire_replaced(deployer: Deployer, replaced: str | None) -> str | None:
    """Take away what was replaced, where the deployer is set to; the new weights answer already, so a failure is only
    a warning."""
    if replaced is None or getattr(deployer, "keeps_replaced", True):
        return None
    try:
        with error_boundary(DeployError, f"retiring {replaced}"):
            deployer.retire(replaced)
    except EvsysError as exc:
        return f"{replaced} was replaced and could not be taken away: {exc}"
    return None


class DeploymentNotes:
    """Writes the states of one deployment."""

    def __init__(self, record: Path, artifact: ModelArtifact, spec: KindSpec) -> None:
        self._record, self._kind = record, spec.kind
        self._fixed: dict[str, Any] = {
            "id": secrets.token_hex(6),
            "kind": spec.kind,
            "name": artifact.name,
            "digest": artifact.digest,
            "arm": artifact.arm,
            "run": artifact.run,
            "params": dict(spec.params),
        }

    def add(self, state: str, made: Deployment | None = None, **more: object) -> RecordedDeployment:
        place: Mapping[str, object] = {"endpoint": made.endpoint, "alias": made.alias} if made else {}
        fields = {**self._fixed, "state": state, "time": now(), **place, **more}
        noted = RecordedDeployment.model_validate({key: value for key, value in fields.items() if value is not None})
        add_deployment(self._record, noted)
        return noted


def deployment_of(
    artifact: ModelArtifact, kind: str, *, endpoint: str, alias: str, replaced: str | None = None
) -> Deployment:
    """These weights at a target, as of now."""
    return Deployment(
        kind=kind, name=artifact.name, digest=artifact.digest, endpoint=endpoint, alias=alias, time=now(),
        replaced=replaced,
    )  # fmt: skip


def check_base_model(artifact: ModelArtifact, given: str, setting: str) -> None:
    """The target has its base model under its own name; `setting` says which one of the experiment is meant."""
    if artifact.base_model != given:
        raise EvsysError(
            f"deploy.params.{setting} is {given!r}, and the adapter was trained over {artifact.base_model!r}"
        )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
