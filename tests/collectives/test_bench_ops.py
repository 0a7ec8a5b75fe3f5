"""A collective is a record: its sizes, its factor, its row in the documentation, and an eye for wrong data."""

import re

import pytest
from rigs.tables import ROOT, each_row

from collectives.bench.ops import GRAIN_BYTES, OPS, UNKNOWN_SOURCE, allocate, fill, matches, moved_bytes, write_pattern

pytestmark = pytest.mark.long  # it imports torch

DOCUMENT = ROOT / "docs/reference/bus-bandwidth.md"


def rows():
    found = re.findall(r"^\| (\w+) \| (.+?) \| (.+?) \| (.+?) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {row[0]: row[1:] for row in found if row[0] != "op"}


def test_the_document_has_exactly_the_rows_of_the_code():
    assert list(rows()) == list(OPS)
    for name, (size, *_) in rows().items():
        assert size.startswith("total") is OPS[name].split, name


@each_row("name", OPS)
@each_row("n", [1, 2, 3, 8, 1024])
def test_the_factor_is_what_the_document_says(name, n):
    said = {"(n-1)/n": (n - 1) / n, "2(n-1)/n": 2 * (n - 1) / n, "1": 1}[rows()[name][1]]
    assert OPS[name].factor(n) == pytest.approx(said)


@each_row("name", OPS)
def test_sizes_are_rounded_down_to_a_grain_for_each_rank(name):
    op = OPS[name]
    parts = 3 if op.split else 1
    assert moved_bytes(op, 1000, 3) == 1000 // parts // GRAIN_BYTES * GRAIN_BYTES * parts
    assert moved_bytes(op, 1, 3) == GRAIN_BYTES * parts


def after(name, turn, ranks=(4, 7, 9), size=3 * 1024):
    """Each rank's side as a perfect collective would leave it."""
    torch = pytest.importorskip("torch")
    op = OPS[name]
    sides = [allocate(op, size, None, ranks, rank, "cpu") for rank in ranks]
    for side in sides:
        fill(side, turn)
    given = [side.send_buffer.clone() for side in sides]
    n = len(ranks)
    for place, side in enumerate(sides):
        received = {
            "all_gather": torch.cat(given),
            "reduce_scatter": sum(given).chunk(n)[place],
            "all_reduce": sum(given),
            "all_to_all": torch.cat([one.chunk(n)[place] for one in given]),
        }
        side.output.copy_(received[name])
    return op, sides


@each_row("name", OPS)
def test_right_data_is_right_and_old_data_is_wrong(name):
    op, sides = after(name, turn=1)
    for side in sides:
        assert op.find_wrong(side, 1) == ()
        assert op.find_wrong(side, 2) != (), "data of an earlier round"
    fill(sides[1], 1)
    assert op.find_wrong(sides[1], 1) != (), "a buffer into which no rank wrote"


@each_row("name", OPS)
def test_one_wrong_element_is_seen_wherever_it_is(name):
    op, sides = after(name, turn=5)
    for place in (0, sides[1].output.numel() // 2, sides[1].output.numel() - 1):
        before = sides[1].output[place].clone()
        sides[1].output[place] += 1
        assert op.find_wrong(sides[1], 5) != ()
        sides[1].output[place] = before
        assert op.find_wrong(sides[1], 5) == ()


def swap_parts(taken):
    """Exchange the first two of three parts."""
    first, second, _ = taken.clone().chunk(3)
    taken.chunk(3)[0].copy_(second), taken.chunk(3)[1].copy_(first)


@each_row(
    ("name", "spoil", "wrong"),
    [
        ("all_gather", lambda taken: taken.chunk(3)[2][7].fill_(999), (2,)),
        ("all_reduce", lambda taken: taken[7].add_(1), (UNKNOWN_SOURCE,)),  # a sum does not say whose part is wrong
        ("all_gather", swap_parts, (0, 1)),
    ],
)
def test_the_place_whose_data_is_wrong_is_named(name, spoil, wrong):
    op, sides = after(name, turn=3)
    spoil(sides[0].output)
    assert op.find_wrong(sides[0], 3) == wrong


def test_sums_are_exact_for_many_ranks():
    torch = pytest.importorskip("torch")
    ranks = tuple(range(5000))
    sums = torch.zeros(1024, dtype=torch.float32)
    write_pattern(sums, ranks, 9)
    assert matches(sums, ranks, 9)
    assert float(sums.max()) < 2**24
    assert not matches(sums, ranks[:-1], 9)
