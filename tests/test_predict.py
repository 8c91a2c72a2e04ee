"""Predictions of new data: the same at any number of processes, whatever is lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

import dask
import pytest
import torch
from distributed import Client, LocalCluster, WorkerPlugin
from pyarrow import parquet
from torch.utils.data import TensorDataset

from examples.score_nightly import SCORE
from flyte_ddp import predict
from flyte_ddp.__main__ import main
from flyte_ddp.checkpoints import EXPORT
from flyte_ddp.config import resolve
from flyte_ddp.data import Shards
from flyte_ddp.errors import ClusterError, ConfigError, DataError
from flyte_ddp.launch.nodes.dask.calls import ByValue
from flyte_ddp.prediction import keeper, workers
from flyte_ddp.prediction.job import MANIFEST, PredictionJob
from flyte_ddp.prediction.model import OneDevice, Predictor
from flyte_ddp.prediction.workers import PredictionWorkers
from flyte_ddp.promotion.champion import CARD, ChampionStore
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.recipes.digits import Digits
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.recipes.tasks import MultiLabel, Regression, Segmentation
from flyte_ddp.storage import Storage
from flyte_ddp.storage.weights import pin_state, with_class_names
from flyte_ddp.training.contract import open_datasets
from flyte_ddp.world import World
from tests.support.dask_runs import start_scheduler
from tests.support.errors import raises_one_line
from tests.support.foreign_states import FOREIGN
from tests.support.image_store import image_tree, write_tree
from tests.test_champion import manifest
from workflows.predict import predict_wf

Device = namedtuple("Device", ["total_memory"])
SIZES = {"batch_size": 20, "part_size": 60}  # six parts of the 360 held-out digits


def write_state(file, recipe="digits", class_names=(), **options):
    torch.manual_seed(0)
    state = get_recipe(recipe, options).model().state_dict()
    torch.save(with_class_names(state, class_names) if class_names else state, file)
    return str(file)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return write_state(tmp_path_factory.mktemp("state") / "model_state.pt")


def contents(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.glob("part-*"))}


@pytest.mark.long
def test_two_processes_one_of_them_killed_write_what_one_does(client, state, tmp_path):
    """And the same call makes again what is missing alone."""
    kills, recipe = tmp_path / "kills", "tests.support.predicted.Mortal"
    given = {**SIZES, "client": client, "cluster": {"threads_per_rank": 1}, "progress": False}
    config = {"recipe_options": {"kills": str(kills)}}
    one, two = tmp_path / "one", tmp_path / "two"
    made = predict(recipe, state, "", str(one), config=config, **given)
    assert (made.num_rows, len(made.paths)) == (360, 6)
    kills.touch()
    predict(recipe, state, "", str(two), config=config, nnodes=2, **given)
    assert not kills.exists()
    assert contents(two) == contents(one)
    tables = [parquet.read_table(path) for path in made.paths]
    assert [key for table in tables for key in table["key"].to_pylist()] == list(range(360))

    (one / "part-000002.parquet").unlink()
    (remains := one / "part-000001.parquet.killed.tmp").touch()
    times = {file: file.stat().st_mtime_ns for file in one.iterdir() if file != remains}
    assert predict(recipe, state, "", str(one), config=config, **given) == made
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert contents(one) == contents(two)
    assert not remains.exists()


def test_processes_that_predict_keep_the_memory_of_batches(client, state, tmp_path):
    given = {"client": client, "cluster": {"threads_per_rank": 1}, "progress": False}
    predict("tests.support.predicted.Thrifty", state, "", str(tmp_path / "made"), **given)


@pytest.mark.long
def test_all_workers_of_a_client_predict(client, state, tmp_path):
    given = {**SIZES, "client": client, "progress": False}
    name = "tests.support.predicted.Processes"
    made = predict(name, state, "", str(tmp_path / "made"), **given)
    tables = [parquet.read_table(path) for path in made.paths]
    assert len({each for table in tables for each in table["process"].to_pylist()}) == 2


@pytest.mark.long
def test_threads_are_the_configs_or_the_users_own(state, tmp_path):
    with (
        LocalCluster(n_workers=1, dashboard_address=None, env={"OMP_NUM_THREADS": "3"}) as cluster,
        Client(cluster) as client,
    ):
        for threads, expected in [(0, 3), (5, 5)]:
            given = {"client": client, "cluster": {"threads_per_rank": threads}}
            output = str(tmp_path / f"made-{threads}")
            made = predict(
                "tests.support.predicted.Threads", state, "", output, progress=False, **given
            )
            assert set(parquet.read_table(made.paths[0])["threads"].to_pylist()) == {expected}


class OneProcess(PredictionWorkers):
    """A cluster whose own workers predict."""

    def _check_nodes(self):
        self._num_processes = 1


@pytest.fixture
def one_process():
    settings = {"no-workers-timeout": "50ms", "allowed-failures": 0}  # less than a restart takes
    with (
        dask.config.set({f"distributed.scheduler.{name}": each for name, each in settings.items()}),
        LocalCluster(n_workers=1, dashboard_address=None, resources={"one": 1}) as cluster,
        Client(cluster) as client,
    ):
        yield OneProcess(client, None, None, b"", "", None, "one")


def test_a_lost_part_is_made_again_also_when_it_was_done_and_some_times_at_most(
    one_process, monkeypatch
):
    monkeypatch.setattr(keeper, "call", lambda method, number: number)
    made = one_process.run("part", [(number,) for number in range(4)])
    first = next(made)
    while "memory" not in one_process.client.run_on_scheduler(list_task_states):
        time.sleep(0.01)
    (process,) = one_process.client.run(os.getpid).values()
    os.kill(process, signal.SIGKILL)
    assert sorted([first, *made]) == [0, 1, 2, 3]

    monkeypatch.setattr(keeper, "call", lambda method, number: os._exit(1))
    monkeypatch.setattr(workers, "MAX_LOSSES", 0)
    with pytest.raises(ClusterError, match=r"^part\(0,\) lost 1 processes that predict"):
        next(one_process.run("part", [(0,)]))


def test_a_file_that_is_missing_is_not_a_scheduler_that_is_gone(one_process, monkeypatch):
    def read(method, number):
        raise FileNotFoundError(2, "No such file or directory", "images/1.png")

    monkeypatch.setattr(keeper, "call", read)
    with pytest.raises(FileNotFoundError, match=r"images/1\.png"):
        next(one_process.run("part", [(0,)]))


def test_a_node_whose_processes_end_too_often_is_given_up(one_process):
    class Ending(WorkerPlugin):
        """Starts processes that end at once."""

        name = "one"

        def start_process(self, module, connection):
            self.connection = os.dup(connection.fileno())  # as the process would have it
            return subprocess.Popen(["false"])

    one_process.client.register_plugin(Ending())
    call = ByValue(keeper.keep_processes)
    with pytest.raises(RuntimeError, match=r"^2 processes .* on 0, the last with exit code 1$"):
        one_process.client.submit(call, "one", b"", [{}], 1).result()


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_scheduler_that_is_gone_ends_the_predictions_in_one_line(
    tmp_path, monkeypatch, is_noticed
):
    """Also where a result is asked for before the client notices, and nothing answers."""
    monkeypatch.setattr(keeper, "call", lambda method, number: number)
    scheduler, address = start_scheduler(tmp_path)
    command = [sys.executable, "-m", "dask", "worker", address, "--no-nanny", "--no-dashboard"]
    is_over = threading.Event()
    with (
        subprocess.Popen([*command, "--resources", "one=1"], stderr=subprocess.DEVNULL) as worker,
        Client(address) as client,
        contextlib.ExitStack() as stack,
    ):
        for end in (worker.kill, scheduler.wait, scheduler.kill, is_over.set):
            stack.callback(end)
        made = OneProcess(client, None, None, b"", "", None, "one").run("part", [(0,), (1,), (2,)])
        next(made)
        while "processing" in client.run_on_scheduler(list_task_states):
            time.sleep(0.01)
        if not is_noticed:
            monkeypatch.setattr(client, "_reconnect", partial(asyncio.to_thread, is_over.wait))
            client.rpc.timeout = 0.1
        scheduler.kill()
        scheduler.wait()
        with raises_one_line(ClusterError, match="^the Dask scheduler is gone$"):
            list(made)


def list_task_states(dask_scheduler):
    return [task.state for task in dask_scheduler.tasks.values()]


def test_command_and_task_predict_with_the_champion_and_its_options(tmp_path, capsys):
    recipe = "tests.support.predicted.Sized"
    state = Path(write_state(tmp_path / "state.pt", recipe, width=10)).read_bytes()
    trained = manifest(recipe=recipe, config={"recipe_options": {"width": 10}})
    ChampionStore(str(tmp_path / "champion")).promote(state, trained, b"")
    output = tmp_path / "output"
    words = ["predict", recipe, "--model-state", str(tmp_path / "champion"), "--output"]
    words += [str(output), "--nproc-per-node", "1", "--batch-size", "60", "--part-size", "240"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"360 predictions in 2 files of {output}\n"

    model = get_recipe(recipe, {"width": 10}).model()
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    directory = tmp_path / "data"
    directory.mkdir()
    get_recipe(recipe).prepare("", directory)
    inputs, _ = get_recipe(recipe).datasets(directory)[1].tensors
    with torch.no_grad():
        probability, number = model(inputs.unsqueeze(1).float() / 255).softmax(1).max(1)
    table = parquet.read_table(output)
    assert table["class"].to_pylist() == [str(each) for each in number.tolist()]
    torch.testing.assert_close(
        torch.tensor(table["probability"].to_pylist()), probability, rtol=0, atol=1e-5
    )

    # nothing is missing, so the task starts nothing
    made = predict_wf(
        recipe=recipe,
        model_state=str(tmp_path / "champion"),
        output=str(output),
        batch_size=60,
        part_size=240,
    )
    assert (made.predictions.path, made.num_rows) == (str(output), 360)
    assert SCORE.schedule.cron_schedule.schedule == "0 5 * * *"

    assert main([*words, "--config", '{"recipe_options": {"width": 3}}']) == 2
    assert main([*words, "--batch-size", "120"]) == 2
    assert main(["predict", "mnist", *words[2:]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", got")[0] for line in lines] == [
        "error: recipe_options.width: expected 10, with which the model was trained",
        f"error: batch_size: expected 60, as of the predictions in {str(output)!r}",
        f"error: recipe: expected {recipe!r}, of which the model is",
    ]


def test_a_model_that_was_deleted_meanwhile_is_named_with_what_to_do(tmp_path):
    file = Path(write_state(tmp_path / "state.pt"))
    job = PredictionJob("digits", resolve({}, {}), pin_state(str(file)), "", 20, 60)
    file.unlink()
    expected = "state.pt', which was there when it was given, but it was deleted meanwhile"
    with raises_one_line(ConfigError, f"^model_state: expected '.*{expected}.*: start again, "):
        Predictor(job, str(tmp_path))


def test_bad_input_is_one_line_before_anything_starts(state, tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others/notes.txt").touch()
    for given, line in {
        ("digits", state, "others"): r"output: expected an empty directory, .* with notes\.txt$",
        ("digits", str(tmp_path / "none.pt"), "new"): r"model_state: expected .* does not exist$",
        ("digit", state, "new"): r"recipe: expected .*did you mean digits",
    }.items():
        recipe, model_state, output = given
        with raises_one_line(ConfigError, match=line):
            predict(recipe, model_state, "", str(tmp_path / output), **SIZES)
    with pytest.raises(ConfigError, match=r"^part_size: expected a multiple of batch_size \(20\)"):
        predict("digits", state, "", str(tmp_path / "new"), batch_size=20, part_size=50)


def test_the_card_beside_a_state_tells_what_it_was_trained_with(tmp_path):
    state = write_state(tmp_path / "model_state.pt")
    (tmp_path / EXPORT).mkdir()
    card = {"recipe": "mnist", "config": {"recipe_options": {}}}
    (tmp_path / EXPORT / CARD).write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="^recipe: expected 'mnist', of which the model is"):
        predict("digits", state, "", str(tmp_path / "output"))


def open_predictor(tmp_path, recipe, state, source="", **options):
    directory = tmp_path / "prepared"
    directory.mkdir()
    config = resolve({}, {"recipe_options": options, "data_workers": 0})
    prepare_data(get_recipe(recipe, options), source, directory, "prepare_new_data")
    job = PredictionJob(recipe, config, state, str(tmp_path / "output"), 2, 4)
    return Predictor(job, str(directory))


def write(predictor, number):
    """Write a part as the driver has it done: the manifest is there before."""
    manifest = json.dumps(predictor.describe()).encode()
    Storage(predictor.job.output).write(MANIFEST, manifest)
    predictor.write_part(number)


IN_PLACE = "tests.support.predicted.InPlace"


@pytest.mark.parametrize("kind", ["lines", "shards"])
def test_data_that_a_recipe_reads_where_they_lie_are_compared(kind, tmp_path, state):
    def put(numbers):
        lines = [json.dumps({"number": each}) if kind == "shards" else each for each in numbers]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data/a.jsonl").write_text("".join(f"{each}\n" for each in lines))
        if kind == "shards":
            (tmp_path / "data/flyte_ddp_index.npz").unlink(missing_ok=True)
            Shards(str(tmp_path / "data")).prepare()

    def check(recorded=None):
        directory = tmp_path / "prepared"
        if directory.exists():
            shutil.rmtree(directory)
        place = str(tmp_path / ("data" if kind == "shards" else "data/a.jsonl"))
        predictor = open_predictor(tmp_path, IN_PLACE, state, place=place)
        if recorded is not None:
            (tmp_path / "output").mkdir(exist_ok=True)
            (tmp_path / "output/_manifest.json").write_text(json.dumps(recorded))
            predictor.check_data()
        return predictor.describe_data()

    put(range(100, 200))
    found = check()
    assert found["num_samples"] == 100
    recorded = {"num_samples": 100, "samples": json.dumps(found)}
    check(recorded)
    check({"num_samples": 100})  # of a version before
    put(range(100, 250))
    expected = "data: num_samples: expected 100, as of the predictions in .* got 150; others need"
    with raises_one_line(ConfigError, expected):
        check(recorded)
    with raises_one_line(ConfigError, expected):
        check({"num_samples": 100})
    put([*range(100, 150), 777, *range(151, 200)])  # as many bytes
    with raises_one_line(ConfigError, "data: (samples|contents of the shards): expected .* got"):
        check(recorded)


@pytest.mark.long
def test_predictions_of_data_that_have_grown_are_refused_and_of_the_same_nothing_is_made(
    client, state, tmp_path
):
    (tmp_path / "lines").write_text("1\n2\n3\n" * 10)
    options = {"recipe_options": {"place": str(tmp_path / "lines")}}
    given = {"config": options, "client": client, "progress": False, "batch_size": 8}
    call = partial(predict, IN_PLACE, state, "", str(tmp_path / "output"), part_size=16, **given)
    made = call()
    times = [os.stat(path).st_mtime_ns for path in made.paths]
    assert (made.num_rows, len(made.paths)) == (30, 2)
    assert call() == made
    assert [os.stat(path).st_mtime_ns for path in made.paths] == times
    (tmp_path / "lines").write_text("1\n2\n3\n" * 25)
    with pytest.raises(ConfigError, match="data: num_samples: expected 30, .* got 75; others need"):
        call()


def test_images_without_classes_get_those_of_the_model_and_the_names_of_their_files(tmp_path):
    write_tree(image_tree(count=3), tmp_path / "images")
    recipe, options = get_recipe("image_folder", {"image_size": 64}), {"image_size": 64}
    recipe.class_names, recipe._image_size = ["cat", "dog"], 64
    state = with_class_names(recipe.model().state_dict(), recipe.class_names)
    torch.save(state, tmp_path / "state.pt")
    predictor = open_predictor(
        tmp_path, "image_folder", str(tmp_path / "state.pt"), str(tmp_path / "images"), **options
    )
    write(predictor, 1)
    table = parquet.read_table(tmp_path / "output/part-000001.parquet")
    files = sorted(
        file.relative_to(tmp_path / "images").as_posix()
        for file in (tmp_path / "images").rglob("*")
        if file.is_file()
    )
    assert table["key"].to_pylist() == files[4:8]
    assert set(table["class"].to_pylist()) <= {"cat", "dog"}


def test_a_state_of_another_model_or_for_several_gpus_is_one_line(tmp_path, monkeypatch):
    other = write_state(tmp_path / "other.pt", "mnist")
    with pytest.raises(ConfigError, match=r"^model_state: expected one of .*other shapes at conv1"):
        open_predictor(tmp_path, "digits", other)
    gpu = World(0, 1, torch.device("cuda", 0))
    for size, expectation in {
        1000: contextlib.nullcontext(),
        64: pytest.raises(ConfigError, match="^model_state: expected a model that one GPU holds"),
    }.items():
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, size=size: Device(size)
        )
        with expectation:
            OneDevice(Recipe(), resolve({}, {}), gpu).check_memory(torch.nn.Linear(3, 4))


@pytest.mark.parametrize("form", ["script", "pickle"])
def test_a_state_that_another_program_has_saved_predicts(form, state, tmp_path):
    given = tmp_path / "given.pt"
    given.write_bytes(FOREIGN[form](torch.load(state)))
    predictor = open_predictor(tmp_path, "digits", str(given))
    torch.testing.assert_close(predictor.model.state_dict(), torch.load(state), rtol=0, atol=0)


def test_columns_are_those_of_the_task_or_of_the_recipe(tmp_path, monkeypatch, state):
    outputs = torch.tensor([[0.0, 2.0]])
    named = MultiLabel().prediction_columns(outputs)
    assert {name: values.tolist() for name, values in named.items()} == {
        "0": [0.5],
        "1": [pytest.approx(0.8808, abs=1e-4)],
    }
    assert Regression().prediction_columns(outputs) == {"prediction": outputs}
    masks = Segmentation().prediction_columns(outputs[..., None, None])
    assert masks["mask"].tolist() == [[[1]]]
    with pytest.raises(ConfigError, match=r"^Recipe\.prediction_columns: expected a method of"):
        Recipe().prediction_columns(outputs[0])

    predictor = open_predictor(tmp_path, "digits", state)
    monkeypatch.setattr(Digits, "prediction_columns", lambda self, outputs: {"first": outputs[:1]})
    with pytest.raises(ConfigError, match="value for each of 2 samples, .* got 'first' with 1"):
        write(predictor, 0)


def test_a_split_without_a_seed_is_that_of_the_training(tmp_path, monkeypatch, state):
    def draw(self, directory):
        return [TensorDataset(torch.rand(9, 8, 8), torch.zeros(9)) for _ in range(2)]

    monkeypatch.setattr(Digits, "datasets", draw)
    predictor = open_predictor(tmp_path, "digits", state)
    _, held_out = open_datasets(get_recipe("digits"), tmp_path, resolve({}, {}))
    assert predictor.dataset.tensors[0].equal(held_out.tensors[0])


def test_data_without_samples_are_refused(tmp_path, monkeypatch, state):
    monkeypatch.setattr(Digits, "predict_dataset", lambda self, directory: [])
    with pytest.raises(DataError, match="^data: expected at least one sample to predict, got none"):
        open_predictor(tmp_path, "digits", state)
