"""A script that writes down what it finds around it, for a comparison of launchers. Usage:
surroundings.py DIRECTORY
"""

import atexit
import importlib.util
import json
import multiprocessing
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from beside import NAME

from flyte_ddp import session

RANK = os.environ["RANK"]
DIRECTORY = Path(sys.argv[1])


def leave(name, text=""):
    (DIRECTORY / f"{name}-{RANK}").write_text(text)


def write_late():
    time.sleep(0.5)
    leave("thread")


if __name__ == "__main__":
    atexit.register(leave, "atexit")
    threading.Thread(target=write_late).start()
    multiprocessing.set_start_method("spawn")
    child = multiprocessing.Process(target=leave, args=("child", NAME))  # imports this script again
    child.start()
    child.join()
    before_torch = "torch" in sys.modules
    found = {
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "path": sys.path[0],
        "directory": os.getcwd(),
        "file": __file__,
        "package": __package__,
        "is main": sys.modules["__main__"].__dict__ is globals(),
        "process": multiprocessing.current_process().name,
        "torch is imported": before_torch,
        "sklearn": importlib.util.find_spec("sklearn").origin,
        "session": [bool(session.checkpoints), session.load(), session.stop_requested],
    }

    import torch
    import torch.distributed as dist

    session.save({"step": 1}, 1)
    session.report(step=1, loss=0.5)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.ones(1) * (int(RANK) + 1)
    dist.all_reduce(total)
    found["sum"] = total.item()
    store = dist.distributed_c10d._get_default_store()
    if RANK == "1":
        time.sleep(2)  # rank 0 has ended by now, but the store has not
        store.set("late", "kept")
        found["store"] = store.get("late").decode()
    print("working\rstill working\rall is done")
    leave("found", json.dumps(found))
    sys.stdout.write("bye")
    sys.exit(0)
