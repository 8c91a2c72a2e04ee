"""A script that trains for minutes, and saves when it is asked to stop. Usage: polite.py
DIRECTORY
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from flyte_ddp import session

dist.init_process_group("gloo")
for step in range(1, 6000):
    dist.all_reduce(torch.ones(1))
    session.report(step=step)
    if step == 5:
        print("on its way")
    time.sleep(0.02)
    if session.stop_requested:
        session.save({"step": step}, step)
        (Path(sys.argv[1]) / f"stopped-{dist.get_rank()}").write_text(str(step))
        break
