"""All files of predictions have one schema, whatever the batches look like."""

from __future__ import annotations

import datetime
import json

import numpy
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.prediction.schema import find_schema, from_text, list_columns, make_table, to_text
from flyte_ddp.recipes import Recipe
from flyte_ddp.recipes.digits import Digits
from flyte_ddp.recipes.problems import Segmentation
from tests.gang.test_predict import open_predictor, state, write  # noqa: F401 - a fixture
from tests.support.errors import raises_one_line

NOW = datetime.datetime(2026, 1, 2, 3)


class Given(Recipe):
    """Its columns are what the test gives as the outputs."""

    def __init__(self, **declared):
        self.prediction_schema = declared

    def prediction_columns(self, outputs):
        return outputs


def tables_of(*batches, **declared):
    """The tables of batches of the column "x", the schema of the first one travelling as text."""
    recipe, schema, tables = Given(**declared), None, []
    for values in batches:
        found = values if isinstance(values, dict) else {"x": values}
        columns = list_columns(recipe, found, len(next(iter(found.values()))))
        keys = list(range(len(next(iter(found.values())))))
        schema = schema or from_text(to_text(find_schema(recipe, keys, columns)))
        tables.append(make_table(recipe, keys, columns, schema))
    return pyarrow.concat_tables(tables)


@pytest.mark.parametrize(
    ("batches", "kind", "expected"),
    [
        ([[1, 2], [0.5, None]], "double", [1, 2, 0.5, None]),
        ([[True, None], [False, True]], "bool", [True, None, False, True]),
        ([[None, "a"], ["b", None]], "string", [None, "a", "b", None]),
        ([[[], [1]], [[0.5], None]], "list<item: double>", [[], [1], [0.5], None]),
        ([[[1]], [[]], [None]], "list<item: double>", [[1], [], None]),
        ([["caf\xe9", "caf\udce9"]], "string", ["caf\xe9", "caf\\udce9"]),
        ([["a"], [b"caf\xc3\xa9"]], "string", ["a", "caf\xe9"]),
        ([[b"caf\xe9"]], "binary", [b"caf\xe9"]),
        ([[{"a": 1}], [{"a": 0.5}]], "struct<a: double>", [{"a": 1}, {"a": 0.5}]),
        ([[NOW]], "timestamp[us]", [NOW]),
        ([torch.tensor([1.5, 2], dtype=torch.bfloat16)], "double", [1.5, 2]),
        ([torch.tensor([1, 2])], "double", [1, 2]),
        ([torch.tensor([[1, 2]]), [[0.5]]], "list<item: double>", [[1, 2], [0.5]]),
        ([torch.ones(1, 2, 2)], "list<item: list<item: double>>", [[[1, 1], [1, 1]]]),
        ([[torch.tensor(1.5), torch.tensor(2)]], "double", [1.5, 2]),
        ([[torch.ones(2), numpy.zeros(1)]], "list<item: double>", [[1, 1], [0]]),
        ([torch.eye(2).to_sparse()], "list<item: double>", [[1, 0], [0, 1]]),
        ([torch.ones(2, requires_grad=True)], "double", [1, 1]),
        ([numpy.array([1.5], "float16"), numpy.float32([0.5])], "double", [1.5, 0.5]),
        ([numpy.array(["a"]), numpy.array(["b"], object)], "string", ["a", "b"]),
        ([numpy.array([[1], [2]])], "list<item: double>", [[1], [2]]),
        ([pandas.Series([1, 2]), (3,)], "double", [1, 2, 3]),
    ],
)
def test_what_can_be_converted_is(batches, kind, expected):
    table = tables_of(*batches)
    assert str(table.schema.field("x").type).replace("element", "item") == kind
    assert table["x"].to_pylist() == expected


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        ([[None, None]], "x: expected a value in the first batch .* prediction_schema = .*x"),
        ([[[], None]], "x: expected a value in the first batch .* prediction_schema"),
        ([[[[]]]], "x: expected a value in the first batch"),
        ([[1], ["a"]], "x: expected values of double, .* got values of string: declare its type"),
        ([["a"], [0.5]], "x: expected values of string, .* got values of double: declare"),
        ([["3"], [3]], "x: expected values of string, .* got values of int64"),
        ([[1.0], ["3"]], "x: expected values of double, .* got values of string"),
        ([[1.0], [True]], "x: expected values of double, .* got values of bool"),
        ([["a"], [b"caf\xe9"]], "x: expected values of string, .* got .*UTF8"),
        ([[[1]], [1]], "x: expected values of list<.*double>, .* got values of int64"),
        ([[{"a": 1}], [{"b": 1}]], "x: expected values of struct<a: double>, .* got values of"),
        ([[2**60 + 1]], "x: expected values of double, .* got Integer value .*: declare"),
        ([[2**70]], "x: expected numbers, text, or lists of one kind, got .* too large"),
        ([[1, "a"]], "x: expected numbers, text, or lists of one kind, got Could not convert"),
        ([[object()]], "x: expected numbers, text, or lists of one kind, got Could not convert"),
        ([torch.tensor([1j])], "x: expected real numbers, got complex ones"),
        ([{"y": [1], "x": torch.tensor(1.0)}], "expected columns .* got 'x' with a Tensor alone"),
        ([{"y": [1], "key": [2]}], "expected columns .* none called 'key', got 'key' with 1"),
        ([{"x": [1], "y": [2]}, {"x": [1]}], "expected the columns x, y in .* none called 'y'"),
        ([{"x": [1]}, {"x": [1], "z": [2]}], "expected the columns x in each .* got also 'z'"),
    ],
)
def test_what_cannot_is_one_line_that_names_recipe_and_column(batches, line):
    place = r"^tests/prediction/test_schema\.py:\d+: Given\.prediction_columns: "
    with raises_one_line(ConfigError, match=place + line):
        tables_of(*batches)


