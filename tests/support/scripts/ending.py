# ruff: noqa: B008, SIM115 - files that nobody closes are what this script is about
"""A script that leaves files open and has objects to finalize at its end. Usage: ending.py
DIRECTORY HOW

HOW: "return", "exit", "raise", or "late" for rank 1 ending a second after rank 0.
"""

import atexit
import csv
import gzip
import os
import sys
import threading
import time

DIRECTORY, HOW, RANK = sys.argv[1], sys.argv[2], os.environ["RANK"]


def path(name):
    return os.path.join(DIRECTORY, f"{name}-{RANK}")


class Table:
    def __init__(self):
        self.file = open(path("csv"), "w")
        self.writer = csv.writer(self.file)


class Finalized:
    def __del__(self, open=open, file=path("del"), text=HOW):  # the names of the module may be gone
        with open(file, "w") as file:
            file.write(text)


def at_exit():
    file = open(path("atexit"), "w")
    file.write("exit")
    globals()["late"] = file


def train():
    local = open(path("local"), "w")
    local.write("local")
    packed.write("packed")
    if HOW == "late" and RANK == "1":
        time.sleep(1)
    if HOW == "exit":
        sys.exit("an end\nin two lines")
    if HOW == "raise":
        raise ValueError("an error")


log = open(path("log"), "w")
log.write("log")
packed = gzip.open(path("gzip"), "wt")
table = Table()
table.writer.writerow(["a", 1])
finalized = Finalized()
cycle = [finalized]
cycle.append(cycle)
atexit.register(at_exit)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("printed")
train()
