"""The dashboard's tables.

Records arrive by id and may arrive twice, late or out of order, so every table is keyed by the client's own ids and
every row of a record keeps, per field, the time of the value it has (`field_times`): the newest value counts.
A run is a `Generation` here, because the wire calls it so; pages say "run". Points of curves lie in a separate table,
without an ORM model (`points`).
"""

from __future__ import annotations

from typing import ClassVar

from django.conf import settings
from django.db import models

TEST = "test"
"""The split whose rows are for people, never for an agent's key."""


class Project(models.Model):
    """What belongs together and is seen by the same people. Two projects never see each other."""

    id = models.CharField(primary_key=True, max_length=100)
    """In URLs and in EVSYS_PROJECT_ID."""
    name = models.CharField(max_length=200)
    folder = models.TextField(blank=True, default="")
    """The folder that is followed; empty for a project whose records come over HTTP."""
    created = models.FloatField()


class Membership(models.Model):
    """A person in a project."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    is_owner = models.BooleanField(default=False)
    """Owners add people and make keys for others to use."""

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["project", "user"], name="one_membership")]


class ApiKey(models.Model):
    """A key of a project. Only its SHA-256 is stored; the key itself is shown once."""

    class Scope(models.TextChoices):
        WRITE = "write", "write: send records, read everything"
        READ = "read", "read: read everything"
        AGENT = "agent", "agent: send and read records, but never the rows of a test split"

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="keys")
    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=16)
    """The first characters, so that a person recognises the key."""
    sha256 = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=10, choices=Scope.choices, default=Scope.WRITE)
    created = models.FloatField()
    # A key works on when the account that made it is deleted: training jobs use it.
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL)
    last_used = models.FloatField(null=True)
    revoked = models.FloatField(null=True)


class LoginLink(models.Model):
    """A link that lets one browser in, once."""

    sha256 = models.CharField(primary_key=True, max_length=64)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    expires = models.FloatField()


class ExperimentRow(models.Model):
    """One experiment. `record` is the whole of `ExperimentRecord` once there is a result; the columns below it repeat
    what lists sort and filter by."""

    id = models.CharField(primary_key=True, max_length=100)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="experiments")
    name = models.CharField(max_length=300)
    description = models.TextField(blank=True, default="")
    hypothesis = models.TextField(blank=True, default="")
    status = models.CharField(max_length=20, default="running")
    """running, completed, partial, failed, cancelled, interrupted, invalid, unreadable."""
    tags = models.JSONField(default=list)
    metadata = models.JSONField(default=dict)
    config = models.JSONField(default=dict)
    parent_experiment_id = models.CharField(max_length=300, blank=True, default="")
    """An id or a name, as the config has it."""
    conclusion = models.TextField(blank=True, default="")
    best_score = models.FloatField(null=True)
    notes = models.JSONField(default=list)
    """What people said: {kind, text, by, ts}."""
    problem = models.TextField(blank=True, default="")
    """Why its record cannot be read, where the status is `unreadable`."""
    source = models.TextField(blank=True, default="", db_index=True)
    """The record's path, for an experiment of a followed folder."""
    stamp = models.TextField(blank=True, default="")
    """What the files behind this row were when they were read; a row with the same stamp need not be read again."""
    created = models.FloatField(db_index=True)
    """When it began, in seconds since the epoch."""
    ended = models.FloatField(null=True)
    updated = models.FloatField(db_index=True)
    """When this row last changed, by the server's clock: the cursor of live pages."""
    field_times = models.JSONField(default=dict)

    # Repeated from the record by `summary.summarize`.
    verdict = models.CharField(max_length=20, blank=True, default="")
    """supported, refuted, undecided, or empty where there is nothing to say yet."""
    metric = models.CharField(max_length=200, blank=True, default="")
    best_arm = models.CharField(max_length=300, blank=True, default="")
    best_value = models.FloatField(null=True)
    best_low = models.FloatField(null=True)
    best_high = models.FloatField(null=True)
    training_mark = models.CharField(max_length=200, blank=True, default="", db_default="")
    """What to warn of where the best arm's score is of tasks that it trained on: `on training rows`."""
    standing = models.CharField(max_length=200, blank=True, default="", db_default="")
    """How sure it is that the arm with the best score won: `better than the baseline`, `no arm beats the baseline`."""
    n_tasks = models.IntegerField(null=True)
    n_seeds = models.IntegerField(null=True)
    n_arms = models.IntegerField(default=0)
    n_runs = models.IntegerField(default=0)
    n_errors = models.IntegerField(default=0)
    """Errored rollouts of the last evaluations."""
    cost_usd = models.FloatField(null=True)
    seconds = models.FloatField(null=True)
    spark = models.JSONField(default=list)
    """The small line in lists, {of, values}: at most 24 numbers of the success metric over steps, else of the loss."""
    model = models.CharField(max_length=300, blank=True, default="")
    backend = models.CharField(max_length=100, blank=True, default="")
    algorithm = models.CharField(max_length=100, blank=True, default="")

    # Last, because SQLite reads a row from its beginning: a list must not pass 30 kB of record to reach a score.
    record = models.JSONField(null=True)
    """`ExperimentRecord.as_dict()`; read it with `ExperimentRecord.model_validate`."""
    figures = models.JSONField(default=dict)
    """Name -> SVG text of the figures that the experiment drew."""

    class Meta:
        db_table = "dashboard_experiment"
        # The order of every list: newest first within a project.
        indexes: ClassVar = [models.Index(fields=["project", "-created"], name="experiment_newest")]


