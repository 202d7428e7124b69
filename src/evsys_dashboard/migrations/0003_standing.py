"""`standing` of experiments, read from the records that are there."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from evsys_dashboard.summary import NOT_A_RECORD, standing_of
from evsys_sdk.record.models import ExperimentRecord


def read_standings(apps: Any, schema_editor: Any) -> None:
    rows = apps.get_model("dashboard", "ExperimentRow").objects
    found = rows.filter(record__isnull=False).values_list("pk", "record", "best_arm")
    # A hundred records at a time: they may be large.
    for pk, record, best_arm in found.iterator(chunk_size=100):
        try:
            typed = ExperimentRecord.model_validate(record)
            judged = next((arm for arm in typed.verdict.arms if arm.arm == best_arm), None)
        except NOT_A_RECORD:
            continue
        if judged and (standing := standing_of(typed, judged)):
            rows.filter(pk=pk).update(standing=standing[:200])


class Migration(migrations.Migration):
    dependencies: ClassVar = [("dashboard", "0002_training_mark")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="experimentrow",
            name="standing",
            field=models.CharField(blank=True, db_default="", default="", max_length=200),
        ),
        migrations.RunPython(read_standings, migrations.RunPython.noop),
    ]
