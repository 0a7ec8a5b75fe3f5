"""How long the rows of a data set are in the model's tokens: the job's settings on stdin, a histogram on stdout.

The planner asks this in a process of its own: it loads transformers. Rows are read and spelled as the job itself reads
and spells them; of many, a part that lies evenly over the whole is measured, and stands for the rest.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts.job_config import ConfigError, JobConfig, parse_config
from finetune import hub
from finetune.rows import Row, encode_row, load_rows, load_tokenizer

WRONG_ROWS = 3  # exit code, as agent.advice.job_settings knows it
MEASURED_ROWS = 4000  # the mean of rows whose lengths scatter by their own mean is then known to 1.6 %
LONGEST = 1_000_000  # tokens; longer rows count as so long


class RowsError(ConfigError):
    """Rows that are there and cannot be read or used."""


def measure(config: JobConfig) -> dict[str, Any]:
    """Rows of the training split, how many were measured, and (tokens, rows) of those that the job would keep.

    Rows of this host are counted where the tokenizer is not at hand too: `why` says what is missing. Raises RowsError
    where they cannot be read.
    """
    if config.tokenizer_name is not None:  # the model, which may be behind a gate, spells nothing then
        config = replace(config, model_name_or_path=JobConfig().model_name_or_path)
    here = _here(config)
    try:
        config = replace(config, **hub.commits_of(config))
        tokenizer = load_tokenizer(config)
    except ConfigError as error:
        if here is None:
            raise
        return {"rows": len(here), "measured": 0, "histogram": [], "why": str(error)}
    rows = load_rows(config, config.dataset_train_split) if here is None else here
    picked = rows[:: max(1, -(-len(rows) // MEASURED_ROWS))]
    whole = replace(config, max_length=LONGEST)
    try:
        encoded = [encode_row(row, tokenizer, whole) for row in picked]
    except ConfigError as error:
        raise RowsError(str(error)) from None
    counts = Counter(len(one.tokens) for one in encoded if one is not None)
    if not counts:
        raise RowsError(f"dataset_name={config.dataset_name!r}: no row has a token that counts")
    kept = len(rows) * sum(counts.values()) // len(picked)
    return {"rows": kept, "measured": len(picked), "histogram": sorted(_scaled(counts, kept).items())}


def _here(config: JobConfig) -> list[Row] | None:
    """Rows of a file or folder of this host; None where there is none of that name."""
    if not Path(config.dataset_name).expanduser().exists():
        return None
    try:
        return load_rows(config, config.dataset_train_split)
    except ConfigError as error:
        raise RowsError(str(error)) from None


def _scaled(counts: Counter[int], rows: int) -> dict[int, int]:
    """The same shape with so many rows: each length's share, the roundings carried on so that they add up."""
    measured, seen, assigned, found = sum(counts.values()), 0, 0, {}
    for length, count in sorted(counts.items()):
        seen += count
        upto = rows * seen // measured
        if upto > assigned:
            found[length] = upto - assigned
        assigned = upto
    return found


def main() -> None:
    """Measure; what is wrong with the settings is told on stderr, with exit code 1, with the rows WRONG_ROWS."""
    try:
        sys.stdout.write(json.dumps(measure(parse_config(json.load(sys.stdin))[0])) + "\n")
    except RowsError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(WRONG_ROWS)
    except ConfigError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
