"""A profile begins and ends between steps, and whatever fails, the steps go on."""

from __future__ import annotations

import gzip
import threading

import pytest
import torch
from torch.autograd import profiler as torch_profiler

from flyte_ddp.launch.protocol.messages import Profile
from flyte_ddp.rank import fast_start, profiler
from flyte_ddp.rank.profiler import Recording, answer_profile

ORIGINAL = torch_profiler.record_function


def make_optimizer():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


def profile(directory, take_step, num_steps=2):
    """Return a rank's answer to a request, while this thread takes steps."""
    answers, is_answered = [], threading.Event()

    def send(message):
        answers.append(message)
        is_answered.set()

    request = Profile("id", 0, num_steps, f"{directory}/id")
    thread = threading.Thread(target=answer_profile, args=(request, send))
    thread.start()
    while not is_answered.wait(0.001):
        take_step()
    thread.join()
    return answers[0]


def check_nothing_is_left():
    assert torch_profiler.record_function is ORIGINAL
    assert not torch.autograd._profiler_enabled()


def test_a_profile_has_the_steps_that_were_asked_for(tmp_path):
    answer = profile(tmp_path, make_optimizer().step)
    assert (answer.problem, answer.files) == ("", ["trace-rank-0.json.gz"])
    trace = gzip.decompress((tmp_path / "id" / answer.files[0]).read_bytes()).decode()
    assert trace.count('"name": "Optimizer.step#SGD.step"') == 2
    assert '"ProfilerStep#1"' in trace
    assert '"ProfilerStep#2"' not in trace
    check_nothing_is_left()


@pytest.mark.parametrize(
    ("has_torch", "problem"),
    [
        (True, "TimeoutError: expected 2 optimizer steps within 0.1 s, got 0"),
        (False, "RuntimeError: the process of this rank has not imported torch, so far"),
    ],
)
def test_without_a_step_there_is_a_line(tmp_path, monkeypatch, has_torch, problem):
    monkeypatch.setattr(profiler, "MAX_PROFILE_SECONDS", 0.1)
    monkeypatch.setattr(profiler, "has_imported", lambda name: has_torch)
    answer = profile(tmp_path, lambda: None)
    assert (answer.problem, answer.files) == (problem, [])
    make_optimizer().step()  # the next step removes what waits for it
    check_nothing_is_left()


def test_a_step_that_takes_too_long_ends_the_profile(monkeypatch):
    monkeypatch.setattr(profiler, "MAX_PROFILE_SECONDS", 0.0)
    optimizer, recording = make_optimizer(), Recording(5)
    recording._profiler = profiler.start_profiler()
    with pytest.raises(TimeoutError, match="expected 5 optimizer steps within 0 s, got 0"):
        recording.record()
    optimizer.step()
    check_nothing_is_left()


@pytest.mark.parametrize("name", ["start_profiler", "store_packed"])
def test_a_profiler_that_fails_is_a_line(tmp_path, monkeypatch, name):
    def fail(*_):
        raise RuntimeError("no\nprofiler")

    monkeypatch.setattr(profiler, name, fail)
    answer = profile(tmp_path, make_optimizer().step)
    assert (answer.problem, answer.files) == ("RuntimeError: no profiler", [])
    check_nothing_is_left()


def test_a_file_that_is_too_large_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_BYTES", 10)
    answer = profile(tmp_path, make_optimizer().step)
    assert "expected so few steps that trace-rank-0.json has at most 0 MiB" in answer.problem
    assert not any(tmp_path.iterdir())


def test_what_a_gpu_s_memory_holds_is_a_file_of_the_profile(tmp_path, monkeypatch):
    def dump(file):
        file.write_bytes(b"segments")
        return [file]

    monkeypatch.setattr(fast_start, "dump_gpu_memory", dump)
    answer = profile(tmp_path, make_optimizer().step)
    assert answer.files == ["trace-rank-0.json.gz", "memory-rank-0.pickle.gz"]
    assert gzip.decompress((tmp_path / "id" / answer.files[1]).read_bytes()) == b"segments"
