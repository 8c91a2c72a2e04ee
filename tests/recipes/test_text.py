"""Recipe text: its documents, tokens and windows."""

from __future__ import annotations

import dataclasses
import gzip
import math
import multiprocessing
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.text import corpus, token_files
from flyte_ddp.recipes.text.corpus import Corpus
from flyte_ddp.recipes.text.token_files import HELD_OUT_FILE as HELD_OUT
from flyte_ddp.recipes.text.token_files import TRAIN_FILE as TRAIN
from flyte_ddp.recipes.text.tokens import byte_tokenizer, read_tokenizer, train_tokenizer
from flyte_ddp.training.initial_state import check_same_run, load_initial_state
from tests.support import sample_run
from tests.support.errors import raises_one_line
from tests.support.image_store import running_store
from tests.support.text_recipe import prepared

REPOSITORY = Path(__file__).parents[2]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
# Forty documents that have no line in common.
DOCUMENTS = [
    f"{number}: " + " ".join(WORDS[: 1 + number % 6]) + f" über {number}\n" for number in range(40)
]


def documents_of(directory, name):
    """The documents in one of the files of tokens."""
    tokenizer = read_tokenizer(directory / "data" / "tokenizer")
    tokens = np.fromfile(directory / "data" / name, dtype=tokenizer.dtype)
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.end) + 1)[:-1]
    return [tokenizer.decode(each[:-1].tolist()) for each in documents]


def prepared_from(directory, text, **options):
    """As `prepared`, of a file with this text, or with documents that form feeds divide."""
    directory.mkdir(exist_ok=True)
    (directory / "one.txt").write_text("\f".join(text))
    return prepared(directory, directory / "one.txt", separator="\f", **options)


# Documents


def test_documents_come_whole_from_rows_and_separators_in_urls(tmp_path):
    for part in (0, 1):
        table = pyarrow.table({"story": [*DOCUMENTS[part::2], None], "id": list(range(21))})
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("one.txt", "<|end|>".join(DOCUMENTS))
    for source, options in (
        (tmp_path, {"column": "story", "files": "*.parquet"}),
        (f"zip://one.txt::{tmp_path}/one.zip", {"separator": "<|end|>"}),
    ):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        _, _, description = prepared(tmp_path, source, **options)
        train, held_out = (documents_of(tmp_path, name) for name in (TRAIN, HELD_OUT))
        assert sorted(train + held_out) == sorted(DOCUMENTS)
        assert len(held_out) in range(1, 12)
        assert description.startswith(
            f"text from {source}: 40 documents, {len(held_out)} of them held out; "
        )


def test_a_bucket_that_throttles_cuts_and_shortens_answers_gives_the_whole_text(tmp_path):
    with running_store() as store:
        url = store.fill({f"{number}.txt": text.encode() for number, text in enumerate(DOCUMENTS)})
        store.faults["images/1.txt"] = ["throttle"]
        store.faults["images/2.txt"] = ["cut"]
        store.faults["images/3.txt"] = ["short"]
        _, _, description = prepared(tmp_path, url)
    found = documents_of(tmp_path, TRAIN) + documents_of(tmp_path, HELD_OUT)
    assert sorted(found) == sorted(DOCUMENTS)
    assert description.startswith(f"text from {url}: 40 documents")


def test_split_depends_on_the_documents_alone_and_keeps_copies_on_one_side(tmp_path):
    held_out = []
    for place, texts in (
        ("a", DOCUMENTS),
        ("b", [DOCUMENTS[0], *DOCUMENTS[:0:-1], *DOCUMENTS[5:9]]),
    ):
        prepared_from(tmp_path / place, texts, held_out=0.3)
        train, other = (documents_of(tmp_path / place, name) for name in (TRAIN, HELD_OUT))
        assert set(train).isdisjoint(other)
        held_out.append(set(other))
    assert held_out[0] == held_out[1]
    prepared_from(tmp_path / "all", DOCUMENTS, held_out=0.9999)
    assert documents_of(tmp_path / "all", TRAIN) == DOCUMENTS[:1], "one trains"


@pytest.mark.parametrize("separator", ["", "<|end|>"])
def test_pieces_join_to_the_documents_whatever_lies_on_their_borders(
    tmp_path, monkeypatch, separator
):
    monkeypatch.setattr(corpus, "MAX_PIECE", 64)
    texts = [text * count for text in ("x", "日本", "ü") for count in (0, 1, 31, 32, 57, 64, 200)]
    for text in texts:
        whole = [text, "another one", text] if separator else [text]
        (tmp_path / "one.txt").write_text(separator.join(whole))
        found = [""]
        for piece in Corpus(str(tmp_path / "one.txt"), separator).pieces():
            assert len(piece.text) <= 2 * 64 + len(separator)
            found[-1] += piece.text
            found += [""] * piece.ends
        assert found[:-1] == (whole if any(whole) else [])