class GenerationRow(models.Model):
    """One run: one seed of an arm."""

    id = models.CharField(primary_key=True, max_length=100)
    project = models.ForeignKey(Project, on_delete=models.CASCADE)
    experiment = models.ForeignKey(ExperimentRow, on_delete=models.CASCADE, related_name="generations")
    name = models.CharField(max_length=300)
    arm = models.CharField(max_length=300, blank=True, default="")
    seed = models.BigIntegerField(null=True)
    recipe_kind = models.CharField(max_length=100, blank=True, default="")
    status = models.CharField(max_length=20, default="running")
    run_config = models.JSONField(default=dict)
    metrics = models.JSONField(default=dict)
    artifacts = models.JSONField(default=dict)
    checkpoints = models.JSONField(default=list)
    """[{step, path}], by step."""
    error = models.TextField(blank=True, default="")
    conclusion = models.TextField(blank=True, default="")
    record = models.JSONField(null=True)
    """`RunRecord` as plain data, once the run has ended."""
    extra = models.JSONField(default=dict)
    """What a client sent beside these."""
    log_tail = models.TextField(blank=True, default="")
    """The last 64 kB of what its process wrote."""
    source = models.TextField(blank=True, default="")
    """The run's directory, for a run of a followed folder."""
    loaded = models.JSONField(default=dict)
    """How far its files were read: {metrics: [inode, offset], evals: stamp}."""
    created = models.FloatField()
    ended = models.FloatField(null=True)
    updated = models.FloatField(db_index=True)
    last_step = models.BigIntegerField(null=True)
    heartbeat = models.FloatField(null=True)
    field_times = models.JSONField(default=dict)

    class Meta:
        db_table = "dashboard_generation"
        indexes: ClassVar = [models.Index(fields=["project", "-created"], name="generation_newest")]


class MetricKey(models.Model):
    """One curve of one run, with a summary that is kept as points come in, so that lists never read points."""

    generation = models.ForeignKey(GenerationRow, on_delete=models.CASCADE, related_name="metric_keys")
    name = models.CharField(max_length=300)
    n = models.BigIntegerField(default=0)
    last_step = models.BigIntegerField(null=True)
    last = models.FloatField(null=True)
    """Null where the last value is NaN or infinite (`last_kind`)."""
    last_kind = models.SmallIntegerField(default=0)
    low = models.FloatField(null=True)
    high = models.FloatField(null=True)

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["generation", "name"], name="one_metric_key")]


