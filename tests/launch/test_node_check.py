"""The comparison of nodes, and the probes of a machine and of its network."""

from __future__ import annotations

import dataclasses
import functools
import json
import select
import socket
import struct
import sys
import threading
import time

import pytest
import torch

from flyte_ddp import events
from flyte_ddp.cluster import connect
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.manifest import avoid_nodes
from flyte_ddp.errors import ClusterError
from flyte_ddp.launch.agent import node_check, probes
from flyte_ddp.launch.agent.node_check import (
    LOSS,
    NodeProbes,
    fetch,
    measure_machine,
    send_bytes,
    start_serving,
)
from flyte_ddp.launch.control.node_check import NodeCheck, find_slow, rate_links
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.reference import SLOW_NODES, Reference, read_slow_nodes
from flyte_ddp.launch.nodes.dask.assignment import assign_nodes
from flyte_ddp.launch.protocol.messages import Check, Checked, Go
from flyte_ddp.launch.run import Gang as Resources
from flyte_ddp.launch.run import function_program
from flyte_ddp.process.cgroups import usable_cores
from tests.support.dask_runs import worker

FAST, SLOW = 1e9, 2.5e6


@pytest.mark.parametrize(
    ("rates", "reference", "expected"),
    [
        ({"usable cores": [4, 4, 4]}, {}, []),
        # The number of cores is exact, and a core of any speed counts as one.
        (
            {"usable cores": [0.4, 0.4, 0.2], "core speed": [3, 5, 5]},
            {},
            [(2, "usable cores")],
        ),
        ({"usable cores": [4, 4, 2.75]}, {}, [(2, "usable cores")]),
        ({"core speed": [4, 4, 2]}, {}, [(2, "core speed")]),
        # A neighbour on the same core slows the other down to 0.64. Networks share no core.
        ({"core speed": [4, 4, 2.5], "memory": [4, 4, 2.5]}, {}, []),
        ({"network": [1e8, 1e8, 6.5e7]}, {}, [(2, "network")]),
        ({"core speed": [4, 4, 2], "memory": [1, 4, 4]}, {}, [(0, "memory"), (2, "core speed")]),
        ({"memory (A)": [6e9, 13e9, 13e9]}, {}, []),
        ({"memory (A)": [2e9, 13e9, 13e9]}, {}, [(0, "memory (A)")]),
        # Two nodes have no median. What was stored before takes its place.
        ({"cores": [4, 2]}, {}, []),
        ({"cores": [4, 2]}, {"cores": 4}, [(1, "cores")]),
        ({"cores": [4, 2.5]}, {"cores": 4}, []),
        ({"cores": [4, 2]}, {"memory": 4}, []),
        ({"cores": [4, 4, 4]}, {"cores": 9}, []),
        # Another model of CPU is another probe, and a node may lack a probe.
        ({"cores (a)": [4, 4, None, None], "cores (b)": [None, None, 2, 2]}, {}, []),
        # More than enough is enough.
        ({"disk": [9e9, 9e9, 4e7]}, {}, []),
        ({"disk": [9e9, 9e9, 5e6]}, {}, [(2, "disk")]),
        # All GPUs of a model are compared, also of two nodes.
        (
            {"products of GPU 0 (H200)": [4, 4], "products of GPU 1 (H200)": [4, 2]},
            {},
            [(1, "products of GPU 1 (H200)")],
        ),
        ({"copies of GPU 0 (A100)": [2, 2], "copies of GPU 1 (H200)": [4, 4]}, {}, []),
        (
            {"copies of GPU 0 (A100)": [2, 4]},
            {"copies of GPU (A100)": 4},
            [(0, "copies of GPU 0 (A100)")],
        ),
        ({}, {"cores": 4}, []),
    ],
)
def test_a_rate_below_a_share_of_the_median_is_slow(rates, reference, expected):
    nodes = {}
    for probe, values in rates.items():
        for index, value in enumerate(values):
            if value is not None:
                nodes.setdefault(index, {})[probe] = float(value)
    assert sorted(find_slow(nodes, reference)) == expected


