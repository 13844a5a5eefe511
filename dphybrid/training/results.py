"""What the pages of a run hold besides numbers: charts, costs of checkpoints, splits. Imports no torch, which
takes longer than to list a hundred runs."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel

if TYPE_CHECKING:
    import numpy as np


class Chart(BaseModel):
    """A plot of points (x, y), or of the line through them. name: what it shows, in one word."""

    name: str
    title: str
    xlabel: str
    ylabel: str
    points: list[tuple[float, float]]
    drawn: Literal["points", "line"] = "points"

    @classmethod
    def of(
        cls, name: str, title: str, axes: tuple[str, str], x_T: "np.ndarray", y_T: "np.ndarray", **more: Any
    ) -> Self:
        """Return the plot of these points. axes: names of x and y. more: `drawn`."""
        points = list(zip(x_T.tolist(), y_T.tolist(), strict=True))
        return cls(name=name, title=title, xlabel=axes[0], ylabel=axes[1], points=points, **more)


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
