"""What the tests of the log reader share: rows of evidence_rows.toml and the prefix of NCCL's lines."""

import html
import json

from rigs.tables import data_of

HEAD = "node-1:100:120 [0] "
INFO = f"{HEAD}NCCL INFO "


TABLES: dict[str, list] = data_of(__file__, "evidence_rows.toml")


def rows(name: str) -> list:
    """Rows of one table: tuples, or single lines."""
    return [tuple(row) if isinstance(row, list) else row for row in TABLES[name]]


def dressed(form: str, number: int, line: str, **more: object) -> str:
    """A line in one of the forms of `dresses`, which says what the fields are."""
    packed = json.dumps(f"{line}\n")
    return form.format(
        n=number + 1, rank=number % 16, three=number % 3, line=line, json=json.dumps(line),
        json_line=packed.replace(">", "\\u003e"), json_json=json.dumps(f'{{"log": {packed}}}'),
        html=line.replace("<", "&lt;").replace(">", "&gt;"), html_all=html.escape(line, quote=False), **more,
    )  # fmt: skip
