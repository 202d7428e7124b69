"""`training_mark` of experiments, read from the records that are there."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from evsys_dashboard.summary import NOT_A_RECORD
from evsys_sdk.history.digest import digest_of


def mark_records(apps: Any, schema_editor: Any) -> None:
    rows = apps.get_model("dashboard", "ExperimentRow").objects
    # A hundred records at a time: they may be large.
    for pk, record in rows.filter(record__isnull=False).values_list("pk", "record").iterator(chunk_size=100):
        try:
            digest = digest_of(record)
        except NOT_A_RECORD:
            continue
        if digest.top and (mark := digest.top.training_mark):
            rows.filter(pk=pk).update(training_mark=mark[:200])


class Migration(migrations.Migration):
    dependencies: ClassVar = [("dashboard", "0001_initial")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="experimentrow",
            name="training_mark",
            field=models.CharField(blank=True, db_default="", default="", max_length=200),
        ),
        migrations.RunPython(mark_records, migrations.RunPython.noop),
    ]