def make_links(num_nodes, slow_from=(), slow_to=()):
    """The links of a ring, as (receiver, sender)."""
    links = {node: {} for node in range(num_nodes)}
    for node in links:
        for sender in {(node - 1) % num_nodes, (node + 1) % num_nodes}:
            is_slow = sender in slow_from or node in slow_to
            links[node][sender] = SLOW if is_slow else FAST
    return links


@pytest.mark.parametrize("num_nodes", [3, 4, 9])
@pytest.mark.parametrize("how", ["slow_from", "slow_to"])
def test_the_node_at_the_common_end_of_slow_links_is_to_blame(num_nodes, how):
    rates = rate_links(make_links(num_nodes, **{how: (1,)}))
    assert rates == {node: SLOW if node == 1 else FAST for node in range(num_nodes)}


@pytest.mark.parametrize(
    ("loss", "others", "is_named"), [(0.1, 0.0, True), (0.01, 0.0, False), (0.1, 0.08, False)]
)
def test_a_node_that_loses_more_packets_than_others_is_named(check, loss, others, is_named):
    one, gang, found = check(3)
    gang.answer(one, 4.0, 4.0, 4.0)
    for number in (2, 3):
        one.look()
        for node in gang.nodes:
            senders = {0, 1, 2} - {node.index}
            losses = {each: loss if 1 in (each, node.index) else others for each in senders}
            links = dict.fromkeys(senders, FAST)
            answer = Checked(number, {"cores": 4.0}, links, [], ("127.0.0.1", 1), "A", losses)
            one.take(node, answer)
    one.look()
    named = [str(each) for event in found for each in event.nodes]
    assert named == is_named * ["node 1 is slow: network, which loses 10% of its packets"]


def test_a_slow_network_at_one_look_and_lost_packets_at_the_other_are_one_finding(check):
    one, gang, found = check(3)
    gang.answer(one, 4.0, 4.0, 4.0)
    for number, rate, loss in ((2, SLOW, None), (3, FAST, 0.2)):
        one.look()
        for node in gang.nodes:
            senders = {0, 1, 2} - {node.index}
            links = {each: rate if 2 in (each, node.index) else FAST for each in senders}
            losses = {each: loss if 2 in (each, node.index) else 0.0 for each in senders}
            known = {each: share for each, share in losses.items() if share is not None}
            one.take(node, Checked(number, {}, links, [], ("127.0.0.1", 1), "A", known))
    one.look()
    named = [str(each) for event in found for each in event.nodes]
    assert named == ["node 2 is slow: network, which loses 20% of its packets"]


def test_of_two_nodes_the_sender_is_to_blame():
    assert rate_links(make_links(2, slow_from=(1,))) == {0: FAST, 1: SLOW}
    assert rate_links({}) == {}


def test_a_single_receiver_among_several_nodes_does_not_put_its_senders_to_blame():
    assert rate_links({2: {0: SLOW, 1: SLOW}}) == {2: SLOW}
    assert rate_links({0: {1: SLOW}}) == {1: SLOW}


class Gang(Nodes):
    """Nodes that note what they are sent."""

    def __init__(self, num_nodes, reference):
        self.nodes = [Node(index, f"node {index}") for index in range(num_nodes)]
        self.reference = reference
        self.sent = []
        self.has_looked_for_others = False

    def send(self, command):
        self.sent.append(command)

    def replace_leaving(self):
        self.has_looked_for_others = True

    def answer(self, check, *cores, problems=()):
        """Answer the newest question, with the rate of the cores of each node."""
        check.look()
        question = [each for each in self.sent if isinstance(each, Check)][-1]
        for node, rate in zip(self.nodes, cores, strict=True):
            rates = {"usable cores": rate} if question.is_machine and rate else {}
            address = ("127.0.0.1", 1 + node.index)
            check.take(node, Checked(question.number, rates, {}, list(problems), address, "A"))


@pytest.fixture
def check(tmp_path):
    """check(num_nodes): a check, its gang, and the events; checks share what is stored."""

    def check(num_nodes):
        reference = Reference(str(tmp_path), "pool")
        while any(tmp_path.glob("node-rates-*.json")) and not reference.rates:
            time.sleep(0.01)
        gang, found = Gang(num_nodes, reference), []
        return NodeCheck(gang, found.append), gang, found

    return check


