"""Rows of packed documents: each target once, little padding, one order and weights that count
targets.
"""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from flyte_ddp.config import TrainingConfig
from flyte_ddp.data import Mixture, Packed, Shards, loader, packed, row_counts
from flyte_ddp.data.documents import measure
from flyte_ddp.data.packing import WINDOW, assign_rows, pack, split_shard
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.data import LoadedSamples, open_samples
from flyte_ddp.rank.plan import evaluation_shard
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from flyte_ddp.recipes.shards_command import main
from flyte_ddp.training.contract import check_contract, open_model
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE, World
from tests.support.documents import (
    LENGTH,
    draw_lengths,
    make_document,
    make_documents,
    make_packed,
    write_documents,
)
from tests.support.errors import raises_one_line
from tests.support.shards import parquet

CPU = torch.device("cpu")
DOCUMENTS = make_documents(draw_lengths(300))
CHATS = make_documents(draw_lengths(300), is_chat=True)


def targets_of(rows):
    return sorted(label for row in rows for label in row["labels"].tolist() if label != -100)


def expected_targets(documents, most=None):
    found = []
    for each in documents:
        labels = each.get("labels", each["tokens"])
        found += [label for label in labels[1:most] if label != -100]
    return sorted(found)


@pytest.mark.parametrize("documents", [DOCUMENTS, CHATS], ids=["text", "chat"])
@pytest.mark.parametrize("overlong", ["continue", "cut"])
def test_each_target_is_in_one_row_behind_the_tokens_before_it(documents, overlong, tmp_path):
    assert any(len(each["tokens"]) > 2 * LENGTH for each in documents)
    labels = "labels" if documents is CHATS else None
    data = make_packed(documents, tmp_path, labels=labels, overlong=overlong)
    rows = [data[number] for number in range(len(data))]
    most = LENGTH if overlong == "cut" else None
    assert targets_of(rows) == expected_targets(documents, most)
    for number, row in enumerate(rows):
        assert data.count_targets([number]) == len(targets_of([row])) > 0
        tokens, ids, positions = (
            row[name].numpy() for name in ("input_ids", "sequence_ids", "position_ids")
        )
        is_next = numpy.diff(ids) == 0
        assert (numpy.diff(ids) >= 0).all()
        assert (numpy.diff(positions)[is_next] == 1).all()
        assert positions[0] == 0
        assert (positions[1:][~is_next] == 0).all()
        assert (row["labels"].numpy()[positions == 0] == -100).all()
        inside = is_next & (tokens[1:] != 0)
        assert (numpy.diff(tokens)[inside] == 1).all()
        assert len(data.key(number).split(", ")) == len(set(ids[tokens != 0]))