class EvalRow(models.Model):
    """One evaluation of one run at one step."""

    id = models.CharField(primary_key=True, max_length=100)
    project = models.ForeignKey(Project, on_delete=models.CASCADE)
    generation = models.ForeignKey(GenerationRow, on_delete=models.CASCADE, related_name="evals")
    name = models.CharField(max_length=300)
    split = models.CharField(max_length=50, blank=True, default="")
    """val, test or another label."""
    stage = models.CharField(max_length=200, blank=True, default="")
    step = models.BigIntegerField(null=True)
    """0 is the untrained model; null the final weights."""
    metrics = models.JSONField(default=dict)
    scores = models.JSONField(default=list)
    """`Score` as plain data: metric, value, low, high, n, n_errors, ..."""
    breakdown = models.JSONField(default=dict)
    benchmark_id = models.CharField(max_length=200, blank=True, default="")
    error = models.TextField(blank=True, default="")
    seconds = models.FloatField(null=True)
    extra = models.JSONField(default=dict)
    """What a client sent beside these."""
    n_rollouts = models.IntegerField(default=0)
    created = models.FloatField()

    class Meta:
        db_table = "dashboard_eval"


class PredictionRow(models.Model):
    """One rollout of an evaluation."""

    id = models.CharField(primary_key=True, max_length=100)
    project = models.ForeignKey(Project, on_delete=models.CASCADE)
    generation = models.ForeignKey(GenerationRow, on_delete=models.CASCADE, related_name="predictions")
    eval = models.ForeignKey(
        EvalRow, null=True, on_delete=models.CASCADE, related_name="predictions", db_constraint=False
    )
    """Without a constraint: a prediction may arrive before its evaluation."""
    task_id = models.CharField(max_length=300)
    reward = models.FloatField(null=True)
    status = models.CharField(max_length=20, blank=True, default="")
    """ok, agent_error, infra_error, timeout, cancelled."""
    completion = models.TextField(blank=True, default="")
    body = models.JSONField(default=dict)
    """turns, question ({messages, expected}), error, verifier's notes, metadata, seconds, cost_usd."""
    created = models.FloatField()

    class Meta:
        db_table = "dashboard_prediction"
        indexes: ClassVar = [
            models.Index(fields=["eval", "task_id"], name="prediction_of_eval"),
            models.Index(fields=["generation", "task_id"], name="prediction_of_run"),
        ]


class SuiteVersion(models.Model):
    """One version of a dataset or a benchmark. Its rows are there once it is `complete`."""

    class Kind(models.TextChoices):
        DATASET = "dataset"
        BENCHMARK = "benchmark"

    id = models.CharField(primary_key=True, max_length=200)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="suites")
    kind = models.CharField(max_length=10, choices=Kind.choices)
    name = models.CharField(max_length=300)
    version = models.CharField(max_length=50, blank=True, default="")
    split = models.CharField(max_length=50, blank=True, default="")
    """`test` rows are for people and never go through an agent-scoped key."""
    n_rows = models.IntegerField(null=True)
    n_bytes = models.BigIntegerField(null=True)
    sha256 = models.CharField(max_length=64, blank=True, default="")
    lineage = models.JSONField(default=dict)
    description = models.TextField(blank=True, default="")
    fields = models.JSONField(default=dict)
    """What a client recorded beside these (`record_benchmark`)."""
    complete = models.BooleanField(default=False)
    """Whether the rows were uploaded whole; a suite that was only recorded has none."""
    created = models.FloatField()

    class Meta:
        db_table = "dashboard_suite"
        indexes: ClassVar = [models.Index(fields=["project", "kind", "name"], name="suite_by_name")]


class SuiteRow(models.Model):
    """One line of a suite, byte for byte as it was uploaded."""

    suite = models.ForeignKey(SuiteVersion, on_delete=models.CASCADE, related_name="rows")
    number = models.IntegerField()
    text = models.TextField()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["suite", "number"], name="one_suite_row")]