@pytest.mark.parametrize(
    ("declared", "batches", "expected"),
    [
        ("int64", [[None], [2**60 + 1]], [None, 2**60 + 1]),
        ("string", [[None], ["a"]], [None, "a"]),
        ("list<list<int64>>", [[[]], [[[1], []]]], [[], [[1], []]]),
        ("float32", [[0.5], [1]], [0.5, 1]),
        (pyarrow.int32(), [[1]], [1]),
        (pyarrow.struct([("a", pyarrow.int64())]), [[None], [{"a": 3}]], [None, {"a": 3}]),
    ],
)
def test_a_declared_type_counts(declared, batches, expected):
    assert tables_of(*batches, x=declared)["x"].to_pylist() == expected


@pytest.mark.parametrize(
    ("declared", "values", "line"),
    [
        ({"x": "int64"}, [0.5], r"prediction_columns: x: expected values of int64, .* truncated"),
        ({"x": "string"}, [3], "prediction_columns: x: expected values of string, .* of int64"),
        ({"y": "string"}, [3], "prediction_columns: .* of prediction_schema, got none called 'y'"),
        ({"x": "strng"}, [3], "prediction_schema: x: expected a type such as .* got 'strng'"),
        ({"x": 3}, [3], "prediction_schema: x: expected a type such as .* got 3"),
        ({"key": "int64"}, [3], "prediction_schema: expected types by .* without 'key'"),
    ],
)
def test_a_declaration_that_does_not_fit_is_one_line(declared, values, line):
    with raises_one_line(ConfigError, match=line):
        tables_of(values, **declared)


plain = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.floats(-1, 1), st.text("ab", max_size=2)
)
columns = st.lists(
    st.one_of(
        st.lists(plain, min_size=1, max_size=3),
        st.lists(st.lists(plain, max_size=2), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(columns)
@pytest.mark.long
def test_batches_come_back_as_they_were_or_are_refused_in_one_line(batches):
    try:
        table = tables_of(*batches)
    except ConfigError as error:
        line = str(error)
        assert "Given.prediction_columns: x: " in line
        assert "\n" not in line
        return
    values = [value for batch in batches for value in batch]
    assert table["x"].to_pylist() == values
    # a truth value is no number, and 1.0 is none of a column of truth values
    for one, other in zip(table["x"].to_pylist(), values, strict=True):
        assert isinstance(one, bool) == isinstance(other, bool)


def test_parts_and_manifest_have_the_schema_of_the_first_batch(tmp_path, state, monkeypatch):  # noqa: F811
    """And a data set that raises is named with sample, part and recipe."""
    predictor = open_predictor(tmp_path, "digits", state)
    batches = iter([[1, 2], [1, 2], [None, 2], [0.5, 0.25], [None, None]])
    monkeypatch.setattr(Digits, "prediction_columns", lambda self, outputs: {"x": next(batches)})
    write(predictor, 0)
    predictor.write_part(1)
    manifest = json.loads((tmp_path / "output/_manifest.json").read_text())
    assert manifest["schema"] == {"key": "int64", "x": "double"}
    assert manifest["num_samples"] == 360
    assert parquet.read_table(tmp_path / "output")["x"].to_pylist() == [
        1,
        2,
        None,
        2,
        *[0.5, 0.25],
        *[None] * 2,
    ]
    assert pandas.read_parquet(tmp_path / "output")["x"].dtype == "float64"

    class Torn(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5:
                raise KeyError("no such\nimage")
            return torch.zeros(1, 8, 8)

        def key(self, index):
            return f"image-{index}"

    monkeypatch.setattr(Digits, "predict_dataset", lambda self, directory: Torn())
    (tmp_path / "torn").mkdir()
    torn = open_predictor(tmp_path / "torn", "digits", state)
    line = r"predict_dataset: sample 5 \(image-5\) of part-000001\.parquet cannot be .*: KeyError: "
    with raises_one_line(DataError, match=line):
        torn.write_part(1)


def test_masks_are_whole_numbers():
    recipe = Segmentation()
    columns = list_columns(recipe, torch.rand(2, 3, 4, 4), 2)
    schema = find_schema(recipe, [0, 1], columns)
    assert pyarrow.types.is_int64(schema.field("mask").type.value_type.value_type)
