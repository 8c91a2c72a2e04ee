"""What opens a URL in a task of Flyte asks one door, whatever way the URL took to get there."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import tempfile
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.prediction.predict import predict
from flyte_ddp.project.admission import list_places, places_of_config
from flyte_ddp.recipes.text.pretrained import fetch_model
from flyte_ddp.storage import (
    Storage,
    adopt_storage_environment,
    compute_sha256,
    fetch_file,
    limit_urls,
    permit,
    read_file,
    storage_environment,
    write_file,
)
from flyte_ddp.storage.clients.azure import make_options
from flyte_ddp.storage.limits import LIMITS_VARIABLE
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import TrialRun, build_table
from flyte_ddp.studies.search import Search, Trial, build_trials

REFUSED = r"expected one of allowed\.urls .*table `allowed` of settings\.toml"
ALLOWED = ("s3://bucket/team/*",)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A limited process with a temporary directory of its own, and a file outside of it."""
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    for directory in (scratch, outside):
        directory.mkdir()
    (outside / "key").write_text("secret")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(outside)
    with limit_urls(ALLOWED, ["s3://flyte/data/run"]):
        yield SimpleNamespace(scratch=scratch, outside=outside, root=tmp_path)


@pytest.fixture
def server():
    """An HTTP server that records what is asked for."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_error(404)

        do_HEAD = do_PUT = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield SimpleNamespace(address=f"127.0.0.1:{running.server_port}", requests=requests)
        running.shutdown()


SPELLINGS = (
    *("{file}", "file:{file}", "file://{file}", "local:{file}", "local://{file}", "FILE://{file}"),
    *("key", "./key", "../outside/key", "{scratch}/../outside/key", "simplecache::{file}"),
    *("simplecache::file://{file}", "filecache::simplecache::{file}", "file://{scratch}/../outside"),
    *("http://{host}/x y", " http://{host}/x", "\nhttp://{host}/x", "http://{host}/x\n", "HTTP://{host}/x"),
    *("simplecache::http://{host}/x", "blockcache::http://{host}/x", "zip://a::http://{host}/x"),
    *("s3://bucket/team/x::http://{host}/x", "dir::http://{host}/x", "tar://a::file://{file}"),
    *("https://bucket/team/x", "s3://bucket/other/x", "s3://bucket/team/../x", "gs://bucket/team/x"),
    *("s3://flyte/data/running/x", "s3://flyte/data/run/../x", "memory://x", "data:,x", "ftp://{host}/x"),
    *("webhdfs://{host}/x", "reference://{host}/x", "github://o:r@main/x", "hf://o/r/x"),
    "%2e%2e/outside/key",
)  # fmt: skip
OPENERS = {
    "Storage": Storage,
    "read": read_file,
    "checksum": compute_sha256,
    "write": lambda url: write_file(url, b"x"),
    "fetch": lambda url: fetch_file(url, tempfile.gettempdir() + "/fetched"),
}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
def test_no_spelling_of_a_place_outside_is_opened(machine, server, opener):
    for spelling in SPELLINGS:
        url = spelling.format(
            file=machine.outside / "key", scratch=machine.scratch, host=server.address
        )
        with pytest.raises((ConfigError, FileNotFoundError)) as caught:
            opener(url)
        # A spelling that means no place on this machine may be a file that is not there.
        if isinstance(caught.value, FileNotFoundError):
            assert not url.strip().lower().startswith(("file", "local", "http", "/"))
    assert server.requests == []
    assert (machine.outside / "key").read_text() == "secret"


def test_the_tasks_own_places_and_allowed_ones_are_opened(machine, server):
    write_file(f"{machine.scratch}/file", b"x")
    assert read_file(f"file://{machine.scratch}/file") == b"x"
    for url in ("s3://bucket/team/x", "S3A://bucket/team".lower(), "s3://flyte/data/run/a/b"):
        assert Storage(url).url == url
    with pytest.raises(ConfigError, match=f"^url: {REFUSED}"):
        read_file(str(machine.outside / "key"))
    permit(str(machine.outside))
    assert read_file(str(machine.outside / "key")) == b"secret"
    with limit_urls((f"http://{server.address}/*",), []), pytest.raises(FileNotFoundError):
        read_file(f"http://{server.address}/data")
    assert server.requests


def test_a_link_within_an_allowed_directory_does_not_lead_out_of_it(machine):
    team = machine.root / "team"
    (team / "data").mkdir(parents=True)
    (team / "data" / "file").write_text("x")
    for directory in (team, machine.scratch):
        (directory / "link").symlink_to(machine.outside)
    (machine.root / "mount").symlink_to(team)
    with limit_urls((f"{machine.root}/team/*", f"{machine.root}/mount/*"), []):
        assert read_file(str(team / "data" / "file")) == b"x"
        assert read_file(str(machine.root / "mount" / "data" / "file")) == b"x"
        for directory in (team, machine.scratch):
            with pytest.raises(ConfigError, match=f"^url: {REFUSED}"):
                read_file(str(directory / "link" / "key"))


def test_the_limits_go_where_the_storage_configuration_goes(machine):
    given_by_the_run = storage_environment()
    with limit_urls(("*",), []):
        read_file(str(machine.outside / "key"))
        # An agent does this, and so does a process that predicts.
        adopt_storage_environment(given_by_the_run)
        with pytest.raises(ConfigError, match=REFUSED):
            read_file(str(machine.outside / "key"))


def test_without_limits_any_place_is_opened(tmp_path):
    (tmp_path / "key").write_text("x")
    with (
        limit_urls((), []),
        pytest.raises(ConfigError, match="none, because allowed.urls is empty"),
    ):
        read_file("s3://bucket/x")
    assert LIMITS_VARIABLE not in storage_environment()
    assert read_file(f"file:{tmp_path}/key") == b"x"


@pytest.mark.parametrize("first_to_end", ["first", "second"])
def test_tasks_of_one_process_keep_their_own_limits_in_any_order(first_to_end):
    tasks = {"first": contextlib.ExitStack(), "second": contextlib.ExitStack()}
    for name, task in tasks.items():
        task.enter_context(limit_urls((f"s3://{name}/*",), [f"s3://run/{name}"]))
        permit(f"s3://chosen/{name}")
    for name in tasks:  # The two tasks still run.
        Storage(f"s3://{name}/x"), Storage(f"s3://run/{name}"), Storage(f"s3://chosen/{name}")
    tasks.pop(first_to_end).close()
    (left,) = tasks
    Storage(f"s3://{left}/x"), Storage(f"s3://run/{left}"), Storage(f"s3://chosen/{left}")
    for place in (f"s3://{first_to_end}/x", f"s3://run/{first_to_end}", "s3://other"):
        with pytest.raises(ConfigError, match=REFUSED):
            Storage(place)
    tasks[left].close()
    assert LIMITS_VARIABLE not in os.environ


PLACES = ("http://169.254.169.254/x", "file:/etc/passwd", "local:/etc", "/etc/passwd", "../x")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    place=st.sampled_from(PLACES),
    before=st.text(" \t\n\r", max_size=2),
    after=st.text(" \n\tabc/", max_size=3),
    upper=st.booleans(),
    encoded=st.integers(0, 2),
    where=st.lists(st.sampled_from(["value", "key", "list"]), min_size=1, max_size=3),
)
def test_the_early_word_finds_a_place_in_any_spelling_at_any_depth(
    place, before, after, upper, encoded, where
):
    text = before + (place.upper() if upper else place) + after
    for _ in range(encoded):
        text = "".join(f"%{ord(each):02x}" for each in text)
    options = text
    for kind in where:
        options = {"value": {"a": options}, "list": [1, options], "key": {str(options): 1}}[kind]
    if not isinstance(options, str) and "'" in str(options) and "key" in where[1:]:
        return  # a value that became the text of a key
    assert [url for _, url in list_places(options, "options")] == [text]


def test_a_place_does_not_hide_behind_another_ones_name():
    options = {"a.b": "/etc/passwd", "a": {"b": "s3://bucket/x"}}
    assert [url for _, url in list_places(options, "options")] == ["/etc/passwd", "s3://bucket/x"]


@pytest.mark.parametrize(
    "text", ["bpe", "ROMEO: a/b", "wait... what", "1..2", "~5 minutes", "a: b"]
)
def test_text_is_no_place(text):
    assert list_places({"prompt": text}, "options") == []


# Configs that are made after the check of the inputs

BAD = {
    "initial_model_state": lambda host: {"initial_model_state": f"http://{host}/state.pt"},
    "options": lambda host: {"recipe_options": {"pretrained": f"http://{host}/x y"}},
}


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_a_config_is_checked_where_its_training_starts(machine, server, values):
    recipe = "text" if "recipe_options" in values("") else "digits"
    config = TrainingConfig(**values(server.address))
    with pytest.raises(ConfigError, match=REFUSED):
        recipe_program(recipe, config)
    with pytest.raises(ConfigError, match=REFUSED):
        build_trials(recipe, {}, [values(server.address)])
    assert next(url for _, url in places_of_config(config)) in str(values(server.address))
    assert server.requests == []


@pytest.mark.long
def test_no_place_that_tpe_draws_is_used(machine, server):
    option = "recipe_options.pretrained"
    (drawn,) = build_trials("text", {}, [{option: ""}])
    with pytest.raises(ConfigError, match=rf"^recipe_options\.pretrained: {REFUSED}"):
        drawn.with_values({option: f"http://{server.address}/model"})
    grid = {option: ["", f"http://{server.address}/model"]}
    search = Search("none", "tpe", grid, seed=0)
    suggested = []

    def replace(values):
        try:
            suggested.append(drawn.with_values(values))
        except ConfigError:
            return None
        return suggested[-1]

    for number in range(1, 30):
        trial = search.start(drawn.__class__(**{**vars(drawn), "number": number}), replace)
        assert "http" not in str(trial.config)
        search.finish(number, "COMPLETE", 1.0)
    assert server.requests == []


def test_options_of_the_card_beside_a_model_are_checked_before_anything_is_read(machine, server):
    directory = machine.scratch / "model"
    directory.mkdir()
    (directory / "model_state.pt").write_bytes(b"no state, and not read")
    options = {"pretrained": f"http://{server.address}/model"}
    card = {"recipe": "text", "config": {"recipe_options": options}}
    (directory / "run_card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match=rf"^recipe_options\.pretrained: {REFUSED}"):
        predict("text", str(directory / "model_state.pt"), "", str(machine.scratch / "out"))
    assert server.requests == []
    with pytest.raises(ConfigError, match=REFUSED):
        fetch_model(f"http://{server.address}/model", machine.scratch / "copy")


# Keys and secrets go where they belong


@pytest.mark.parametrize(
    "given",
    [
        {"ACCOUNT_NAME": "own", "ACCOUNT_KEY": "k", "SAS_TOKEN": "s"},
        {"CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=own;AccountKey=k"},
    ],
)
def test_keys_of_one_account_of_azure_are_not_sent_to_another(monkeypatch, given):
    for name in list(os.environ):
        if "AZURE" in name:
            monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    own = make_options(False, "abfs://container/x")
    keys = {"account_key", "sas_token", "connection_string"}
    assert keys & set(own)
    for same in ("abfs://c@own/x", "abfs://c@own.dfs.core.windows.net/x@other", "az://c/a@other"):
        assert make_options(False, same) == own
    for other in ("abfs://c@other/x", "abfss://c@other.dfs.core.windows.net/x@own"):
        found = make_options(False, other)
        assert found["account_name"] == "other"
        assert not keys & set(found)


def test_a_secret_among_the_values_of_a_trial_is_not_shown():
    config = TrainingConfig(monitor={"metric": "loss", "mode": "min"})
    values = {"api_key": "sk-0123456789abcdef", "lr": 0.1}
    run = TrialRun(Trial(1, values, values, config), "memory://trial")
    page = StudyReport("own", [run]).render_fragment()
    for shown in (str(run.trial), page, build_table([run]).to_csv()):
        assert "sk-0123" not in shown
    assert "api_key" in page
    assert run.trial.values == values
