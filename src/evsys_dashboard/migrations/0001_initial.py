"""The tables of `models`, and the one of `points`."""

from __future__ import annotations

from typing import Any, ClassVar

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

from evsys_dashboard.points import CREATE_POSTGRESQL, CREATE_SQLITE


def make_points(apps: Any, schema_editor: Any) -> None:
    # Without an ORM model: Django has no WITHOUT ROWID, and its own insert is ten times as slow.
    schema_editor.execute(CREATE_POSTGRESQL if schema_editor.connection.vendor == "postgresql" else CREATE_SQLITE)


def drop_points(apps: Any, schema_editor: Any) -> None:
    schema_editor.execute("DROP TABLE dashboard_point")


class Migration(migrations.Migration):
    initial = True

    dependencies: ClassVar = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations: ClassVar = [
        migrations.CreateModel(
            name="ExperimentRow",
            fields=[
                ("id", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=300)),
                ("description", models.TextField(blank=True, default="")),
                ("hypothesis", models.TextField(blank=True, default="")),
                ("status", models.CharField(default="running", max_length=20)),
                ("tags", models.JSONField(default=list)),
                ("metadata", models.JSONField(default=dict)),
                ("config", models.JSONField(default=dict)),
                ("parent_experiment_id", models.CharField(blank=True, default="", max_length=300)),
                ("conclusion", models.TextField(blank=True, default="")),
                ("best_score", models.FloatField(null=True)),
                ("notes", models.JSONField(default=list)),
                ("problem", models.TextField(blank=True, default="")),
                ("source", models.TextField(blank=True, db_index=True, default="")),
                ("stamp", models.TextField(blank=True, default="")),
                ("created", models.FloatField(db_index=True)),
                ("ended", models.FloatField(null=True)),
                ("updated", models.FloatField(db_index=True)),
                ("field_times", models.JSONField(default=dict)),
                ("verdict", models.CharField(blank=True, default="", max_length=20)),
                ("metric", models.CharField(blank=True, default="", max_length=200)),
                ("best_arm", models.CharField(blank=True, default="", max_length=300)),
                ("best_value", models.FloatField(null=True)),
                ("best_low", models.FloatField(null=True)),
                ("best_high", models.FloatField(null=True)),
                ("n_tasks", models.IntegerField(null=True)),
                ("n_seeds", models.IntegerField(null=True)),
                ("n_arms", models.IntegerField(default=0)),
                ("n_runs", models.IntegerField(default=0)),
                ("n_errors", models.IntegerField(default=0)),
                ("cost_usd", models.FloatField(null=True)),
                ("seconds", models.FloatField(null=True)),
                ("spark", models.JSONField(default=list)),
                ("model", models.CharField(blank=True, default="", max_length=300)),
                ("backend", models.CharField(blank=True, default="", max_length=100)),
                ("algorithm", models.CharField(blank=True, default="", max_length=100)),
                ("record", models.JSONField(null=True)),
                ("figures", models.JSONField(default=dict)),
            ],
            options={"db_table": "dashboard_experiment"},
        ),
        migrations.CreateModel(
            name="Project",
            fields=[
                ("id", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200)),
                ("folder", models.TextField(blank=True, default="")),
                ("created", models.FloatField()),
            ],
        ),
        migrations.CreateModel(
            name="GenerationRow",
            fields=[
                ("id", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=300)),
                ("arm", models.CharField(blank=True, default="", max_length=300)),
                ("seed", models.BigIntegerField(null=True)),
                ("recipe_kind", models.CharField(blank=True, default="", max_length=100)),
                ("status", models.CharField(default="running", max_length=20)),
                ("run_config", models.JSONField(default=dict)),
                ("metrics", models.JSONField(default=dict)),
                ("artifacts", models.JSONField(default=dict)),
                ("checkpoints", models.JSONField(default=list)),
                ("error", models.TextField(blank=True, default="")),
                ("conclusion", models.TextField(blank=True, default="")),
                ("record", models.JSONField(null=True)),
                ("extra", models.JSONField(default=dict)),
                ("log_tail", models.TextField(blank=True, default="")),
                ("source", models.TextField(blank=True, default="")),
                ("loaded", models.JSONField(default=dict)),
                ("created", models.FloatField()),
                ("ended", models.FloatField(null=True)),
                ("updated", models.FloatField(db_index=True)),
                ("last_step", models.BigIntegerField(null=True)),
                ("heartbeat", models.FloatField(null=True)),
                ("field_times", models.JSONField(default=dict)),
                (
                    "experiment",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="generations",
                        to="dashboard.experimentrow",
                    ),
                ),
                ("project", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="dashboard.project")),
            ],
            options={"db_table": "dashboard_generation"},
        ),
        migrations.CreateModel(
            name="EvalRow",
            fields=[
                ("id", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=300)),
                ("split", models.CharField(blank=True, default="", max_length=50)),
                ("stage", models.CharField(blank=True, default="", max_length=200)),
                ("step", models.BigIntegerField(null=True)),
                ("metrics", models.JSONField(default=dict)),
                ("scores", models.JSONField(default=list)),
                ("breakdown", models.JSONField(default=dict)),
                ("benchmark_id", models.CharField(blank=True, default="", max_length=200)),
                ("error", models.TextField(blank=True, default="")),
                ("seconds", models.FloatField(null=True)),
                ("extra", models.JSONField(default=dict)),
                ("n_rollouts", models.IntegerField(default=0)),
                ("created", models.FloatField()),
                (
                    "generation",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="evals", to="dashboard.generationrow"
                    ),
                ),
                ("project", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="dashboard.project")),
            ],
            options={"db_table": "dashboard_eval"},
        ),
        migrations.CreateModel(
            name="LoginLink",
            fields=[
                ("sha256", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("expires", models.FloatField()),
                ("user", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.AddField(
            model_name="experimentrow",
            name="project",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="experiments", to="dashboard.project"
            ),
        ),
        migrations.CreateModel(
            name="ApiKey",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100)),
                ("prefix", models.CharField(max_length=16)),
                ("sha256", models.CharField(max_length=64, unique=True)),
                (
                    "scope",
                    models.CharField(
                        choices=[
                            ("write", "write: send records, read everything"),
                            ("read", "read: read everything"),
                            ("agent", "agent: send and read records, but never the rows of a test split"),
                        ],
                        default="write",
                        max_length=10,
                    ),
                ),
                ("created", models.FloatField()),
                ("last_used", models.FloatField(null=True)),
                ("revoked", models.FloatField(null=True)),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="keys", to="dashboard.project"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="SuiteVersion",
            fields=[
                ("id", models.CharField(max_length=200, primary_key=True, serialize=False)),
                ("kind", models.CharField(choices=[("dataset", "Dataset"), ("benchmark", "Benchmark")], max_length=10)),
                ("name", models.CharField(max_length=300)),
                ("version", models.CharField(blank=True, default="", max_length=50)),
                ("split", models.CharField(blank=True, default="", max_length=50)),
                ("n_rows", models.IntegerField(null=True)),
                ("n_bytes", models.BigIntegerField(null=True)),
                ("sha256", models.CharField(blank=True, default="", max_length=64)),
                ("lineage", models.JSONField(default=dict)),
                ("description", models.TextField(blank=True, default="")),
                ("fields", models.JSONField(default=dict)),
                ("complete", models.BooleanField(default=False)),
                ("created", models.FloatField()),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="suites", to="dashboard.project"
                    ),
                ),
            ],
            options={"db_table": "dashboard_suite"},
        ),
        migrations.CreateModel(
            name="SuiteRow",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.IntegerField()),
                ("text", models.TextField()),
                (
                    "suite",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="rows", to="dashboard.suiteversion"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="MetricKey",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=300)),
                ("n", models.BigIntegerField(default=0)),
                ("last_step", models.BigIntegerField(null=True)),
                ("last", models.FloatField(null=True)),
                ("last_kind", models.SmallIntegerField(default=0)),
                ("low", models.FloatField(null=True)),
                ("high", models.FloatField(null=True)),
                (
                    "generation",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="metric_keys",
                        to="dashboard.generationrow",
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("generation", "name"), name="one_metric_key")],
            },
        ),
        migrations.CreateModel(
            name="PredictionRow",
            fields=[
                ("id", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("task_id", models.CharField(max_length=300)),
                ("reward", models.FloatField(null=True)),
                ("status", models.CharField(blank=True, default="", max_length=20)),
                ("completion", models.TextField(blank=True, default="")),
                ("body", models.JSONField(default=dict)),
                ("created", models.FloatField()),
                (
                    "eval",
                    models.ForeignKey(
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="predictions",
                        to="dashboard.evalrow",
                    ),
                ),
                (
                    "generation",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="predictions",
                        to="dashboard.generationrow",
                    ),
                ),
                ("project", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="dashboard.project")),
            ],
            options={
                "db_table": "dashboard_prediction",
                "indexes": [
                    models.Index(fields=["eval", "task_id"], name="prediction_of_eval"),
                    models.Index(fields=["generation", "task_id"], name="prediction_of_run"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Membership",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("is_owner", models.BooleanField(default=False)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="memberships",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="memberships", to="dashboard.project"
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("project", "user"), name="one_membership")],
            },
        ),
        migrations.AddIndex(
            model_name="generationrow",
            index=models.Index(fields=["project", "-created"], name="generation_newest"),
        ),
        migrations.AddIndex(
            model_name="experimentrow",
            index=models.Index(fields=["project", "-created"], name="experiment_newest"),
        ),
        migrations.AddIndex(
            model_name="suiteversion",
            index=models.Index(fields=["project", "kind", "name"], name="suite_by_name"),
        ),
        migrations.AddConstraint(
            model_name="suiterow",
            constraint=models.UniqueConstraint(fields=("suite", "number"), name="one_suite_row"),
        ),
        migrations.RunPython(make_points, drop_points),
    ]