def test_a_long_document_is_on_one_side_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_PIECE", 64)
    monkeypatch.setattr(token_files, "MAX_PIECE", 64)
    texts = [f"{number} is a number. " * (3 + number % 7) for number in range(60)]
    held_out = []
    for place in ("a", "b"):
        prepared_from(tmp_path / place, [texts[0], "x" * 33 * (place == "b"), *texts[1:]])
        found = documents_of(tmp_path / place, TRAIN), documents_of(tmp_path / place, HELD_OUT)
        assert set(found[0] + found[1]) >= set(texts)
        held_out.append([text for text in found[1] if text in texts])
    assert held_out[0] == held_out[1] != []


@pytest.mark.parametrize(
    ("texts", "train", "held_out", "how"),
    [
        (["x" * 500], [], ["x" * 8], "the end of the last one held out"),
        (
            ["a" * 200, "b" * 200, "c" * 100],
            ["a" * 200, "b" * 200],
            ["c" * 100],
            "the last documents held out",
        ),
    ],
)
def test_a_single_document_is_cut_and_few_documents_are_not(tmp_path, texts, train, held_out, how):
    # With this share no hash of a document holds it out.
    _, _, description = prepared_from(tmp_path, texts, held_out=1e-6)
    assert documents_of(tmp_path, HELD_OUT) == held_out
    assert documents_of(tmp_path, TRAIN) == train
    assert how in description


def test_a_write_to_a_window_stays_in_the_process(tmp_path):
    _, (train, held_out), _ = prepared_from(tmp_path, DOCUMENTS)
    file = tmp_path / "data" / TRAIN
    before = file.read_bytes()

    def write():
        for dataset in (train, held_out):
            inputs, targets = dataset[0]
            inputs.fill_(7)
            targets[-1] = 7
            assert dataset[0][0].tolist() == inputs.tolist() == [7] * len(inputs)

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert train[0][0].tolist() == list(before[: len(train[0][0])])
    assert file.read_bytes() == before


# Tokens


def test_bpe_gives_any_text_back_and_marks_no_end_within_it():
    tokenizer = train_tokenizer(iter(DOCUMENTS), 320)
    texts = ["beta alpha", "", "日本 \x00 <|endoftext|>\r\n", "über " * 9]
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.decode(tokens.tolist()) == text
        assert tokenizer.end not in tokens
    assert len(tokenizer.encode([" alpha beta"])[0]) < 5  # The tokenizer has learnt the words.
    assert train_tokenizer(iter(DOCUMENTS), 320).files == tokenizer.files
    assert tokenizer.end == tokenizer.size - 1 == 319


def test_any_bytes_are_tokens_of_the_default(tmp_path):
    text = "".join(map(chr, range(1, 3000))).encode()
    (tmp_path / "one.txt").write_bytes(text)
    prepared(tmp_path, tmp_path / "one.txt")
    whole = (tmp_path / "data" / TRAIN).read_bytes() + (tmp_path / "data" / HELD_OUT).read_bytes()
    assert whole == text + bytes([byte_tokenizer().end])


def test_nats_per_byte_compare_between_tokenizers(tmp_path):
    """The same total loss over the same text gives the same figure, whatever a token is."""
    for tokens in ("bytes", "bpe"):
        recipe, sides, _ = prepared_from(
            tmp_path / tokens, DOCUMENTS, tokens=tokens, context=1, vocabulary=300
        )
        # With a context of one token all but the first token are targets.
        train_loss, test_loss = (1000.0 / side.tensors[1].numel() for side in sides)
        texts = ["".join(documents_of(tmp_path / tokens, name)) for name in (TRAIN, HELD_OUT)]
        train_bytes, test_bytes = (len(text.encode()) for text in texts)
        epoch = dataclasses.replace(sample_run.epoch(1), train_loss=train_loss, test_loss=test_loss)
        figures = recipe.figures(epoch)
        assert figures["nats_per_byte"] == pytest.approx(1000.0 / test_bytes, rel=0.05)
        assert figures["train_nats_per_byte"] == pytest.approx(1000.0 / train_bytes, rel=0.05)
        assert figures["perplexity"] == pytest.approx(math.exp(epoch.test_loss))
        assert figures["bits_per_byte"] == pytest.approx(figures["nats_per_byte"] / math.log(2))


