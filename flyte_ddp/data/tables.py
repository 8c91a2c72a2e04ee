"""Conversion of CSV and JSON lines to local Parquet files, with one type for each column. Imports
no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flyte_ddp.config.extras import require
from flyte_ddp.data.cache import reading
from flyte_ddp.data.readers import COMPRESSIONS, check_names
from flyte_ddp.data.source import Source
from flyte_ddp.data.write import add_partition, checksum_entries, list_tables
from flyte_ddp.errors import DataError, in_one_line

KINDS = ".csv", ".tsv", ".jsonl", ".ndjson"
TABLES = *KINDS, *(f"{kind}{suffix}" for kind in KINDS for suffix in COMPRESSIONS)
BLOCK_BYTES = 1 << 26  # bytes of a file that are parsed at once; no row may be longer


def write_as_parquet(source: Source, directory: Path) -> str:
    """Write each file of `source` to a Parquet file in `directory`. Return a checksum of the
    source's files. Only one file at a time is in memory.

    Raises:
        DataError: a file cannot be read, or a column is text in one file and numbers in another.
    """
    require("source", "pyarrow", extra="streams")
    import pyarrow
    from pyarrow.parquet import read_table, write_table

    entries, tables = list_tables(source, TABLES), list[Path]()
    schema: Any = None
    for number, entry in enumerate(entries):
        with reading(source, entry):
            fetched = directory / Path(entry.name).name
            path = source.local_path(entry.name)
            if not path:
                source.fetch(entry.name, str(fetched))
            table = add_partition(_read(path or str(fetched)), entry)
            fetched.unlink(missing_ok=True)
            check_names(table.column_names, table.column_names)
            others = set(table.column_names) ^ set((schema or table.schema).names)
            if others:
                got = ", ".join(sorted(others))
                raise DataError(f"expected the columns of {entries[0].name}, got another {got}")
            schemas = [schema or table.schema, table.schema]
            schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
        tables.append(directory / f"{number:06d}.parquet")
        write_table(table, tables[-1])
    for entry, file in zip(entries, tables, strict=True):
        table = read_table(file).select(schema.names)
        if table.schema != schema:
            with reading(source, entry):
                write_table(table.cast(schema), file)
    return checksum_entries(entries)


def _read(path: str) -> Any:
    """Return the rows of a file. Each column has the type that fits all its values."""
    import pyarrow.csv
    import pyarrow.json

    name = path.lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    try:
        if name.endswith((".csv", ".tsv")):
            delimiter = ","
            if name.endswith(".tsv"):
                delimiter = "\t"
            parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
            options = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES)
            return pyarrow.csv.read_csv(path, options, parse)
        return pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=BLOCK_BYTES))
    except pyarrow.ArrowInvalid as error:
        raise DataError(in_one_line(error)) from error
