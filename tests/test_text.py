"""Recipe text: its documents, tokens and windows."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import math
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.data import epoch_shards, open_samples
from flyte_ddp.rank.initial_state import check_same_run, load_initial_state
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.text import corpus
from flyte_ddp.recipes.text.corpus import Corpus
from flyte_ddp.recipes.text.shards import HELD_OUT, TRAIN
from flyte_ddp.recipes.text.tokens import byte_tokenizer, read_tokenizer, train_tokenizer
from flyte_ddp.world import World
from tests.support import sample_run
from tests.support.image_store import running_store
from tests.support.text_recipe import prepared

REPOSITORY = Path(__file__).parents[1]
CPU = torch.device("cpu")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
# Forty documents that have no line in common.
DOCUMENTS = [
    f"{number}: " + " ".join(WORDS[: 1 + number % 6]) + f" über {number}\n" for number in range(40)
]


def text_of(file, tokenizer):
    return [
        tokenizer.decode(tokens[tokens != tokenizer.end].tolist())
        for tokens in np.split(file, np.flatnonzero(file == tokenizer.end) + 1)[:-1]
    ]


def documents_of(directory, name):
    """The documents in one of the files of tokens."""
    tokenizer = read_tokenizer(directory / "data" / "tokenizer")
    return text_of(np.fromfile(directory / "data" / name, dtype=tokenizer.dtype), tokenizer)


# Documents


def written(directory):
    """The same documents in every form, by name."""
    folder, rows = directory / "folder", directory / "rows"
    (folder / "sub").mkdir(parents=True)
    rows.mkdir()
    for number, text in enumerate(DOCUMENTS):
        name = folder / "sub" / f"{number}.txt" if number % 2 else folder / f"{number}.md"
        name.write_text(text)
    (folder / ".hidden.txt").write_text("not this")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    for part in (0, 1):
        table = pyarrow.table({"story": [*DOCUMENTS[part::2], None], "id": list(range(21))})
        parquet.write_table(table, rows / f"{part}.parquet")
    (directory / "one.txt").write_text("<|end|>".join(DOCUMENTS))
    (directory / "one.txt.gz").write_bytes(gzip.compress("<|end|>".join(DOCUMENTS).encode()))
    with zipfile.ZipFile(directory / "one.zip", "w") as archive:
        archive.writestr("one.txt", "<|end|>".join(DOCUMENTS))
    return {
        "folder": (folder, {}),
        "parquet": (rows, {"column": "story"}),
        "file": (directory / "one.txt", {"separator": "<|end|>"}),
        "packed": (directory / "one.txt.gz", {"separator": "<|end|>"}),
        "url": (f"zip://one.txt::{directory}/one.zip", {"separator": "<|end|>"}),
    }


@pytest.mark.parametrize("form", ["folder", "parquet", "file", "packed", "url"])
def test_documents_come_whole_from_files_rows_separators_and_urls(tmp_path, form):
    source, options = written(tmp_path)[form]
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
        (tmp_path / place).mkdir()
        (tmp_path / place / "one.txt").write_text("\f".join(texts))
        prepared(tmp_path / place, tmp_path / place / "one.txt", separator="\f", held_out=0.3)
        train, other = (documents_of(tmp_path / place, name) for name in (TRAIN, HELD_OUT))
        assert set(train).isdisjoint(other)
        held_out.append(set(other))
    assert held_out[0] == held_out[1]


def test_pieces_join_to_the_document_and_end_with_lines_or_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_PIECE", 64)
    for text in ("word " * 50, "a line of text\n" * 20, "日本語" * 40, "", "ü" * 33):
        for separator in ("", "<|end|>"):
            file = tmp_path / "one.txt"
            whole = [text, "another one", text] if separator else [text]
            file.write_text(separator.join(whole))
            pieces = list(Corpus(str(file), separator).pieces())
            assert all(len(piece.text) <= 64 + len(separator) for piece in pieces)
            found = [""]
            for piece in pieces:
                found[-1] += piece.text.decode()  # fails within a character
                if "\n" in text and not piece.ends:
                    assert piece.text.endswith(b"\n")
                found += [""] * piece.ends
            assert found[:-1] == (whole if file.stat().st_size else [])


def test_a_long_document_is_on_one_side(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_PIECE", 64)
    texts = [f"{number} is a number. " * 30 for number in range(30)]
    (tmp_path / "one.txt").write_text("\f".join(texts))
    prepared(tmp_path, tmp_path / "one.txt", separator="\f")
    found = documents_of(tmp_path, TRAIN), documents_of(tmp_path, HELD_OUT)
    assert sorted(found[0] + found[1]) == sorted(texts)
    assert found[1]


def test_a_single_document_is_cut_and_few_documents_are_not(tmp_path):
    for place, texts in (("one", ["x" * 500]), ("few", ["a" * 200, "b" * 200, "c" * 100])):
        (tmp_path / place).mkdir()
        (tmp_path / place / "one.txt").write_text("\f".join(texts))
        # With this share no hash of a document holds it out.
        _, _, description = prepared(
            tmp_path / place, tmp_path / place / "one.txt", separator="\f", held_out=1e-6
        )
        held_out = documents_of(tmp_path / place, HELD_OUT)
        if place == "one":
            assert held_out == ["x" * 8]
            assert (
                "1 document, the end of the last one held out; 492 tokens of 256 kinds to train, "
                "9 held out"
            ) in description
        else:
            assert held_out == ["c" * 100]
            assert documents_of(tmp_path / place, TRAIN) == texts[:2]
            assert "the last documents held out" in description


def test_a_document_trains_however_much_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text("\f".join(DOCUMENTS))
    prepared(tmp_path, tmp_path / "one.txt", separator="\f", held_out=0.9999)
    assert documents_of(tmp_path, TRAIN) == DOCUMENTS[:1]


def test_without_a_source_it_is_pythons_own_topics(tmp_path):
    _, _, description = prepared(tmp_path)
    documents, held_out = (
        int(number)
        for number in re.search(
            (
                r"\(pydoc_data.topics\): (\d+) documents, (\d+) "
                r"of"
            ),
            description,
        ).groups()
    )
    assert documents > 60
    assert 2 < held_out < 20


# Tokens


def test_bpe_gives_any_text_back_and_marks_no_end_within_it():
    tokenizer = train_tokenizer(iter(DOCUMENTS), 320)
    texts = ["beta alpha", "", "日本 \x00 <|endoftext|>\r\n", "über " * 9]
    for text, tokens in zip(
        texts, tokenizer.encode([each.encode() for each in texts]), strict=True
    ):
        assert tokenizer.decode(tokens.tolist()) == text
        assert tokenizer.end not in tokens
    assert len(tokenizer.encode([b" alpha beta"])[0]) < 5  # it has learnt the words
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
    figures = []
    for tokens, options in (("bytes", {}), ("bpe", {"vocabulary": 300})):
        (tmp_path / tokens).mkdir()
        (tmp_path / tokens / "one.txt").write_text("\f".join(DOCUMENTS))
        recipe, (_, test), _ = prepared(
            tmp_path / tokens,
            tmp_path / tokens / "one.txt",
            separator="\f",
            tokens=tokens,
            context=1,
            **options,
        )
        num_targets = test.tensors[1].numel()
        num_bytes = sum(len(text.encode()) for text in documents_of(tmp_path / tokens, HELD_OUT))
        epoch = sample_epoch(test_loss=1000.0 / num_targets)
        # With a context of one token all but the first token are targets.
        assert recipe.figures(epoch)["nats_per_byte"] == pytest.approx(1000.0 / num_bytes, rel=0.05)
        assert recipe.figures(epoch)["perplexity"] == pytest.approx(math.exp(epoch.test_loss))
        assert recipe.figures(epoch)["bits_per_byte"] == pytest.approx(
            recipe.figures(epoch)["nats_per_byte"] / math.log(2)
        )
        figures.append(recipe.figures(epoch)["nats_per_byte"])
    assert figures[0] == pytest.approx(figures[1], rel=0.05)


def sample_epoch(test_loss):
    return dataclasses.replace(sample_run.epoch(1), test_loss=test_loss)


# Windows


def test_windows_are_views_in_which_every_token_is_a_target_once(tmp_path):
    (tmp_path / "one.txt").write_text("\f".join(DOCUMENTS))
    _, datasets, _ = prepared(tmp_path, tmp_path / "one.txt", separator="\f")
    for dataset, name in zip(datasets, (TRAIN, HELD_OUT), strict=True):
        inputs, targets = dataset.tensors
        tokens = torch.from_numpy(np.fromfile(tmp_path / "data" / name, dtype=np.uint8))
        count = (len(tokens) - 1) // 8
        assert inputs.shape == targets.shape == (count, 8)
        assert torch.equal(inputs.flatten(), tokens[: 8 * count])
        assert torch.equal(targets.flatten(), tokens[1 : 8 * count + 1])
        assert targets.data_ptr() == inputs.data_ptr() + 1  # views of one file, not copies


def test_order_of_windows_is_a_function_of_seed_and_epoch_for_any_number_of_ranks(tmp_path):
    recipe, datasets, _ = prepared(tmp_path)
    seen = {}
    for seed, epoch, size in ((0, 1, 1), (0, 1, 3), (0, 2, 1), (1, 1, 1)):
        config = TrainingConfig(global_batch_size=6, seed=seed)
        shards = []
        for rank in range(size):
            world = World(rank, rank, size, CPU)
            samples, _ = open_samples(datasets, recipe, config, world)
            shards.append(
                [
                    shard.micro_batches[0]
                    for shard in epoch_shards(samples, config, world, epoch)[:5]
                ]
            )
        seen[seed, epoch, size] = torch.cat(
            [part for batch in zip(*shards, strict=True) for part in batch]
        ).tolist()
        (batch,) = samples.batches([torch.tensor([7, 3])], epoch)
        assert torch.equal(batch[0], datasets[0].tensors[0][[7, 3]])
    assert seen[0, 1, 1] == seen[0, 1, 3]
    assert seen[0, 1, 1] != seen[0, 2, 1]
    assert seen[0, 1, 1] != seen[1, 1, 1]


# Preparing large data

PREPARE = """
import resource, sys
from pathlib import Path
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.text import shards

