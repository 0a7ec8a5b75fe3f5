"""How long the rows of a data set are in the model's tokens: the job's settings on stdin, a histogram on stdout.

The planner asks this in a process of its own: it loads transformers. Rows are read and spelled as the job itself reads
and spells them; of many, a part that lies evenly over the whole is measured, and stands for the rest.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from contracts.job_config import ConfigError, JobConfig, parse_config
from finetune import hub
from finetune.rows import encode, load_tokenizer
from finetune.sources import load_rows

MEASURED_ROWS = 4000  # the mean of rows whose lengths scatter by their own mean is then known to 1.6 %
LONGEST = 1_000_000  # tokens; longer rows count as so long


def measure(config: JobConfig) -> dict[str, Any]:
    """Rows of the training split, how many were measured, and (tokens, rows) of those that the job would keep."""
    if config.tokenizer_name is not None:  # the model, which may be behind a gate, spells nothing then
        config = replace(config, model_name_or_path=JobConfig().model_name_or_path)
    config = replace(config, **hub.commits_of(config))
    rows = load_rows(config, config.dataset_train_split)
    picked = rows[:: max(1, -(-len(rows) // MEASURED_ROWS))]
    tokenizer = load_tokenizer(config)
    whole = replace(config, max_length=LONGEST)
    encoded = [encode(row, tokenizer, whole) for row in picked]
    counts = Counter(len(one.tokens) for one in encoded if one is not None)
    if not counts:
        raise ConfigError(f"dataset_name={config.dataset_name!r}: no row has a token that counts")
    kept = len(rows) * sum(counts.values()) // len(picked)
    return {"rows": kept, "measured": len(picked), "histogram": sorted(_scaled(counts, kept).items())}


def _scaled(counts: Counter[int], rows: int) -> dict[int, int]:
    """The same shape with so many rows: each length's share, the roundings carried on so that they add up."""
    measured, seen, given, found = sum(counts.values()), 0, 0, {}
    for length, count in sorted(counts.items()):
        seen += count
        upto = rows * seen // measured
        if upto > given:
            found[length] = upto - given
        given = upto
    return found


def main() -> None:
    """Measure; what is wrong with the settings is told on stderr, with exit code 1."""
    try:
        sys.stdout.write(json.dumps(measure(parse_config(json.load(sys.stdin))[0])) + "\n")
    except ConfigError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
