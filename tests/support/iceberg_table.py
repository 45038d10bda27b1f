"""`python -m tests.support.iceberg_table CHANGE [COUNT…]`: changes the table shop.orders of the default catalog.

`append` – so many rows, with the numbers from the table's count on. `expire` – all snapshots but the current one.
"""

from __future__ import annotations

import sys

import pyarrow as pa
from pyiceberg.catalog import load_catalog

SCHEMA = pa.schema([("id", pa.int64()), ("customer", pa.string())])


def main() -> None:
    change, *counts = sys.argv[1:]
    catalog = load_catalog("default")
    catalog.create_namespace_if_not_exists("shop")
    table = catalog.create_table_if_not_exists("shop.orders", schema=SCHEMA)
    if change == "append":
        begin = table.scan().to_arrow().num_rows
        for count in map(int, counts):
            ids = list(range(begin, begin + count))
            table.append(pa.table({"id": ids, "customer": [f"c{each % 7}" for each in ids]}, schema=SCHEMA))
            begin += count
    else:
        current = table.metadata.current_snapshot_id
        old = [each.snapshot_id for each in table.snapshots() if each.snapshot_id != current]
        table.maintenance.expire_snapshots().by_ids(old).commit()


if __name__ == "__main__":
    main()
