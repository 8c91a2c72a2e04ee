"""No password, signature or key leaves a run: not in a record, not in a message. Other texts leave
as they are.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from types import SimpleNamespace

import pytest

from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.flyte.failures import flyte_errors
from flyte_ddp.launch.control.driver import Dispatcher
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import card_files, run_card
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.rank.entry import describe_error
from flyte_ddp.recipes import Recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage import redact_url, redact_values
from tests.support.runs import new_run
from tests.support.short_run import feed, run_finished, started, whole_run
from tests.support.trainers import new_trainer

HEX = "0123456789abcdef0123456789abcdef01234567"
SECRETS = [  # each with "hunter2", or with one of `KEYS`
    "https://user:hunter2@host/a",
    "https://hunter2@host/a",
    "git+https://hunter2@host/x.git",
    "s3://hunter2@bucket/a",
    "https://user:a/hunter2?b#c@host/a/b",
    "https://user:a@hunter2@host/a",
    "https://user:12/hunter2@host/a",
    "s3://me:hunter2/+x@bucket/a",
    "sftp://me:a::hunter2@host/a",
    "redis://:hunter2@host:1/0",
    "https://user:p?x@hunter2?z=hunter2@host/a",
    "https://host:80/a?e=a@b&sig=hunter2",
    "simplecache::s3://me:hunter2@b/a",
    "zip://*.csv::https://me:hunter2@host/a.zip",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=hunter2&X-Amz-Security-Token=hunter2&X-Amz-Signature=hunter2",
    "https://a.blob.core.windows.net/c/b?sv=2022&se=hunter2&sig=hunter2%3D",
    "https://host/a?AWSAccessKeyId=hunter2&Signature=hunter2&Expires=1",
    "https://host/a?GoogleAccessId=hunter2",
    *(
        f"https://host/a?{name}=hunter2"
        for name in ("token", "access_token", "api_key", "password", "key", "code")
    ),
    "https://host/a#access_token=hunter2&state=1",
    "Max retries exceeded with url: /c/b?sv=2022-11&se=2026&sig=hunter2a (Caused by",
    "GET /k?X-Amz-Algorithm=A&X-Amz-Signature=hunter2",
    "403, message='Forbidden', url='https://host/a?X-Amz-Signature=hunter2'",
    "password=hunter2",
    "db_password = 'my hunter2'",
    "{'password': 'my hunter2'}",
    '{"api_key": "hunter2"}',
    "api_key: hunter2",
    "X-Api-Key: hunter2",
    "--password hunter2 --epochs 3",
    "token=hunter2",
    "MLFLOW_TRACKING_TOKEN=hunter2",
    "aws_secret_access_key = hunter2",
    "AWS_SESSION_TOKEN=hunter2",
    "AccountName=a;AccountKey=hunter2==;EndpointSuffix=x",
    "Authorization: Bearer hunter2",
    "'Authorization': 'Basic hunter2'",
    "('Authorization', 'Bearer hunter2')",
    "authorization: AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=c, Signature=hunter2",
    "Bearer a.hunter2",
    "-----BEGIN RSA PRIVATE KEY-----\nMII\nhunter2\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\\nhunter2",
    f"WANDB_API_KEY={HEX}",
    f"wandb login --relogin {HEX}",
    f"paste an API key: {HEX}",
    f"machine api.wandb.ai login user password {HEX}",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.hunter2",
]
TOKEN = {"token": "hunter2"}
KEYS = ("hunter2", HEX, "AKIAIOS", "ghp_a")
HARMLESS = [
    "a@b",
    "Anna <anna@example.com>",
    "torch.nn@Linear",
    "12:30@x",
    "key=3",
    "sort_key=lambda x: x",
    "monkey=banana12",
    "key: 12:30@x",
    "missing key: layer1.0.conv1.weight",
    "token: expected a string, got 3",
    "api_key: expected a string",
    "password: expected none, got an empty one",
    "signature=(x, y), design=abc123xyz, sig=0.05, token=17, password=None",
    "tokens=bytes num_tokens=5000000 pad_token='<pad>' eos_token_id=50256",
    "{'pad_token': '<pad>', 'tokens': 'bpe'}",
    "KeyError: 'token'",
    "bearer of the news, Bearer authentication is wrong",
    "the secret of success",
    f"commit {HEX}, fingerprint {HEX}{HEX[:24]}",
    "s3://bucket/team/name@v1",
    "abfs://container@account.dfs.core.windows.net/a",
    "ssh://git@host/x",
    "http://[::1]:8080/x",
    "http://mlflow:5000/#/experiments/1/runs/2",
    "https://wandb.ai/team/project/runs/a-1",
    "/data/a@b?c",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_removed_from_any_text(text):
    shown = redact_url(f"before {text} after")
    assert not any(key in shown for key in KEYS), shown
    assert shown.startswith("before ")
    assert redact_url(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_a_text_without_secrets_stays_as_it_is(text):
    assert redact_url(text) == text
    assert redact_values({"a": [text], text: (1, text)}) == {"a": [text], text: (1, text)}


def test_values_of_secret_names_are_removed_and_all_others_stay():
    values = {
        "password": "hunter2",
        "client_secret": "hunter2",
        "tokens": "bpe",
        "key": "a",
        "api_key": "",
        "width": 3,
    }
    assert redact_values(values) == {**values, "password": "...", "client_secret": "..."}


class Leaky(Recipe):
    text = ""

    def prepare(self, source, directory):
        raise RuntimeError(self.text) from ConnectionError(self.text)


def raised(call, *arguments):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        call(*arguments)
    return f"{caught.value}{caught.value.__cause__}"


def by_dispatcher(text, tmp_path):
    seen = []
    with Dispatcher([SimpleNamespace(handle=seen.append, close=lambda error: None)]) as dispatcher:
        dispatcher.emit(started(data=text, config={"recipe_options": {"url": [text]}}))
        failure = RankFailure(text, 0, "exception", text)
        dispatcher.emit(dataclasses.replace(run_finished(), exported=[text]))
    return f"{seen}{failure.rank}"


def by_history(text, tmp_path):
    file = HistoryFile(tmp_path / "history.jsonl")
    file.handle(dataclasses.replace(run_finished(), model_state_url=text, export_url=text))
    file.close(None)
    return (tmp_path / "history.jsonl").read_text()


def by_card(text, tmp_path):
    from flyte_ddp.events import RunState

    state = RunState.of(
        [
            started(data=text, config={"recipe_options": {"url": text}}),
            *whole_run()[1:],
            run_finished(),
        ]
    )
    return str(card_files(run_card(state, image=text)))


def by_report(text, tmp_path):
    report = Report("digits")
    feed(report, started(data=text, config={"recipe_options": {"url": text}}))
    report.close(RuntimeError(text))
    return report.render()


def by_wandb(text, tmp_path):
    recorded = {}
    observer = Wandb("project", "run", str(tmp_path), config={"trial": text})
    config = SimpleNamespace(update=lambda values, **_: recorded.update(values))
    observer._run = SimpleNamespace(config=config, summary={})
    observer._record(started(data=text, config={"recipe_options": {"url": text}}))
    return str(recorded)


def by_terminal(text, tmp_path):
    bar = ProgressBar(stream := io.StringIO())
    bar.write(text)
    return stream.getvalue()


def by_rank(text, tmp_path):
    return str(describe_error(RuntimeError(text)))


def by_preparation(text, tmp_path):
    Leaky.text = text
    return raised(prepare_data, Leaky(), "", tmp_path)


def by_task(text, tmp_path):
    def fail(error):
        with flyte_errors():
            raise error

    errors = (
        ConfigError(text),
        OSError(2, "No such file", text),
        RankFailure(text, 0, "exception", f"ValueError: {text}"),
    )
    return "".join(raised(fail, error) for error in errors)


DOORS = (
    *(by_dispatcher, by_history, by_card, by_report, by_wandb),
    *(by_terminal, by_rank, by_preparation, by_task),
)


@pytest.mark.parametrize("door", DOORS)
def test_no_secret_leaves_a_run(door, tmp_path):
    for number, text in enumerate(SECRETS):
        (directory := tmp_path / str(number)).mkdir()
        shown = door(text, directory)
        assert not any(key in shown for key in KEYS), shown
    assert "accuracy of a@b" in door("accuracy of a@b", tmp_path)


def test_a_checkpoint_has_no_secret_and_is_resumed_with_a_new_signature(tmp_path):
    url = "https://user:hunter2@host/{}?X-Amz-Signature={}"
    run = new_run(tmp_path, "WithToken")
    trainer = new_trainer(
        run, url.format("m", 1), recipe_options={"activation": url.format("a", "hunter2"), **TOKEN}
    )
    trainer.checkpoints.save(best=False)
    trainer.checkpoints.store.wait()
    files = [each for each in run.checkpoints.rglob("*") if each.is_file()]
    assert len(files) > 1
    assert not any(b"hunter2" in each.read_bytes() for each in files)
    again = new_trainer(
        run, url.format("m", 2), recipe_options={"activation": url.format("a", 2), **TOKEN}
    )
    assert again.checkpoints.resume()[0].endswith("step-0000000000.json")
    for initial, option in (("other", "a"), ("m", "other")):
        changed = new_trainer(
            run,
            url.format(initial, 1),
            recipe_options={"activation": url.format(option, 1), **TOKEN},
        )
        with pytest.raises(ConfigError, match="other") as caught:
            changed.checkpoints.resume()
        assert "hunter2" not in str(caught.value)


def test_a_ranks_error_and_lines_lose_their_secrets(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FAULT", "leak 0 2")
    run = new_run(tmp_path)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RankFailure, match="403 for https://host/a.X-Amz") as caught,
    ):
        run.train(1, max_restarts=1)
    seen = "".join(
        [caplog.text, str(caught.value), caught.value.cause, *run.lines, *map(repr, run.events)]
    )
    assert seen.count("https://host/a?X-Amz-Signature=...") > 3
    assert "hunter2" not in seen
