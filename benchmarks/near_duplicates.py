"""Near duplicates of `anabatic data check` beside datasketch: processor time, and what of the truth each finds.

    pip install --target LIBS datasketch
    python benchmarks/near_duplicates.py --libraries LIBS [--rows 400] [--rounds 5]

Rows are modules of Python's library cut into pieces of about 2,000 characters, each followed by a copy in which a share
of the words is replaced. Both sides take the same sets of 16-byte n-grams, signatures of 128 values and the threshold
0.8; the truth is the Jaccard similarity of the sets themselves. Sides take turns, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

from anabatic.config.sections.common import Data
from anabatic.data.inspection.duplicates import DuplicateIndex
from anabatic.data.inspection.fingerprints import DUPLICATE_NGRAM_BYTES, SIGNATURE_SIZE, normalize_text
from anabatic.data.inspection.row_text import RowText
from anabatic.data.readers.sources import parse_source, read_documents
from option_types import positive_int

PIECE_CHARS = 2000
REPLACED = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05)
THRESHOLD = 0.8


def make_rows(count: int) -> list[str]:
    """Return `count` texts: pieces, each followed by a copy with some words replaced."""
    generator, rows = random.Random(0), []
    for document in read_documents(parse_source("stdlib:"), Data()):
        text = document.text or ""
        for start in range(0, len(text) - PIECE_CHARS, PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            share = generator.choice(REPLACED)
            copy = " ".join("replaced" if generator.random() < share else word for word in piece.split())
            rows += [piece, copy + " ."]
            if len(rows) >= count:
                return rows[:count]
    return rows


def list_ngrams(text: str) -> set[bytes]:
    """Return the set that both sides estimate."""
    data, size = normalize_text(text).casefold().encode(), DUPLICATE_NGRAM_BYTES
    return {data[at : at + size] for at in range(len(data) - size + 1)}


def find_ours(rows: list[str]) -> set[int]:
    """Return the rows that have a near or exact duplicate before them."""
    index = DuplicateIndex()
    for row in rows:
        index.add_row(RowText(row))
    return {*index.exact_duplicates, *index.find_near_duplicates(THRESHOLD)}


def find_theirs(rows: list[str]) -> set[int]:
    """The same by datasketch."""
    from datasketch import MinHash, MinHashLSH

    index, found = MinHashLSH(threshold=THRESHOLD, num_perm=SIGNATURE_SIZE), set()
    signatures = {}
    for number, row in enumerate(rows):
        signature = MinHash(num_perm=SIGNATURE_SIZE)
        signature.update_batch(list(list_ngrams(row)))
        if any(signature.jaccard(signatures[other]) >= THRESHOLD for other in index.query(signature)):
            found.add(number)
        index.insert(number, signature)
        signatures[number] = signature
    return found


def find_truth(rows: list[str]) -> dict[int, float]:
    """Return the highest similarity of each row to one before it."""
    sets, best = list(map(list_ngrams, rows)), {}
    for (_, first), (two, second) in combinations(enumerate(sets), 2):
        best[two] = max(best.get(two, 0.0), len(first & second) / len(first | second))
    return best


def main() -> None:
    """Run one side, or both in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--rows", type=positive_int, default=400)
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--side", choices=["ours", "theirs"])
    asked = parser.parse_args()
    rows = make_rows(asked.rows)
    if asked.side:
        sys.path.insert(0, str(asked.libraries))
        find = find_ours if asked.side == "ours" else find_theirs
        find(rows[:4])
        begun = time.process_time()
        found = find(rows)
        print(json.dumps({"seconds": time.process_time() - begun, "found": sorted(found)}))
        return
    ratios, told = [], {}
    for _ in range(asked.rounds):
        for side in ("ours", "theirs"):
            command = [sys.executable, __file__, "--libraries", str(asked.libraries), "--rows", str(asked.rows)]
            told[side] = json.loads(subprocess.check_output([*command, "--side", side]).splitlines()[-1])
        ratios.append(told["theirs"]["seconds"] / told["ours"]["seconds"])
    truth = find_truth(rows)
    similar = {row for row, value in truth.items() if value >= THRESHOLD}
    print(f"{len(rows)} rows, {sum(map(len, rows)) / 2**20:.1f} MiB; {len(similar)} have one like it before them")
    for side, result in told.items():
        found = set(result["found"])
        wrong = [truth[row] for row in found - similar]
        below = f"{len(wrong)} below the threshold" + (f" ({min(wrong):.2f} or more)" if wrong else "")
        print(f"{side:<7} {result['seconds']:6.2f} s CPU, finds {len(found & similar)} of {len(similar)}, and {below}")
    print(f"datasketch takes {statistics.median(ratios):.0f} times the CPU time (median of {asked.rounds} rounds)")


if __name__ == "__main__":
    main()
