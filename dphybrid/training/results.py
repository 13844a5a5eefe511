"""What the pages of a run hold besides numbers: costs of checkpoints, splits. Imports no torch, which
takes longer than to list a hundred runs."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SavingCost:
    """The cost of a checkpoint. stall_s: seconds that training waited. write_s: seconds of writing, at the
    same time as training."""

    written_bytes: int
    stall_s: float
    write_s: float


@dataclass(slots=True)
class SplitRow:
    """The share of one replica in a split. Two splits are different if a replica gets another number of rows,
    not if only other sizes, such as a sequence length, differ.

    number: of the split, in the order of first steps. first_shape, latest_shape: "input size -> output size".
    """

    number: int
    replica: int
    block: str
    device: str
    rows: int
    batch_rows: int
    first_shape: str
    latest_shape: str
    first_step: int
    last_step: int
    steps: int

    def table_row(self) -> dict[str, Any]:
        """Return the row for tables. `where` tells people which row it is; code reads `number` and
        `replica`."""
        values = asdict(self)
        where = f"split {self.number} / replica {self.replica} / {self.block}"
        first, latest = values.pop("first_shape"), values.pop("latest_shape")
        for_code = {"number": values.pop("number"), "replica": values.pop("replica")}
        return {"where": where, "split": first, **values, "latest": latest, **for_code}
