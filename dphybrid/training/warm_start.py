"""Starting from another run's weights, with tables that have grown since."""

from pathlib import Path

import torch
from torch import nn

from dphybrid.data import Prepared
from dphybrid.data.table.extend import old_rows, open_base
from dphybrid.embedding import find_tables
from dphybrid.training.checkpoint import load_weights, verify_checkpoint
from dphybrid.training.tensor_file import table_weight
from dphybrid.util.errors import UserError


def warm_start(checkpoint: Path, model: nn.Module, data: Prepared) -> None:
    """Fill `model` from a checkpoint. On every row of `data` it then answers as the checkpoint's own model
    would.

    data.base, where it has one, must be what the checkpoint was trained on: the rows of old values are the
    checkpoint's, those of new values copies of the row that stood for them there, the unknown one's or a hash
    bucket's. Optimizers start anew. Raises UserError when model and checkpoint do not fit.
    """
    page = verify_checkpoint(checkpoint)
    base = data.manifest.base
    if base is None:
        load_weights(checkpoint, model)
        return
    earlier = open_base(Path(base))
    trained_on = page.data_digest
    if trained_on != earlier.prepared.digest:
        raise UserError(
            f"train.warm_start={checkpoint}: was trained on data {trained_on[:12]}, data.base is "
            f"{earlier.prepared.path.name}"
        )
    sources_V = torch.from_numpy(old_rows(earlier.encoder, open_base(data.path).encoder))
    tables = find_tables(model)
    load_weights(checkpoint, model, skip=tables)
    for name, table in tables.items():
        before = table_weight(checkpoint, name)
        fits = len(table.settled()) == len(sources_V) and len(before) > int(sources_V.max())
        if not fits or before.shape[1] != table.settled().shape[1]:
            raise UserError(
                f"train.warm_start={checkpoint}: table {name} is {tuple(before.shape)} there and "
                f"{tuple(table.settled().shape)} here, and the columns have {len(sources_V)} ids; only a "
                "table over all columns can grow, with the same width"
            )
        torch.index_select(before.to(table.settled().dtype), 0, sources_V, out=table.settled())