def fit_slowly(sizes, length):
    """The fullest row with room for a piece, by a search of all rows."""
    spaces, rows = [], {}
    for piece in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        fitting = [(space, row) for row, space in enumerate(spaces) if space >= sizes[piece]]
        if not fitting:
            spaces.append(length)
            fitting = [(length, len(spaces) - 1)]
        rows[piece] = min(fitting)[1]
        spaces[rows[piece]] -= sizes[piece]
    return [rows[piece] for piece in range(len(sizes))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_pieces_are_packed_by_best_fit(sizes):
    assert assign_rows(numpy.array(sizes, numpy.int64), 20).tolist() == fit_slowly(sizes, 20)


def share_of_padding(found, bounds, overlong, length):
    num_tokens = num_rows = 0
    for begin, end in bounds:
        rows = pack(found, begin, end, length, overlong)
        num_tokens += (rows.ends - rows.begins).sum()
        num_rows += len(rows.row_ends)
    return 1 - num_tokens / (num_rows * length)


def test_little_of_a_row_is_padding():
    length, count = 1024, 3 * WINDOW + 100
    lengths = draw_lengths(count, length=length)
    found = measure(({"tokens": numpy.arange(each)} for each in lengths), "tokens", None)
    windows = list(itertools.pairwise(split_shard(count).tolist()))
    assert len(windows) == 4
    assert share_of_padding(found, windows, "continue", length) <= 0.02
    best = share_of_padding(found, [(0, count)], "cut", length)
    assert share_of_padding(found, windows, "cut", length) <= best + 0.02


def take(data, num_ranks, state, num_batches, num_workers=0, size=12):
    """The global batches that ranks with this state make, their weights, and the next state."""
    loaders = [
        loader(
            data,
            size,
            rank=rank,
            num_ranks=num_ranks,
            weights=True,
            epochs=2,
            num_workers=num_workers,
        )
        for rank in range(num_ranks)
    ]
    found = []
    for each in loaders:
        each.load_state_dict(state)
    for _ in range(loaders[0].epoch, 2):
        for parts in zip(*loaders, strict=True):
            rows, sums = [], []
            for batch, weight in parts:
                if weight:
                    rows += batch["input_ids"].tolist()
                sums.append((weight, int((batch["labels"] != -100).sum()) * (weight > 0)))
            total = sum(number for _, number in sums)
            for weight, number in sums:
                assert weight == pytest.approx(number * num_ranks / total)
            found.append(rows)
            state = json.loads(json.dumps(loaders[-1].state_dict()))
            if len(found) == num_batches:
                return found, state
    return found, state


def test_all_numbers_of_ranks_and_processes_have_one_order_and_exact_weights(tmp_path):
    data = make_packed(CHATS, tmp_path, labels="labels", overlong="continue", lanes=3)
    expected, _ = take(data, 1, {}, -1)
    assert len(data) % 12  # the last batch is smaller
    half = len(expected) // 2
    rows = [tuple(row) for batch in expected[:half] for row in batch]
    assert len(set(rows)) == len(rows) == len(data)
    assert expected[:half] != expected[half:]
    state, found = {}, []
    for num_ranks, num_workers, num_batches in ((2, 1, 3), (8, 0, 2), (5, 2, 2), (3, 0, -1)):
        batches, state = take(data, num_ranks, state, num_batches, num_workers)
        found += batches
    assert found == expected


def make_sources(directory):
    """Chats, in which fewer tokens are learned than in the texts beside them."""
    chats = make_packed(CHATS, directory / "a", labels="labels", overlong="continue")
    texts = make_documents(draw_lengths(300, seed=1))
    for each in texts:
        each["labels"] = [-100, *each["tokens"][1:]]
    return {
        "chat": chats,
        "text": make_packed(texts, directory / "b", labels="labels", overlong="continue"),
    }


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_mixture_of_packed_rows_has_one_order_and_exact_weights(is_scheduled, tmp_path):
    weights = {"chat": 1, "text": 3}
    proportions = {"proportions": weights}
    if is_scheduled:
        proportions = {"schedule": [(0, {"chat": 1, "text": 0}), (4, weights)], "num_samples": 100}
    data = Mixture(make_sources(tmp_path), **proportions)
    expected, _ = take(data, 1, {}, -1)
    state, found = {}, []
    for num_ranks, num_workers, num_batches in ((2, 1, 3), (5, 0, 2), (3, 0, -1)):
        batches, state = take(data, num_ranks, state, num_batches, num_workers)
        found += batches
    assert found == expected
    assert " rows " in data.key(0)


def test_proportions_in_tokens_are_those_of_the_targets(tmp_path):
    sources, found = make_sources(tmp_path), {}
    for unit in ("samples", "tokens"):
        data = Mixture(sources, {"chat": 1, "text": 1}, unit=unit)
        rows = data.order(12, 0, 0).samples(numpy.arange(len(data)))
        places = data.find_sources(rows)
        found[unit] = [
            data.count_targets(rows[places == 0].tolist()) / data.count_targets(rows.tolist()),
            (places == 0).mean(),
        ]
    assert found["samples"][1] == pytest.approx(0.5, abs=0.02)
    assert found["samples"][0] < 0.4
    assert found["tokens"][0] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("sources", "options", "expected"),
    [
        ({"a": 8, "b": 16}, {}, "sources: expected Shards alone, or Packed .* lengths: "),
        ({"a": 8, "b": None}, {}, "sources: expected Shards alone, or Packed .* both kinds"),
        ({"a": None, "b": None}, {"unit": "tokens"}, 'unit: expected "samples" for Shards'),
        ({"a": 8, "b": 8}, {"unit": "rows"}, "unit: expected .* got 'rows'"),
    ],
)
def test_sources_that_do_not_mix_are_one_line(sources, options, expected):
    made = {
        name: Packed(Shards("x"), size) if size else Shards("x") for name, size in sources.items()
    }
    with raises_one_line(ConfigError, match=expected):
        Mixture(made, {"a": 1, "b": 1}, **options)


def test_ranks_get_about_equally_many_tokens(tmp_path):
    documents = make_documents(draw_lengths(3000))
    data = make_packed(documents, tmp_path, overlong="continue")
    counts = [0, 0, 0, 0]
    for rank in range(4):
        for batch, weight in loader(data, 16, rank=rank, num_ranks=4, weights=True, epochs=1):
            if weight:
                counts[rank] += int((batch["input_ids"] != 0).sum())
    assert max(counts) <= 1.03 * min(counts)


