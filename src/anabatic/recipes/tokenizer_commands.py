"""`anabatic tokenizer train|eval`."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from anabatic.config.tokenizer import TokenizerEvalJob, TokenizerTrainJob
from anabatic.data.tokenizer import bpe_training, compression
from anabatic.data.tokenizer.compression import CompressionReport

_TABLE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


def run_tokenizer_train(job: TokenizerTrainJob) -> None:
    """Train a tokenizer and write its folder.

    Raises:
        UserError: the data or the vocabulary size is wrong.
        Failure: the folder cannot be written.
    """
    bpe_training.train_tokenizer(job)


def run_tokenizer_eval(job: TokenizerEvalJob) -> None:
    """Print bytes per token of every tokenizer on every text, to stdout.

    Raises:
        DataError: a tokenizer or a source cannot be read.
    """
    reports = compression.evaluate_tokenizers(job)
    if job.json:
        sys.stdout.write(json.dumps([report.to_dict() for report in reports], indent=2) + "\n")
        return
    width = None if sys.stdout.isatty() else _TABLE_WIDTH
    Console(file=sys.stdout, width=width).print(_build_table(reports))


def _build_table(reports: list[CompressionReport]) -> Table:
    """Build a table: a row per text, a column per tokenizer, from the second on with the difference to the first."""
    table = Table(title="UTF-8 bytes per token (more is better at the same vocabulary)", title_justify="left")
    table.add_column("text", overflow="fold")
    table.add_column("bytes", justify="right")
    for report in reports:
        table.add_column(f"{report.tokenizer}\n{report.vocab_size:,} entries", justify="right", overflow="fold")
    for row in zip(*(report.measurements for report in reports), strict=True):
        first = row[0].bytes_per_token
        cells = []
        for index, item in enumerate(row):
            cell = f"{item.bytes_per_token:.3f}"
            if index:
                cell += f" ({(item.bytes_per_token / first - 1) * 100:+.1f} %)"
            cells.append(cell if item.lossless else f"{cell} lossy")
        table.add_row(row[0].text, f"{row[0].num_bytes:,}", *cells)
    return table
