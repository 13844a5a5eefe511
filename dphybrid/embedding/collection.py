"""Many tables of one width, stored in one flat table: each step sorts, gathers and updates once instead of
once per table.

Letters: B samples, F columns (one id column a table here), D width of a row.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dphybrid.embedding import native
from dphybrid.embedding.lookup import not_a_row, whole_numbers
from dphybrid.embedding.replicas import SizesOf
from dphybrid.embedding.table import HostEmbedding
from dphybrid.kernels import may_read
from dphybrid.util.compiling import is_exporting
from dphybrid.util.errors import UserError


class HostEmbeddingCollection(nn.Module):
    """Several tables (name -> num_rows), stored one after the other in `flat`, one HostEmbedding with all
    their rows. Row optimizers and `RowPipeline` see only `flat`, which `find_tables` lists under the
    collection's name; give the pipeline `flat_ids(...)`.

    Args:
        dim: Width of all rows.
        padding: Name -> id whose row stays zero and is never trained.
        make: Builds the flat table from (num_rows, dim, padding_idx=, name=, and the options).
        options: Further arguments of `HostEmbedding` (std, seed, dtype, storage, path).
    """

    def __init__(
        self,
        tables: Mapping[str, int],
        dim: int,
        *,
        padding: Mapping[str, int] | None = None,
        name: str = "tables",
        make: Callable[..., HostEmbedding] = HostEmbedding,
        **options: object,
    ) -> None:
        super().__init__()
        if not tables or min(tables.values()) < 1:
            raise UserError(
                f"collection {name!r}: tables={dict(tables)}; give at least one table, each with at least "
                "one row"
            )
        self.num_rows, self.dim = dict(tables), dim
        starts = [0, *itertools.accumulate(tables.values())]
        self.starts = dict(zip(tables, starts[:-1], strict=True))
        self._starts_F = torch.tensor(starts[:-1], device="cpu")
        self._num_rows_F = torch.tensor(list(tables.values()), device="cpu")
        padding_rows = []
        for table, row in (padding or {}).items():
            if not 0 <= row < self.num_rows.get(table, 0):
                raise UserError(f"padding {table!r}: {row} is not a row of the tables {self.num_rows}")
            padding_rows.append(self.starts[table] + row)
        self.flat = make(starts[-1], dim, padding_idx=padding_rows, name=name, **options)

    def flat_ids(self, ids_BF: Tensor, tables: slice = slice(None)) -> Tensor:
        """Convert each table's own ids to ids of `flat`. The columns of ids_BF (its last dimension) are the
        tables in order, or those that `tables` selects.

        Raises UserError for an id that is not a row of its table, naming table, value and position.
        """
        names, ids_BF = list(self.num_rows)[tables], whole_numbers(ids_BF, self.flat.name)
        if ids_BF.shape[-1] != len(names):
            raise UserError(f"ids have shape {tuple(ids_BF.shape)}; give {len(names)} columns, one per table")
        starts_F, num_rows_F = self._starts_F[tables], self._num_rows_F[tables]
        # torch.export cannot record a check that raises. An exported model gets its ids from an encoder,
        # whose ids are rows.
        is_checked_here = torch.compiler.is_compiling() and not is_exporting()
        if is_checked_here and bool(((ids_BF < 0) | (ids_BF >= num_rows_F)).any()):
            raise not_a_row(ids_BF, num_rows_F, names)
        if not may_read(starts_F, ids_BF):
            return ids_BF + starts_F
        # Ids must be checked here: in `flat`, an id beyond its table is a row of the next table.
        try:
            return native.flatten(ids_BF, starts_F, num_rows_F)
        except IndexError:
            raise not_a_row(ids_BF, num_rows_F, names) from None

    def forward(self, ids_BF: Tensor, *, by_replica: bool = False) -> Tensor | tuple[Tensor, ...]:
        """Return rows_BFD, given one id for each sample and table. by_replica: see `replica_rows`."""
        rows: Tensor | tuple[Tensor, ...] = self.flat(self.flat_ids(ids_BF), by_replica=by_replica)
        return rows

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Set the devices that `replica_rows` sends rows to; see `HostEmbedding.place_on`."""
        self.flat.place_on(devices, sizes_of)

    def replica_rows(self, ids_BF: Tensor) -> list[Tensor]:
        """Return, for each used replica, the rows_bFD of its share of the samples on its device; see
        `HostEmbedding.replica_rows`."""
        # Through __call__, so that the collection's hooks see every lookup.
        rows: Tensor | tuple[Tensor, ...] = self(ids_BF, by_replica=True)
        return [rows] if isinstance(rows, Tensor) else list(rows)


def find_tables(model: nn.Module) -> dict[str, HostEmbedding]:
    """Return the host tables of a model by dotted name, each once. The flat table of a collection has the
    collection's name."""
    tables: dict[str, HostEmbedding] = {}
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, HostEmbeddingCollection):  # comes before its `flat`
            names[id(module.flat)] = name
        elif isinstance(module, HostEmbedding):
            tables[names.get(id(module)) or name] = module
    return tables


def is_dense(model: nn.Module) -> Callable[[Tensor], bool]:
    """Return a function that tells the other parameters of a model from its tables' weights."""
    # By identity: a weight of two modules has two names.
    weights = {id(table.weight) for table in find_tables(model).values()}
    return lambda parameter: id(parameter) not in weights


def dense_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model, except its tables' weights."""
    return filter(is_dense(model), model.parameters())