shards.BPE_SAMPLE = 4 << 20  # to save time
source, directory, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
recipe = get_recipe("text", {"tokens": sys.argv[4], "separator": sys.argv[5], "vocabulary": 1024})
prepare_data(get_recipe("text"), "", Path(sys.argv[6]))  # imports what is needed before the limit counts
resource.setrlimit(resource.RLIMIT_DATA, (limit + int(Path("/proc/self/statm").read_text().split()[5]) * 4096,) * 2)
prepare_data(recipe, source, directory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "separator", "megabytes", "limit"),
    [("bytes", "\n\n", 200, 32), ("bytes", "", 200, 32), ("bpe", "\n\n", 100, 96)],
)
def test_text_of_any_size_is_prepared_in_bounded_memory(
    tmp_path, tokens, separator, megabytes, limit
):
    """A limit on the memory of the process's own, not on that of mapped files, which the kernel
    takes back.
    """
    random = np.random.default_rng(0)
    vocabulary = np.array([f"word{number:x}" for number in range(20_000)])
    with open(tmp_path / "large.txt", "w") as file:
        while file.tell() < megabytes << 20:
            words = vocabulary[np.minimum(random.zipf(1.3, 200_000), 20_000) - 1]
            file.write("\n\n".join(" ".join(part) for part in np.array_split(words, 500)) + "\n\n")
    for name in ("data", "small"):
        (tmp_path / name).mkdir()
    arguments = (
        tmp_path / "large.txt",
        tmp_path / "data",
        limit << 20,
        tokens,
        separator,
        tmp_path / "small",
    )
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if tokens == "bytes":
        sizes = [(tmp_path / "data" / name).stat().st_size for name in (TRAIN, HELD_OUT)]
        assert sum(sizes) >= (megabytes << 20) * 0.98
        assert 0.08 < sizes[1] / sum(sizes) < 0.12