def test_a_late_row_needs_one_window_and_the_counts_of_one_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("flyte_ddp.data.packing.WINDOW", 20)
    monkeypatch.setattr("flyte_ddp.data.packed.WINDOW", 20)
    data = make_packed(DOCUMENTS, tmp_path, overlong="continue")
    expected = [data.key(row) for row in range(len(data))]
    calls = []

    def note(name, function):
        def call(*arguments):
            calls.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(packed, "pack", note("pack", pack))
    monkeypatch.setattr(row_counts, "read_documents", note("read", row_counts.read_documents))
    opened = pickle.loads(pickle.dumps(data))
    assert opened.order(8, 0, 1).samples(numpy.array([len(data) - 1])) < len(data)
    assert opened.count_targets(range(len(data))) > 0
    assert calls == []
    assert opened.key(len(data) - 1) == expected[-1]
    assert calls == ["read", "pack"]


def test_held_out_rows_are_counted_once_by_their_targets(tmp_path):
    data = make_packed(CHATS, tmp_path, labels="labels", overlong="cut")
    samples, found = LoadedSamples(data, Recipe(), TrainingConfig(), World(0, 1, CPU)), 0.0
    for rank in range(3):
        for part in evaluation_shard(samples, TrainingConfig(), World(rank, 3, CPU)):
            found += samples.num_targets(part)
    assert found == len(expected_targets(CHATS, LENGTH))


def test_shards_that_are_added_are_packed_and_read_from_the_next_epoch_on(tmp_path, caplog):
    data = make_packed(DOCUMENTS[:200], tmp_path, overlong="continue")
    made = loader(data, 8, rank=0, num_ranks=1, weights=True)
    next(iter(made))
    state = made.state_dict()
    rest = [batch["input_ids"].tolist() for batch, _ in made]
    new = json.dumps(make_document(999, 40))
    (tmp_path / "9999.jsonl").write_text(f"{new}\n")
    data = Packed(Shards(str(tmp_path)), LENGTH, overlong="continue")
    caplog.clear()
    assert "200" not in data.prepare()
    counted = [each for each in caplog.messages if "counts the tokens" in each]
    assert len(counted) == 1
    assert "9999" in counted[0]
    more = loader(data, 8, rank=0, num_ranks=1, weights=True)
    more.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch, _ in more] == rest
    seen = {token for batch, _ in more for token in batch["input_ids"].flatten().tolist()}
    assert 999_039 in seen


def test_a_state_of_other_rows_is_one_line(tmp_path):
    data = make_packed(DOCUMENTS, tmp_path / "a", overlong="continue")
    made = loader(data, 8, rank=0, num_ranks=1, weights=True)
    next(iter(made))
    state = made.state_dict()
    others = {
        "tokens of a row: expected 32, .* got 48": make_packed(
            DOCUMENTS, tmp_path / "b", length=48, overlong="continue"
        ),
        "documents longer than a row": make_packed(DOCUMENTS, tmp_path / "c", overlong="cut"),
        "checksum of the shards": make_packed(DOCUMENTS[1:], tmp_path / "d", overlong="continue"),
    }
    for expected, other in others.items():
        with raises_one_line(ConfigError, match=expected):
            loader(other, 8, rank=0, num_ranks=1, weights=True).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({"tokens": []}, {}, "0000.jsonl row 1: tokens: expected a document with tokens, got an"),
        ({"tokens": [0] * 33}, {}, "0000.jsonl row 1: expected .* at most 32 tokens, got 33: ch"),
        ({"tokens": [1, 1 << 31]}, {}, "row 1: tokens: .* from 0 to 2147483647, got 2147483648"),
        ({"tokens": [1, -1]}, {}, "row 1: tokens: .* from 0 to 2147483647, got -1"),
        ({"tokens": "a text"}, {}, "row 1: tokens: expected a list of whole numbers, got <U6"),
        ({"tokens": [0.5]}, {}, "row 1: tokens: expected a list of whole numbers, got float64"),
        ({"words": [1]}, {}, "row 1: tokens: expected a field with this name, got only words"),
        ({"tokens": [1, 2]}, {"labels": "labels"}, "row 0: labels: expected a field with this"),
        (
            {"tokens": [1, 2], "labels": [1]},
            {"labels": "labels"},
            "row 1: labels: expected a label for each of 2 tokens, got 1 labels",
        ),
    ],
)
def test_a_wrong_document_is_one_line_with_its_name(change, options, expected, tmp_path):
    first = {"tokens": [1, 2]}
    if "labels" in change:
        first["labels"] = [1, 2]
    with raises_one_line(DataError, match=expected):
        make_packed([first, change], tmp_path, num_shards=1, **options)


def lower(fields):
    return fields


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Packed([], 8), "shards: expected Shards, got a list"),
        (lambda: Packed(Shards("a", transform=lower), 8), "shards: expected stored tokens.* fly"),
        (lambda: Packed(Shards("a", unreadable="ignore"), 8), 'shards: expected unreadable="fail"'),
        (lambda: Packed(Shards("a"), 1), "length: expected .* got 1"),
        (lambda: Packed(Shards("a"), 8, ""), "key: expected the name of a field, got ''"),
        (lambda: Packed(Shards("a"), 8, labels=5), "labels: expected the name of a field, got 5"),
        (lambda: Packed(Shards("a"), 8, overlong="wrap"), "overlong: expected .* got 'wrap'"),
    ],
)
def test_a_wrong_argument_is_one_line(make, expected):
    with raises_one_line(ConfigError, match=expected):
        make()