# Windows


def test_windows_are_views_in_which_every_token_is_a_target_once(tmp_path):
    _, datasets, _ = prepared_from(tmp_path, DOCUMENTS)
    for dataset, name in zip(datasets, (TRAIN, HELD_OUT), strict=True):
        inputs, targets = dataset.tensors
        tokens = torch.from_numpy(np.fromfile(tmp_path / "data" / name, dtype=np.uint8))
        count = (len(tokens) - 1) // 8
        assert inputs.shape == targets.shape == (count, 8)
        assert torch.equal(inputs.flatten(), tokens[: 8 * count])
        assert torch.equal(targets.flatten(), tokens[1 : 8 * count + 1])
        assert targets.data_ptr() == inputs.data_ptr() + 1  # views of one file, not copies


# Bad input


@pytest.mark.parametrize(
    ("name", "contents", "expected"),
    [
        (
            "missing.txt",
            None,
            "data: expected a file, directory or URL with text or Parquet, got .*missing.txt",
        ),
        ("empty.txt", b"", r"data: expected text, got .*empty.txt, which is empty"),
        (
            "late.txt",
            b"words " * 11_000 + b"\xe4",
            "data: .*late.txt cannot be read: UnicodeDecodeError",
        ),
        (
            "short.txt",
            b"a few words",
            r"recipe_options.context: expected at most 5 tokens, .* \(12 tokens\)",
        ),
        (
            "half.txt.gz",
            gzip.compress(b"words " * 999, mtime=0)[:40],
            "data: .* cannot be read: EOFError",
        ),
        (
            "bad.parquet",
            b"PAR1 or not",
            "data: .*bad.parquet is no Parquet file that can be read",
        ),
    ],
)
def test_unusable_data_is_named_in_one_line_before_a_rank_starts(
    tmp_path, name, contents, expected
):
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with raises_one_line((DataError, ConfigError), match=f"^{expected}"):
        prepared(tmp_path, tmp_path / name)


def test_columns_and_folders_without_text_are_named(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "story": ["once"]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError,
        match=r"a column 'text' .* the columns id \(int64\), story \(\w+\); .* option col",
    ):
        list(Corpus(str(tmp_path)).pieces())
    with pytest.raises(DataError, match="expected a column 'id' with text in .*, got the columns"):
        list(Corpus(str(tmp_path), column="id").pieces())
    with pytest.raises(
        DataError,
        match=(
            r"expected files of \*.py, got 1 other files in .* "
            r"option files"
        ),
    ):
        list(Corpus(str(tmp_path), files="*.py").pieces())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"width": 36, "heads": 4},
            (
                r"recipe_options.width: expected a multiple of 8 \(2 x "
                r"heads\), got 36"
            ),
        ),
        (
            {"pretrained": "a", "architecture": {"model_type": "llama"}},
            (
                "recipe_options: expected one of pretrained, architecture and sizes, got "
                ".'pretrained', 'architecture'."
            ),
        ),
        (
            {"pretrained": "a", "layers": 2},
            "recipe_options: expected one of .* got .'pretrained', 'layers'.",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(options, expected):
    with pytest.raises(ConfigError, match=f"^{expected}"):
        config_of("text", {"recipe_options": options})


def test_a_state_of_another_vocabulary_is_refused_also_where_sizes_are_the_same(tmp_path):
    reversed_texts = [text[::-1] for text in DOCUMENTS]
    models = [
        prepared_from(tmp_path / name, texts, tokens="bpe", vocabulary=300)[0].model()
        for name, texts in (("first", DOCUMENTS), ("second", reversed_texts))
    ]
    torch.save(models[0].state_dict(), tmp_path / "state.pt")
    with pytest.raises(
        ConfigError,
        match="^vocabulary: expected a state with the tokenizer of this data, got one .*pretrained",
    ):
        load_initial_state(models[1], str(tmp_path / "state.pt"))


def test_a_run_resumes_with_another_prompt_and_not_with_another_model():
    began, changeable = config_of("text", {}), get_recipe("text").changeable_options
    checkpoint = {"config": dataclasses.asdict(began), "progress": {"epoch": 2, "batch": 0}}
    checkpoint |= {"data_fingerprint": ""}

    def resume(**options):
        config = config_of("text", {"recipe_options": options})
        check_same_run(checkpoint, "run/step-1.json", config, "", changeable)

    resume(prompt="Once upon a time")
    with pytest.raises(
        ConfigError, match=r"recipe_options\.layers: expected 4, with which run/step"
    ):
        resume(layers=2)
