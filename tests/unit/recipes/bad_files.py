"""Files that no command can read a row of."""

from __future__ import annotations

import gzip

FILES_WITHOUT_A_GOOD_ROW = [
    ("torn.jsonl", b'{"messages": [{"role"'),
    ("empty.jsonl", b""),
    ("binary.jsonl", bytes(range(256)) * 9),
    ("torn.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-20]),
    ("columns.jsonl", b'{"a": 1}\n'),
    ("torn.parquet", b"PAR1"),
]
