"""Run torchrun's own main function for several command lines in one process, which imports torch
once.

Usage: torchrun_cases.py CASES RESULTS, two JSON files: a list of [arguments, environment], and one
of [status, output].
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from torch.distributed import run

if __name__ == "__main__":
    results = []
    original = dict(os.environ)
    for arguments, environment in json.loads(Path(sys.argv[1]).read_text()):
        os.environ.clear()
        os.environ.update(original | environment)
        output, status = io.StringIO(), "success"
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                run.main(arguments)
        except BaseException as error:  # SystemExit too
            status = type(error).__name__
        results.append([status, output.getvalue()])
    Path(sys.argv[2]).write_text(json.dumps(results))
