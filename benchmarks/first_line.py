"""A script that prints when its first line ran."""

import time

STARTED = time.time()

import json  # noqa: E402 - what is measured is the time until the line above
import os  # noqa: E402

if os.environ["RANK"] == "0":
    print(json.dumps({"first_step_at": STARTED}))