# Bad input


@pytest.mark.parametrize(
    ("name", "contents", "options", "expected"),
    [
        (
            "missing.txt",
            None,
            {},
            "data: expected a file, directory or URL with text or Parquet, got .*missing.txt",
        ),
        ("empty.txt", b"", {}, r"data: expected text, got .*empty.txt, which is empty"),
        (
            "latin.txt",
            "Käse ".encode("latin-1") * 9,
            {"tokens": "bpe"},
            (
                "data: expected text in UTF-8, or in UTF-16 .*, got .*latin.txt: not in UTF-8; "
                "convert it"
            ),
        ),
        (
            "short.txt",
            b"a few words",
            {},
            (
                r"recipe_options.context: expected at most 5 tokens, .* "
                r"\(12 tokens\)"
            ),
        ),
        (
            "half.txt.gz",
            gzip.compress(b"words " * 999, mtime=0)[:40],
            {},
            "data: .* cannot be read: EOFError",
        ),
        (
            "bad.parquet",
            b"PAR1 or not",
            {},
            "data: .*bad.parquet is no Parquet file that can be read",
        ),
    ],
)
def test_unusable_data_is_named_in_one_line_before_a_rank_starts(
    tmp_path, name, contents, options, expected
):
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises((DataError, ConfigError), match=f"^{expected}") as caught:
        prepared(tmp_path, tmp_path / name, **options)
    assert "\n" not in str(caught.value)