def test_rows_that_are_not_prepared_or_have_changed_are_one_line(tmp_path):
    place = write_documents(DOCUMENTS, tmp_path / "a", 1)
    shards = Shards(place)
    shards.prepare()
    with raises_one_line(DataError, match="expected rows of the documents in .* call `prepare"):
        len(Packed(shards, LENGTH, overlong="cut"))
    data = make_packed(CHATS, tmp_path / "b", labels="labels", overlong="cut", num_shards=1)
    file = Path(data.shards.source) / "0000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    found = json.loads(lines[0])
    found["labels"] = found["labels"][::-1]
    lines[0] = f"{json.dumps(found)}\n"
    file.write_text("".join(lines))
    opened = Packed(Shards(data.shards.source), LENGTH, labels="labels", overlong="cut")
    row = next(row for row in range(len(data)) if " rows 0" in data.key(row))
    with raises_one_line(DataError, match=r"expected \d+ targets as counted, got \d+: call"):
        opened[row]
    data.prepare()
    opened = Packed(Shards(data.shards.source), LENGTH, labels="labels", overlong="cut")
    assert targets_of([opened[row] for row in range(len(opened))]) == expected_targets(
        [found, *CHATS[1:]], LENGTH
    )


def test_a_recipe_that_counts_other_targets_than_are_stored_is_one_line(tmp_path):
    name = "tests.support.packed_rows.Miscounting"
    recipe, config = get_recipe(name), config_of(name, {})
    recipe.prepare("", tmp_path)
    (train,) = open_samples(recipe.datasets(tmp_path)[:1], recipe, config, ALONE)
    parallelism = Parallelism(recipe, config, ALONE)
    with raises_one_line(ConfigError, match=r"num_targets: expected the \d+ targets that the data"):
        check_contract(open_model(parallelism), train, parallelism)


def test_documents_without_a_target_are_left_out(tmp_path):
    nothing = {"tokens": [7, 8], "labels": [-100, -100]}
    single = {"tokens": [9], "labels": [9]}
    data = make_packed([nothing, *CHATS[:9], single], tmp_path, labels="labels", overlong="cut")
    tokens = {token for row in range(len(data)) for token in data[row]["input_ids"].tolist()}
    assert not tokens & {7, 8, 9}
    with raises_one_line(DataError, match="expected tokens to learn, got none in"):
        make_packed([single], tmp_path / "none", num_shards=1)


@pytest.mark.parametrize("labels", [None, "labels"])
def test_shards_of_tokens_are_counted_where_they_are_written(labels, tmp_path, caplog):
    source = write_documents(CHATS, tmp_path / "a", write=parquet)
    main([source, str(tmp_path / "b")])
    data = Packed(Shards(str(tmp_path / "b")), LENGTH, labels=labels, overlong="cut")
    caplog.clear()
    data.prepare()
    assert not [each for each in caplog.messages if "counts the tokens" in each]
    documents = CHATS if labels else [{"tokens": each["tokens"]} for each in CHATS]
    rows = [data[row] for row in range(len(data))]
    assert targets_of(rows) == expected_targets(documents, LENGTH)


def test_rows_of_a_table_that_are_no_documents_are_written_all_the_same(tmp_path):
    source = write_documents([{"tokens": []}, {"tokens": [1]}], tmp_path / "a", 1, parquet)
    assert "2 samples in 1 shards" in main([source, str(tmp_path / "b")])
    with raises_one_line(DataError, match="got an empty one"):
        Packed(Shards(str(tmp_path / "b")), LENGTH).prepare()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_documents_logits_are_those_of_the_document_alone(attention, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    generator = numpy.random.default_rng(0)
    documents = [
        {"tokens": generator.integers(1, 50, length).tolist()} for length in (9, 3, 12, 5, 2, 17)
    ]
    data = make_packed(documents, tmp_path, num_shards=1)
    rows = [data[number] for number in range(len(data))]
    batch = default_collate(rows)
    ids = batch.pop("sequence_ids")
    logits, num_documents = model(**batch).logits, 0
    for row, number in itertools.product(range(len(rows)), range(int(ids.max()) + 1)):
        tokens = batch["input_ids"][row][ids[row] == number]
        if not len(tokens) or not tokens.any():  # padding
            continue
        alone = model(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(logits[row][ids[row] == number], alone)
        num_documents += 1
    assert num_documents == len(documents)
