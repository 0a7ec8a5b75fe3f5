"""`each_row`: a failing row is reported by its name, and the others run all the same."""

import pytest
from rigs.tables import each_row


def test_every_failing_row_is_reported_by_its_name() -> None:
    seen = []

    @each_row("number", [0, 1, pytest.param(2, id="named")])
    def test(number: int) -> None:
        seen.append(number)
        if number == 2:
            pytest.fail("as pytest says it")
        assert number == 1

    with pytest.raises(BaseExceptionGroup) as raised:
        test()
    notes = [" ".join(error.__notes__) for error in raised.value.exceptions]
    assert seen == [0, 1, 2], "the rows after a failing one run"
    assert len(notes) == 2 and "(0,)" in notes[0] and "named" in notes[1], notes