def test_held_out_text_that_is_not_utf8_is_named_too(tmp_path, monkeypatch):
    """The BPE is trained on the other documents, and does not meet it."""
    texts = [text.encode() for text in DOCUMENTS]
    for number in range(100):
        bad = f"{number} ".encode() + b"\xe4"
        if int.from_bytes(hashlib.sha256(bad).digest()[:8], "big") < 0.1 * 2**64:
            break
    monkeypatch.setattr(corpus, "HEAD", 100)
    (tmp_path / "one.txt").write_bytes(b"\f".join([*texts, bad]))
    with pytest.raises(
        DataError,
        match=(
            r"^data: expected UTF-8, .* got the byte 0xe4 in "
            r".*one.txt; convert it"
        ),
    ):
        prepared(tmp_path, tmp_path / "one.txt", separator="\f", tokens="bpe", vocabulary=300)


def test_columns_and_folders_without_text_are_named(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "story": ["once"]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match="expected a column 'text' .* got the columns id, story; .* option column"
    ):
        list(Corpus(str(tmp_path)).pieces())
    with pytest.raises(DataError, match="expected text in column 'id' of .*, got int64"):
        list(Corpus(str(tmp_path), column="id").pieces())
    with pytest.raises(
        DataError,
        match=(
            r"expected files like \*.py, got 1 other files in .* "
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
        (
            {"tokens": "words"},
            "recipe_options.tokens: expected one of auto, bytes, bpe, got 'words'",
        ),
        ({"context": 0}, "recipe_options.context: expected a whole number of at least 1, got 0"),
        (
            {"held_out": 1},
            "recipe_options.held_out: expected a finite number above 0 and below 1, got 1.0",
        ),
        (
            {"vocabulary": 100},
            "recipe_options.vocabulary: expected a whole number of at least 300, got 100",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(options, expected):
    with pytest.raises(ConfigError, match=f"^{expected}"):
        config_of("text", {"recipe_options": options})


def test_a_state_of_another_vocabulary_is_refused_also_where_sizes_are_the_same(tmp_path):
    models = []
    for name, text in (("first", "\n".join(DOCUMENTS)), ("second", "\n".join(DOCUMENTS)[::-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text(text)
        recipe, _, _ = prepared(
            tmp_path / name, tmp_path / name / "one.txt", tokens="bpe", vocabulary=300
        )
        models.append(recipe.model())
    file = tmp_path / "state.pt"
    torch.save(models[0].state_dict(), file)
    with pytest.raises(
        ConfigError,
        match="^vocabulary: expected a state with the tokenizer of this data, got one",
    ):
        load_initial_state(models[1], str(file))


def test_a_run_resumes_with_another_prompt_and_not_with_another_model():
    def resume(**options):
        began, config = config_of("text", {}), config_of("text", {"recipe_options": options})
        progress = {"epoch": 2, "batch": 0}
        checkpoint = {"config": dataclasses.asdict(began), "progress": progress}
        checkpoint |= {"data_fingerprint": "", "initial_state": ""}
        check_same_run(
            checkpoint, "run/step-1.json", config, "", "", get_recipe("text").changeable_options
        )

    resume(prompt="Once upon a time")
    with pytest.raises(
        ConfigError,
        match=(
            r"recipe_options\.layers: expected 4, with which "
            r"run/step-1\.json was"
        ),
    ):
        resume(layers=2)


def test_the_vocabulary_of_another_model_is_used_so_that_new_text_fits_it(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "one.txt").write_text("\n".join(DOCUMENTS))
    first, _, _ = prepared(
        tmp_path / "first", tmp_path / "first" / "one.txt", tokens="bpe", vocabulary=300
    )
    file = tmp_path / "model_state.pt"
    torch.save(first.model().state_dict(), file)
    # on Python's own topics
    recipe, _, _ = prepared(tmp_path, tokens="bpe", vocabulary_of=str(file))
    load_initial_state(recipe.model(), str(file))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "which does not exist"),
        (b"junk", "which is another file"),
        ({"fc.weight": torch.zeros(1)}, "which is another file"),
    ],
)
def test_a_file_without_a_vocabulary_is_named_in_one_line(tmp_path, state, said):
    file = tmp_path / "model_state.pt"
    if state is not None:
        file.write_bytes(state) if isinstance(state, bytes) else torch.save(state, file)
    with pytest.raises(
        ConfigError,
        match=f"^recipe_options.vocabulary_of: expected .* of recipe text, got .*{said}$",
    ):
        prepared(tmp_path, tokens="bpe", vocabulary_of=str(file))