def test_a_node_is_named_when_it_is_slow_twice(check, caplog):
    one, gang, found = check(3)
    gang.answer(one, 4.0, 4.0, 2.0)
    gang.answer(one, 0, 0, 0)
    addresses = [("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3)]
    gang.answer(one, 4.0, 4.0, 2.0)
    one.look()
    assert gang.sent == [
        Check(1, True),
        Check(2, False, addresses),
        Check(3, True, addresses),
        Go(),  # the question is no longer repeated
    ]
    (event,) = found
    assert str(event.nodes[0]) == "node 2 is slow: 2 usable cores (A), 0.50 of the median"
    assert [node.is_slow for node in gang.nodes] == [False, False, True]
    assert gang.has_looked_for_others
    assert "node 2 is slow" in caplog.text


def test_a_network_on_which_no_byte_arrives_in_time_is_no_measure(check, tmp_path):
    one, gang, found = check(2)
    gang.answer(one, 4.0, 4.0)
    one.look()
    for node in gang.nodes:
        one.take(node, Checked(2, {}, {1 - node.index: 0.0}, [], ("127.0.0.1", 1), "A"))
    one.look()
    assert not found
    while not (files := list(tmp_path.glob("node-rates-*.json"))):
        time.sleep(0.01)
    assert json.loads(files[0].read_text()) == {"usable cores (A)": 4.0}


def test_a_node_that_is_slow_once_is_not_named_and_problems_are_one_line(check, caplog):
    one, gang, found = check(3)
    gang.answer(one, 4.0, 4.0, 2.0, problems=("disk: OSError: full", "cores: none"))
    gang.answer(one, 0, 0, 0)
    gang.answer(one, 4.0, 2.0, 4.0)
    one.look()
    one.look()
    assert len(gang.sent) == 4
    assert not found
    lines = [each for each in caplog.messages if "node 1" in each]
    assert lines == ["node 1 could not be checked: disk: OSError: full; cores: none"]


def test_a_later_cluster_of_the_run_knows_the_nodes_that_were_slow(check, tmp_path, monkeypatch):
    for slow in ("machine-2", "machine-1"):
        one, gang, _ = check(3)
        for node in gang.nodes:
            node.machine = f"machine-{node.index}"
        rates = [2.0 if node.machine == slow else 4.0 for node in gang.nodes]
        for values in (rates, (0, 0, 0), rates):
            gang.answer(one, *values)
        one.look()
        while slow not in read_slow_nodes(str(tmp_path)):
            time.sleep(0.01)

    opened = []

    def open_cluster(config, *_):
        opened.append(config)
        raise ClusterError("enough seen")

    monkeypatch.setattr(connect, "open_cluster", open_cluster)
    gang = Resources(nnodes=2, cluster={"kind": "kubernetes"})
    program = function_program(print, (), {})
    with pytest.raises(ClusterError), gang.open_place(program, checkpoints=str(tmp_path)):
        pass
    (config,) = opened
    assert config == avoid_nodes(gang.cluster_config(), ["machine-1", "machine-2"])
    assert read_slow_nodes(str(tmp_path / "empty")) == []
    assert read_slow_nodes("no-such-protocol://x") == []


@pytest.mark.parametrize("text", ["", "{", "3", '{"a": 1}', "[1]"])
def test_a_damaged_list_of_slow_nodes_prevents_no_start(text, tmp_path):
    (tmp_path / SLOW_NODES).write_text(text)
    assert read_slow_nodes(str(tmp_path)) == []


def test_two_nodes_are_compared_with_what_an_earlier_check_has_stored(check, tmp_path):
    for rates, expected in (((4.0, 4.0), []), ((4.0, 2.0), [1])):
        one, gang, found = check(2)
        for values in (rates, (0, 0), rates):
            gang.answer(one, *values)
        one.look()
        assert [each.node for event in found for each in event.nodes] == expected
        deadline = time.monotonic() + 10
        while not [*tmp_path.glob("node-rates-*.json")] and time.monotonic() < deadline:
            time.sleep(0.01)


def test_a_gang_whose_nodes_answer_nothing_has_no_verdict(check):
    one, gang, found = check(3)
    for _ in range(2):
        gang.answer(one, 0, 0, 0)
    one.look()
    assert (gang.sent[2:], found) == ([Go()], [])


def test_a_slow_worker_is_used_only_if_there_are_too_few_others():
    slow = dataclasses.replace(worker("w-1", "10.0.0.1"), is_slow=True, has_agent=True)
    workers = [slow, worker("w-2", "10.0.0.1"), worker("w-3", "10.0.0.2")]
    names = [node.worker for node in assign_nodes(workers, 2, ClusterConfig())]
    assert names == ["w-2", "w-3"]
    everything = assign_nodes(workers, 3, ClusterConfig(num_nodes=3))
    assert [node.worker for node in everything if node.is_slow] == ["w-1"]


def test_nodes_are_checked_by_default_on_kubernetes_alone():
    assert ClusterConfig(kind="kubernetes").checks_nodes
    assert not ClusterConfig(kind="local").checks_nodes
    assert ClusterConfig(kind="local", check_nodes="always").checks_nodes
    assert not ClusterConfig(kind="kubernetes", check_nodes="never").checks_nodes


def test_what_can_be_measured_is_and_the_rest_is_a_line(tmp_path):
    rates, problems = measure_machine(tmp_path / "missing")
    assert 1e8 < rates["core speed"] < 1e13
    assert rates["memory"] > 1e7
    assert "disk" not in rates
    assert [each.partition(":")[0] for each in problems] == ["disk"]
    assert measure_machine(tmp_path, 0.0) == ({}, ["machine: no rate within 0 s"])


def test_products_and_copies_have_rates_on_any_device(monkeypatch):
    monkeypatch.setattr(probes, "GPU_SIZE", 32)
    monkeypatch.setattr(probes, "GPU_COPY_BYTES", 1 << 16)
    for measure in (probes.measure_products, probes.measure_copies):
        rates = list(measure(torch.device("cpu")))
        assert rates == sorted(rates)
        assert 1e6 < rates[-1] < 1e15


def test_gpus_that_cannot_be_measured_are_one_line_after_all_else(monkeypatch, capsys, tmp_path):
    def fail(device):
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(sys, "argv", ["probes", str(tmp_path)])
    monkeypatch.setattr(probes, "visible_gpus", lambda: ("0", "1"))
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    probes.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {name for name, _, problem in lines if not problem} >= {"core speed", "memory"}
    assert lines[-1] == ["GPUs", 0.0, "RuntimeError: no driver"]


def test_bytes_that_are_cut_off_by_time_still_have_a_rate():
    address = start_serving("127.0.0.1")
    assert fetch(address, 1 << 20, 1.5)[0] > 4 * SLOW  # a busy machine is slow, too
    with slow_front_of(address) as slow:
        assert SLOW / 10 < fetch(slow, 64 << 20, 0.5)[0] < 10 * SLOW


def test_a_neighbour_that_answers_too_late_has_the_rate_0_and_a_bad_one_does_not_hide_the_next(
    tmp_path,
):
    """Under a loss of packets, a connection takes seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert fetch(silent.getsockname(), 1 << 20, 0.1) == (0.0, None)
        agent = NodeProbes(tmp_path, 1, "127.0.0.1", None)
        closed, good = ("127.0.0.1", 9), start_serving("127.0.0.1")
        answers = [
            ask([agent], Check(2, is_machine=False, addresses=addresses))[0]
            for addresses in ([silent.getsockname(), ("", 9), good], [closed, ("", 9), good])
        ]
    assert [{*each.links} for each in answers] == [{0, 2}, {2}]
    assert answers[0].links[0] == 0.0 < answers[0].links[2]
    assert [len(each.problems) for each in answers] == [0, 1]


def test_a_neighbour_that_comes_too_late_for_any_bytes_still_gets_their_share():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as late,
    ):
        late.shutdown(socket.SHUT_WR)
        connection, _ = server.accept()
        select.select([connection], [], [])
        send_bytes(connection)
        assert late.recv(1 << 10) == LOSS.pack(0.0)


def test_a_sender_whose_kernel_counts_no_losses_reports_none(monkeypatch):
    monkeypatch.setattr(node_check, "TCP_INFO", struct.Struct("4096x2Q"))
    rate, loss = fetch(start_serving("127.0.0.1"), 1 << 20, 1.5)
    assert rate > 0
    assert loss is None


def ask(asked, check):
    """Ask each of the agents, and return their answers in order."""
    answers = {}
    for index, each in enumerate(asked):
        each.send = functools.partial(answers.__setitem__, index)
        each.begin(check)
    deadline = time.monotonic() + 30
    while len(answers) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [answers[index] for index in range(len(asked))]


def test_agents_fetch_bytes_from_their_neighbours(tmp_path):
    agents = [NodeProbes(tmp_path, index, "127.0.0.1", None) for index in range(4)]
    (measured,) = ask(agents[:1], Check(1, is_machine=True))
    assert measured.rates[events.CORES] == usable_cores()
    assert "core speed" in measured.rates
    first = ask(agents, Check(1, is_machine=False))
    second = ask(agents, Check(2, is_machine=False, addresses=[each.address for each in first]))
    assert [each.problems for each in first + second] == 8 * [[]]
    assert [set(each.links) for each in first] == 4 * [set()]
    assert [set(each.links) for each in second] == [{1, 3}, {0, 2}, {1, 3}, {0, 2}]
    assert [set(each.losses) for each in second] == [set(each.links) for each in second]
    assert all(0 <= loss < 0.5 for each in second for loss in each.losses.values())
    (alone,) = ask(agents[:1], Check(3, is_machine=False, addresses=[("127.0.0.1", 9), ("", 9)]))
    assert alone.links == {}
    assert len(alone.problems) == 1


def slow_front_of(address):
    """A server in front of `address` that lets `SLOW` bytes per second pass. It has the address
    of the block's value.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def forward():
        connection, _ = server.accept()
        behind = socket.create_connection(address)
        begun, count = time.monotonic(), 0
        with connection, behind:
            while data := behind.recv(1 << 14):
                count += len(data)
                time.sleep(max(0.0, count / SLOW - (time.monotonic() - begun)))
                try:
                    connection.sendall(data)
                except OSError:
                    return

    threading.Thread(target=forward, daemon=True).start()

    class Front:
        def __enter__(self):
            return server.getsockname()

        def __exit__(self, *_):
            server.close()

    return Front()


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cores"),
    [
        ("0::/", "/ /cg rw - cgroup2 cg rw", {"cg/cpu.max": "50000 100000"}, 0.5),
        ("0::/a", "/ /cg rw - cgroup2 cg rw", {"cg/a/cpu.max": "25000 100000"}, 0.25),
        (
            "4:cpu,cpuacct:/pods/c",
            "/pods/c /cg rw - cgroup cg rw,cpu,cpuacct",
            {"cg/cpu.cfs_quota_us": "60000", "cg/cpu.cfs_period_us": "100000"},
            0.6,
        ),
        (
            "3:memory:/c",
            "/c /cg rw - cgroup cg rw,memory",
            {"cg/cpu.cfs_quota_us": "60000", "cg/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("0::/", "/ /cg rw - cgroup2 cg rw", {"cg/cpu.max": "max 100000"}, None),
        (
            "4:cpu:/",
            "/ /cg rw - cgroup cg rw,cpu",
            {"cg/cpu.cfs_quota_us": "-1", "cg/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_a_quota_of_either_version_of_cgroups_limits_the_cores(
    tmp_path, groups, mounts, files, cores
):
    unlimited = usable_cores(tmp_path)
    contents = {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": f"41 31 0:38 {mounts}",
        **files,
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (unlimited if cores is None else cores)


def test_a_later_check_does_not_replace_what_is_stored(tmp_path):
    (tmp_path / f"{Reference('', 'pool')._name}").write_text('{"cores": 4.0}')
    reference = Reference(str(tmp_path), "pool")
    while not reference.rates:
        time.sleep(0.01)
    reference.add({"cores": 1.0, "disk": 2.0})
    while Reference(str(tmp_path), "pool")._stored.result() == {"cores": 4.0}:
        time.sleep(0.01)
    assert Reference(str(tmp_path), "pool")._stored.result() == {"cores": 4.0, "disk": 2.0}
