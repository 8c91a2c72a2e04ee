"""Rows of Parquet files as shards (data/write.py). What the command makes of other sources is in
tests/recipes/test_write_shards.py.
"""

from __future__ import annotations

import numpy as np
import pyarrow
import pyarrow.parquet

from flyte_ddp.data import Shards, write


def test_rows_of_parquet_are_in_shards_once_with_all_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "SHARDS_AT_ONCE", 2)
    rows = [{"number": n, "text": f"row {n}", "tokens": [n, n + 1]} for n in range(3000)]
    (tmp_path / "rows").mkdir()
    for name, part in (("a", rows[:2500]), ("b", rows[2500:])):
        table = pyarrow.Table.from_pylist(part)
        pyarrow.parquet.write_table(table, tmp_path / f"rows/{name}.parquet", row_group_size=300)
    source = write.find_tables(str(tmp_path / "rows"), (write.PARQUET,))
    write.write_parquet(source, str(tmp_path / "shards"), 0, 8000)

    tables = [
        pyarrow.parquet.read_table(file).to_pylist()
        for file in sorted((tmp_path / "shards").glob("*.parquet"))
    ]
    found = [row for table in tables for row in table]
    assert len(tables) > 3
    assert sorted(found, key=lambda row: row["number"]) == rows
    for table in tables:
        assert 400 < np.mean([row["number"] for row in table]) < 2600
    assert Shards(str(tmp_path / "shards"))[7]["number"] == found[7]["number"]
    single = write.find_tables(str(tmp_path / "rows/b.parquet"), (write.PARQUET,))
    assert write.write_parquet(single, str(tmp_path / "b"), 1, 1 << 20).startswith("500 samples")
