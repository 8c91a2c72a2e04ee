"""Gangs of real ranks that meet over gloo, without a launcher: for tests that need a hand in what a
rank does.

They are forked from the server of the ranks that a launcher in this process would start.
"""

from __future__ import annotations

import copy
import datetime
import io
import multiprocessing
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed import PrefixStore, TCPStore

from flyte_ddp import events
from flyte_ddp.launch.agent.rank_start import ForkedProcess, start_server
from flyte_ddp.launch.protocol.messages import Emitted, RankBeat
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.ranks import NodeRanks
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.rank.session import Session
from flyte_ddp.recipes import get_recipe
from flyte_ddp.training.main import train
from flyte_ddp.training.parallel import choose_parallelism
from flyte_ddp.world import World, process_group
from tests.support.events import to_dict

TIMEOUT = 300.0  # seconds until a gang has certainly stopped for ever
# the memory of a node that keeps nothing
NO_MEMORY = {"slots": [], "copies": [], "parts": [], "free_parts": lambda *_: None}


def run_gang(num_ranks, work, *arguments):
    """The results of `work(world, store, *arguments)` on each rank, in the order of the ranks; None
    of a killed one.
    """
    # The ranks repeat this module's import, so the server does not start there.
    start_server(["torch"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(num_ranks):
        pipe, end = multiprocessing.Pipe()
        given = (rank, num_ranks, store.port, end, work, arguments)
        processes.append(ForkedProcess(target=_run_rank, args=given, daemon=True))
        pipes.append(pipe)
        processes[-1].start()
        end.close()
    results = {}
    try:
        while len(results) < num_ranks:  # the first rank that fails explains why others wait
            ready = wait([pipe for pipe in pipes if pipe not in results], TIMEOUT)
            assert ready, f"{num_ranks - len(results)} of {num_ranks} ranks did not end"
            for pipe in ready:
                try:
                    error, results[pipe] = torch.load(
                        io.BytesIO(pipe.recv_bytes()), weights_only=False
                    )
                except EOFError:
                    error, results[pipe] = "", None
                assert not error, error
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[pipe] for pipe in pipes]


def _run_rank(rank, num_ranks, port, pipe, work, arguments):
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=TIMEOUT))
    world, error, result = World(rank, num_ranks, torch.device("cpu")), "", None
    try:
        if num_ranks == 1:
            result = work(world, store, *arguments)
        else:
            with process_group(world, "gloo", PrefixStore("group", store), TIMEOUT):
                result = work(world, store, *arguments)
    except BaseException:
        error = traceback.format_exc()
    packed = io.BytesIO()
    torch.save((error, result), packed)
    pipe.send_bytes(packed.getvalue())


class Link:
    """A rank's link to an agent that only collects what is sent."""

    stop_requested = False
    on_stop = None

    def __init__(self, data=""):
        self.data, self.events, self.beats, self.position = data, [], [], RankBeat()

    def wait_for_data(self):
        return Path(self.data)

    def beat(self, step):
        self.beats.append(step)

    def send(self, message):
        if isinstance(message, Emitted):
            self.events.append(copy.deepcopy(message.event))  # The loop changes the event later.

    def set_pace(self, *_):
        pass

    def stop(self):
        self.stop_requested = True
        self.on_stop()


def session_of(rank=0, world_size=1, store=None, checkpoints="", link=None, **program):
    """The session of a rank that is alone on its node, and its link."""
    job = Job(Program("train", b"", **program), str(checkpoints), time.time())
    node = NodeRanks(0, 1, world_size, False, 1, "127.0.0.1", 0, "lo")
    link = link or Link()
    process = SimpleNamespace(job=job, node=node, rank=rank, link=link, **NO_MEMORY)
    process.open_store = lambda: store
    return Session(process), link


def train_recipe(world, store, recipe, config, data, checkpoints):
    """Work of a gang: train a recipe as its ranks do, and return the events as dicts."""
    link = Link(data)
    node = NodeRanks(0, world.world_size, world.world_size, False, 1, "127.0.0.1", 0, "lo")
    job = Job(recipe_program(recipe, config), checkpoints, time.time())
    process = SimpleNamespace(job=job, node=node, rank=world.rank, link=link, **NO_MEMORY)
    process.open_store = lambda: store
    session = Session(process)
    train(choose_parallelism(get_recipe(recipe, config.recipe_options), config, world), session)
    reporter, seconds = session.reporter, time.time() - job.launched_at
    reporter.emit(events.RunFinished(reporter.step, seconds, **session.results))
    return [to_dict(event) for event in link.events]
