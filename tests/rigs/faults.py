"""The recorded sick machines, and where a newcomer reads each fault: on the page, on the dashboards, in an alert."""

from dataclasses import dataclass

from rigs.tables import data_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One machine and what is wrong with it, in the words of each surface."""

    machine: str  # of tests/machines
    says: str  # on the page's first screen, in the first finding
    fix: str  # there too: a word of the remedy
    code: str
    severity: str  # of the finding, as the dashboards' table of what is wrong has it
    panel: str  # of the node dashboard: one that shows the fault itself
    drawn: str  # a label or value that this panel draws of the sick machine
    alert: str | None = None  # under way in Prometheus; None where no alert is meant for it
    place: int = 0  # among the page's findings: those before it are failures as well, of what else is wrong there


FAULTS = tuple(Fault(**row) for row in data_of(__file__, "faults.toml")["fault"])
