"""Predictions of new data: the same at any number of processes, whatever is lost on the way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from distributed import Client, LocalCluster
from pyarrow import parquet
from torch.utils.data import TensorDataset

from examples.tasks.score_nightly import SCORE
from flyte_ddp import predict
from flyte_ddp.__main__ import main
from flyte_ddp.checkpoints import EXPORT
from flyte_ddp.checkpoints.ownership import Ownership
from flyte_ddp.config import resolve
from flyte_ddp.data import Shards
from flyte_ddp.errors import ConfigError, DataError, RankFailure
from flyte_ddp.prediction.job import MANIFEST, RUN, PredictionJob, part_name
from flyte_ddp.prediction.model import OneDevice, Predictor
from flyte_ddp.promotion.champion import CARD, ChampionStore
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.recipes.digits import Digits
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.recipes.problems import MultiLabel, Regression, Segmentation
from flyte_ddp.storage import Storage
from flyte_ddp.storage.state_dict_file import pin_state, with_class_names
from flyte_ddp.training.contract import open_datasets
from flyte_ddp.world import World
from tests.promotion.test_champion import manifest
from tests.support.dask_runs import eventually
from tests.support.errors import raises_one_line
from tests.support.foreign_states import FOREIGN
from tests.support.image_store import image_tree, write_tree
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
def test_two_nodes_one_of_whose_ranks_is_killed_write_what_one_does(client, state, tmp_path):
    """And the same call makes again what is missing alone."""
    given = {**SIZES, "client": client, "cluster": {"threads_per_rank": 1}, "progress": False}
    config, lines = log_batches(tmp_path, end="kill", ends_at=28)
    given["config"] = config
    one, two = tmp_path / "one", tmp_path / "two"
    made = predict(LOGGED, state, "", str(one), nnodes=1, **given)
    assert (made.num_rows, len(made.paths), len(lines())) == (360, 6, 19)
    predict(LOGGED, state, "", str(two), **given)
    assert 38 < len(lines()) <= 38 + 2 * 3  # Each rank may have had a part in hand.
    assert contents(two) == contents(one)
    tables = [parquet.read_table(path) for path in made.paths]
    assert [key for table in tables for key in table["key"].to_pylist()] == list(range(360))

    (one / "part-000002.parquet").unlink()
    (remains := one / "part-000001.parquet.killed.tmp").touch()
    times = {file: file.stat().st_mtime_ns for file in one.iterdir() if file != remains}
    assert predict(LOGGED, state, "", str(one), nnodes=1, **given) == made
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert contents(one) == contents(two)
    assert not remains.exists()


@pytest.mark.long
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


LOGGED = "tests.support.predicted.Logged"


def log_batches(tmp_path, **options):
    """The config of a recipe that logs batches, and what returns its lines."""
    log = tmp_path / "log"
    log.touch()
    config = {"recipe_options": {"log": str(log), **options}}
    return config, lambda: log.read_text().splitlines()


@pytest.mark.long
def test_a_killed_rank_costs_the_part_in_hand(state, tmp_path):
    config, lines = log_batches(tmp_path, end="kill", ends_at=6)
    output = tmp_path / "made"
    predict(LOGGED, state, "", str(output), config=config, nproc_per_node=1, **SIZES)
    # Batches: one for the schema, a part of three, two that are lost, and the other parts.
    assert len(lines()) == 1 + 3 + 2 + 15
    assert sorted(file.name for file in output.iterdir()) == [MANIFEST, *contents(output)]
    assert len(contents(output)) == 6


@pytest.mark.long
def test_a_rank_that_hangs_is_ended_and_its_part_made_again(state, tmp_path, caplog):
    config, lines = log_batches(tmp_path, end="hang", ends_at=6)
    config["stall_timeout"] = 20
    output = tmp_path / "made"
    made = predict(LOGGED, state, "", str(output), config=config, nproc_per_node=1, **SIZES)
    assert (made.num_rows, len(contents(output)), len(lines())) == (360, 6, 21)
    assert "no rank made progress for" in caplog.text


@pytest.mark.long
def test_a_part_that_kills_its_rank_is_named_when_all_others_are_there(state, tmp_path):
    output = tmp_path / "made"
    with raises_one_line(RankFailure, r"^part-000002\.parquet: .*max_restarts: 3.*SIGKILL"):
        predict(
            "tests.support.predicted.Poisoned", state, "", str(output), nproc_per_node=1, **SIZES
        )
    assert [*contents(output)] == [part_name(number) for number in (0, 1, 3, 4, 5)]


def test_an_error_of_the_recipe_names_part_and_file(state, tmp_path):
    config, _ = log_batches(tmp_path, end="fail", ends_at=3)
    output = str(tmp_path / "made")
    with pytest.raises(RankFailure, match=r"^part-00000\d\.parquet: .*weights\.bin(.|\n)*in fail"):
        predict(LOGGED, state, "", output, config=config, nproc_per_node=1, **SIZES)


def test_a_batch_that_does_not_fit_is_one_line(state, tmp_path):
    config, _ = log_batches(tmp_path, end="run out of memory", ends_at=6)
    output = str(tmp_path / "made")
    with raises_one_line(
        ConfigError, r"^batch_size: expected fewer .* got 20, with which part-0000"
    ):
        predict(LOGGED, state, "", output, config=config, nproc_per_node=1, **SIZES)


@pytest.mark.parametrize("end", ["wait", "notice late"])
@pytest.mark.long
def test_sigterm_ends_predictions_after_the_parts_in_hand(end, state, tmp_path):
    config, lines = log_batches(tmp_path, end=end, ends_at=8)  # a batch of the third part
    output = tmp_path / "made"
    words = [sys.executable, "-m", "flyte_ddp", "predict", LOGGED, "--model-state", state]
    words += ["--output", str(output), "--nproc-per-node", "1", "--config", json.dumps(config)]
    words += ["--batch-size", "20", "--part-size", "60"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as command:
        assert eventually(lambda: len(contents(output)) >= 2, 120)
        command.terminate()
        error = command.stderr.read()
    assert command.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: the run was stopped at step" in error
    assert "to resume: " in error
    assert len(lines()) == 1 + 3 * len(contents(output)) < 19
    assert main(words[3:]) == 0
    assert len(lines()) == 1 + 18


@pytest.mark.long
def test_a_node_that_comes_back_joins_again(state, tmp_path):
    config, lines = log_batches(tmp_path, end="wait", ends_at=6)
    output = tmp_path / "made"
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        ThreadPoolExecutor() as pool,
    ):
        fields = {"grow_delay": 0.5, "grow_interval": 0, "return_timeout": 0.5}
        made = pool.submit(
            partial(predict, LOGGED, state, "", str(output), config=config, nnodes=2),
            client=client,
            cluster={**fields, "threads_per_rank": 1},
            progress=False,
            **SIZES,
        )
        assert eventually(lambda: len(lines()) == 6 or made.done(), 120)
        cluster.scale(2)
        assert made.result().num_rows == 360
    assert (lines()[0], lines()[-1]) == ("1", "2")
    assert len(lines()) == 1 + 18


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
    job = PredictionJob("digits", resolve({}, {}), pin_state(str(file)), "", 20, 60, {})
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


def test_an_output_into_which_another_process_predicts_is_refused_by_its_name(state, tmp_path):
    output = str(tmp_path / "made")
    Path(output).mkdir()
    with (
        Ownership(f"{output}/{RUN}", "", 10.0),
        raises_one_line(ConfigError, f"^output: expected .*, got {output}, which .* is alive"),
    ):
        predict("digits", state, "", output, nproc_per_node=1, **SIZES)


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
    job = PredictionJob(recipe, config, state, str(tmp_path / "output"), 2, 4, {})
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
    put(range(100, 250))
    expected = "data: num_samples: expected 100, as of the predictions in .* got 150; others need"
    with raises_one_line(ConfigError, expected):
        check(recorded)
    put([*range(100, 150), 777, *range(151, 200)])  # The new data have as many bytes.
    with raises_one_line(ConfigError, "data: (samples|contents of the shards): expected .* got"):
        check(recorded)


def test_a_mixture_is_not_predicted(tmp_path, state):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"number": 1}\n' * 100)
    place = str(tmp_path / "data")
    Shards(place).prepare()
    with raises_one_line(ConfigError, "InPlace.predict_dataset: expected each sample once, got a"):
        open_predictor(tmp_path, IN_PLACE, state, place=place, in_mixture=True)


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


@pytest.mark.parametrize("form", ["own", "ddp", "script"])
def test_images_without_classes_get_those_of_the_model_and_the_names_of_their_files(form, tmp_path):
    write_tree(image_tree(count=3), tmp_path / "images")
    recipe, options = get_recipe("image_folder", {"image_size": 64}), {"image_size": 64}
    recipe.class_names, recipe._image_size = ["cat", "dog"], 64
    state = with_class_names(recipe.model().state_dict(), recipe.class_names)
    (tmp_path / "state.pt").write_bytes(FOREIGN[form](state))
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
