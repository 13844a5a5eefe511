"""The ways to train a recipe's network that `whole_step` compares with the recipe's loop.

Letters: B samples, F id columns, D width of a row, T tokens of a sample, V words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import row_optimizer
from dphybrid.embedding.softmax import IGNORED
from dphybrid.parallel import resolve_devices
from dphybrid.recipes.ctr.numbers import EmbeddedBins
from dphybrid.recipes.ctr.pairs import Pairs
from dphybrid.run.experiment import Experiment

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """What a plain loop trains. losses: batch -> each sample's loss and weight. blocks: the dense modules.
    rows: the optimizer of the rows. one_norm: clip blocks and rows together."""

    losses: Callable[[Batch], Mapping[str, Tensor]]
    blocks: nn.Module
    rows: torch.optim.Optimizer
    one_norm: bool = False


Make = Callable[[Experiment], Way]


def _built(experiment: Experiment) -> Any:
    return experiment.build(resolve_devices("cpu"), experiment.data.dataset("train"))


def own(experiment: Experiment) -> Way:
    """Return the recipe's model and row optimizer, as a user's script would use them."""
    model, table = _built(experiment), experiment.config.table
    return Way(model, model, row_optimizer(table.optimizer, model, lr=table.lr), one_norm=True)


def _stock(experiment: Experiment, modules: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer for sparse gradients that corresponds to the config's row optimizer."""
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.SparseAdam,
    }
    table = experiment.config.table
    found: torch.optim.Optimizer = kinds[table.optimizer](list(modules.parameters()), lr=table.lr)
    return found


def _by_torch(blocks: nn.Module) -> nn.Module:
    """Replace kernels by torch's operations, as a script with another library would use them: modules use
    these in evaluation mode."""
    for part in blocks.modules():
        if isinstance(part, EmbeddedBins | Pairs):
            part.eval().train = lambda *_, own=part: own  # type: ignore[method-assign]
    return blocks


def sparse_clicks(experiment: Experiment) -> Way:
    """Return DLRM over one sparse nn.Embedding with the rows of all columns."""
    model = _built(experiment)
    region, table = _by_torch(model.region.module), model.table
    embedding = nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False, sparse=True)

    def losses(batch: Batch) -> Mapping[str, Tensor]:
        loss_B, _ = region(embedding(batch["ids_BF"] + model.starts_F), batch["dense_BN"], batch["labels_B"])
        return {"loss": loss_B, "weight": torch.ones_like(loss_B)}

    return Way(losses, region, _stock(experiment, embedding))


def plain_text(experiment: Experiment) -> Way:
    """Return the language model as PyTorch's tutorials write one: nn.Embedding, nn.LSTM, nn.Linear."""
    o: Any = experiment.config.model
    model = _built(experiment)
    num_words = experiment.data.info["num_words"]
    words = nn.Embedding.from_pretrained(model.words.weight.detach().clone(), freeze=False, sparse=True)
    between = o.dropout if o.layers > 1 else 0.0  # torch warns of one where there is nothing between
    network = nn.LSTM(o.dim, o.hidden, o.layers, batch_first=True, dropout=between)
    blocks = nn.ModuleDict({"network": network, "output": nn.Linear(o.hidden, num_words)})
    # The recipe's start weights, so that the losses of all ways can be compared.
    start = model.region.module.state_dict()  # in the same order, with other names
    blocks.load_state_dict(dict(zip(blocks.state_dict(), start.values(), strict=True)))

    def losses(batch: Batch) -> Mapping[str, Tensor]:
        hidden_BTH, _ = network(F.dropout(words(batch["ids_BT"]), o.dropout))
        logits_BTV = blocks["output"](F.dropout(hidden_BTH, o.dropout))
        targets_BT = batch["targets_BT"]
        loss = F.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return {"loss": loss, "weight": (targets_BT != IGNORED).sum()}

    return Way(losses, blocks, _stock(experiment, words))


CLICKS: dict[str, Make] = {"sparse nn.Embedding": sparse_clicks}
TEXTS: dict[str, Make] = {"nn.Embedding, nn.LSTM, nn.Linear": plain_text}
