"""The ways to train a recipe's network that `whole_step` compares with the recipe's loop: other libraries'
tables, and plain PyTorch.

Letters: B samples, F id columns, D width of a row, T tokens of a sample, V words, C candidates, E width of a
vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.embedding import fbgemm_tables
from dphybrid.embedding import HostEmbeddingCollection, row_optimizer
from dphybrid.embedding.softmax import IGNORED
from dphybrid.parallel import resolve_devices
from dphybrid.recipes.ctr.numbers import EmbeddedBins
from dphybrid.recipes.ctr.pairs import Pairs
from dphybrid.run.experiment import Experiment

Batch = dict[str, Tensor]
LIBRARIES = {
    "FBGEMM's fused tables": "fbgemm_gpu",
    "FBGEMM's tables, our blocks": "fbgemm_gpu",
    "TorchRec's fused tables": "torchrec",
}
"""Way -> the optional module that it needs."""


@dataclass(frozen=True)
class Way:
    """What a plain loop trains. losses: batch -> each sample's loss and weight. blocks: the dense modules.
    rows: optimizers of the rows; empty if the backward updates them. one_norm: clip blocks and rows together.
    """

    losses: Callable[[Batch], Mapping[str, Tensor]]
    blocks: nn.Module
    rows: Sequence[torch.optim.Optimizer] = ()
    one_norm: bool = False


Make = Callable[[Experiment], Way]


def _built(experiment: Experiment) -> Any:
    return experiment.build(resolve_devices("cpu"), experiment.data.dataset("train"))


def own(experiment: Experiment) -> Way:
    """Return the recipe's model and row optimizer, as a user's script would use them."""
    model, table = _built(experiment), experiment.config.table
    return Way(model, model, [row_optimizer(table.optimizer, model, lr=table.lr)], one_norm=True)


def _stock(experiment: Experiment, modules: nn.Module) -> list[torch.optim.Optimizer]:
    """Return torch's optimizer for sparse gradients that corresponds to the config's row optimizer."""
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.SparseAdam,
    }
    table = experiment.config.table
    return [kinds[table.optimizer](list(modules.parameters()), lr=table.lr)]


def _embedding(table: HostEmbeddingCollection) -> nn.Module:
    """Return one sparse nn.Embedding with the rows of all tables, for flat ids."""
    return nn.Embedding.from_pretrained(table.flat.settled().clone(), freeze=False, sparse=True)


def _by_torch(blocks: nn.Module) -> nn.Module:
    """Replace kernels by torch's operations, as a script with another library would use them: modules use
    these in evaluation mode."""
    for part in blocks.modules():
        if isinstance(part, EmbeddedBins | Pairs):
            part.eval().train = lambda *_, own=part: own  # type: ignore[method-assign]
    return blocks


def _clicks(
    rows_of: Callable[[Experiment, Any], tuple[Any, Sequence[Any]]],
    experiment: Experiment,
    blocks: Callable[[nn.Module], nn.Module] = _by_torch,
) -> Way:
    """Return DLRM over other tables. rows_of: collection -> (function that looks ids_BF up, optimizers)."""
    model = _built(experiment)
    region = blocks(model.region.module)
    look_up, rows = rows_of(experiment, model.table)

    def losses(batch: Batch) -> Mapping[str, Tensor]:
        loss_B, _ = region(look_up(batch["ids_BF"]), batch["dense_BN"], batch["labels_B"])
        return {"loss": loss_B, "weight": torch.ones_like(loss_B)}

    return Way(losses, region, rows)


def _of_sparse(experiment: Experiment, table: HostEmbeddingCollection) -> tuple[Any, Sequence[Any]]:
    embedding = _embedding(table)
    starts_F = torch.tensor(list(table.starts.values()))  # each column's first row in the one embedding
    return lambda ids_BF: embedding(ids_BF + starts_F), _stock(experiment, embedding)


def _of_bags(experiment: Experiment, table: HostEmbeddingCollection) -> tuple[Any, Sequence[Any]]:
    make = partial(nn.EmbeddingBag.from_pretrained, freeze=False, mode="sum", sparse=True)
    bags = nn.ModuleList(make(table.weight_of(name).clone()) for name in table.num_rows)

    def look_up(ids_BF: Tensor) -> Tensor:
        return torch.stack([bag(ids_B[:, None]) for bag, ids_B in zip(bags, ids_BF.T, strict=True)], 1)

    return look_up, _stock(experiment, bags)


def _of_fbgemm(experiment: Experiment, table: HostEmbeddingCollection) -> tuple[Any, Sequence[Any]]:
    config = experiment.config.table
    tables = fbgemm_tables(list(table.num_rows.values()), table.dim, config.optimizer, config.lr)
    # The same start weights as the recipe's, so that all losses can be compared.
    for weight, name in zip(tables.split_embedding_weights(), table.num_rows, strict=True):
        weight.data.copy_(table.weight_of(name))

    def look_up(ids_BF: Tensor) -> Tensor:
        return tables(ids_BF.T.reshape(-1), torch.arange(ids_BF.numel() + 1)).view(*ids_BF.shape, table.dim)

    return look_up, ()  # no optimizer: the backward updates the rows


def _of_torchrec(experiment: Experiment, table: HostEmbeddingCollection) -> tuple[Any, Sequence[Any]]:
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    kinds, names = {"sgd": torch.optim.SGD, "adagrad": RowWiseAdagrad}, list(table.num_rows)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=table.dim, feature_names=[name])
        for name, rows in table.num_rows.items()
    ]
    config, device = experiment.config.table, torch.device("cpu")
    tables: Any = FusedEmbeddingBagCollection(
        configs, kinds[config.optimizer], {"lr": config.lr}, device=device
    )
    for name, weight in tables.named_parameters():
        weight.data.copy_(table.weight_of(name.split(".")[-2]))  # TorchRec: embedding_bags.NAME.weight

    def look_up(ids_BF: Tensor) -> Tensor:
        one_each = torch.ones(ids_BF.numel(), dtype=torch.int32)
        found = tables(KeyedJaggedTensor(names, ids_BF.T.reshape(-1), lengths=one_each))
        return found.values().view(*ids_BF.shape, table.dim)

    return look_up, ()  # fused: the backward updates the rows


def plain_text(experiment: Experiment) -> Way:
    """Return the language model as PyTorch's tutorials write one: nn.Embedding, nn.LSTM, nn.Linear."""
    o: Any = experiment.config.model
    model = _built(experiment)
    num_words = experiment.data.info["num_words"]
    words = nn.Embedding.from_pretrained(model.words.settled().clone(), freeze=False, sparse=True)
    between = o.dropout if o.layers > 1 else 0.0  # torch warns of one where there is nothing between
    network = nn.LSTM(o.dim, o.hidden, o.layers, batch_first=True, dropout=between)
    blocks = nn.ModuleDict({"network": network, "output": nn.Linear(o.hidden, num_words)})
    # The recipe's start weights, so that the losses of all ways can be compared.
    start = model.region.module.state_dict()
    blocks.load_state_dict(
        {
            name.replace("network.network", "network").replace("output.layer", "output"): value
            for name, value in start.items()
        }
    )

    def losses(batch: Batch) -> Mapping[str, Tensor]:
        hidden_BTH, _ = network(F.dropout(words(batch["ids_BT"]), o.dropout))
        logits_BTV = blocks["output"](F.dropout(hidden_BTH, o.dropout))
        targets_BT = batch["targets_BT"]
        loss = F.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return {"loss": loss, "weight": (targets_BT != IGNORED).sum()}

    return Way(losses, blocks, _stock(experiment, words))


CLICKS: dict[str, Make] = {
    "sparse nn.Embedding": partial(_clicks, _of_sparse),
    "an EmbeddingBag a column, as in DLRM": partial(_clicks, _of_bags),
    "FBGEMM's fused tables": partial(_clicks, _of_fbgemm),
    "FBGEMM's tables, our blocks": partial(_clicks, _of_fbgemm, blocks=lambda blocks: blocks),
    "TorchRec's fused tables": partial(_clicks, _of_torchrec),
}


TEXTS: dict[str, Make] = {"nn.Embedding, nn.LSTM, nn.Linear": plain_text}
TOKENS = 64
"""Tokens in a sample of recipe text."""
