"""A schedule that predicts every night with the champion of the hour: copy it to workflows/.

The retraining of the same recipe decides which version that is. Each night's predictions are an
output of their execution.
"""

from __future__ import annotations

from flytekit import CronSchedule, LaunchPlan
from flytekit.models.concurrency import ConcurrencyPolicy
from flytekit.types.directory import FlyteDirectory

from workflows.predict import predict_wf

SCORE = LaunchPlan.get_or_create(
    workflow=predict_wf,
    name="score_nightly",
    default_inputs={
        "recipe": "image_folder",
        "model_state": "s3://bucket/champions/image_folder",
        "data": FlyteDirectory("s3://bucket/new-images"),
    },
    schedule=CronSchedule(schedule="0 5 * * *"),  # 5 am UTC, after the retraining
    concurrency=ConcurrencyPolicy(max_concurrency=1),  # a night that takes longer skips the next
)
