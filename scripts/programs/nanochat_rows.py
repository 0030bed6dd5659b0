"""Write generated documents where nanochat looks for its data: python nanochat_rows.py NANOCHAT_BASE_DIR."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from inputs import sentence


def main() -> None:
    """Write two shards of four row groups: one to train on, one to validate."""
    folder = Path(sys.argv[1]) / "base_data_climbmix"
    folder.mkdir(parents=True)
    for shard in range(2):
        source = random.Random(shard)
        rows = [" ".join(f"{sentence(source)}." for _ in range(4)) for _ in range(400)]
        pq.write_table(pa.table({"text": rows}), folder / f"shard_{shard:05d}.parquet", row_group_size=100)


if __name__ == "__main__":
    main()
