"""Language model: the tokens' table in host memory, network and loss in one data-parallel region.

Letters: B samples, T tokens of a sample, D width of a row, H width of the network, V words.
"""

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbedding
from dphybrid.embedding.ngrams import NgramMemory
from dphybrid.embedding.softmax import IGNORED, linear_cross_entropy
from dphybrid.parallel import DataParallel
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.text import TextModelConfig
from dphybrid.recipes.text.decoder import Decoder
from dphybrid.util.errors import UserError


class Recurrent(nn.Module):
    """LSTM or GRU over rows_BTD. Every sample starts from a zero state, so samples are independent and any
    split over devices gives the same result.

    One module per layer with dropout between them, not one nn.LSTM of several layers: there, cuDNN would draw
    the dropout from its own random state, which no checkpoint holds. State dicts have the names of an nn.LSTM
    of several layers, and without dropout the results equal its results.
    """

    def __init__(self, kind: str, dim: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        network = {"lstm": nn.LSTM, "gru": nn.GRU}[kind]
        widths = [dim] + [hidden] * (layers - 1)
        self.network = nn.ModuleList(network(width, hidden, batch_first=True) for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.register_state_dict_post_hook(_with_layered_names)
        self.register_load_state_dict_pre_hook(_with_own_names)

    def forward(self, rows_BTD: Tensor) -> Tensor:
        hidden_BTH = rows_BTD
        for number, layer in enumerate(cast(Iterable[nn.RNNBase], self.network)):
            if number:
                hidden_BTH = self.dropout(hidden_BTH)
            if vars(layer).get("_is_replica"):
                # The weights of a replica are views of one broadcast buffer; cuDNN needs them contiguous.
                layer.flatten_parameters()
            hidden_BTH, _ = layer(hidden_BTH)
        return hidden_BTH


def _with_layered_names(_module: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
    """`network.1.bias_hh_l0` -> `network.bias_hh_l1`, in place and in order."""
    start = f"{prefix}network."
    for key in [key for key in state if key.startswith(start)]:
        layer, _, name = key.removeprefix(start).partition(".")
        state[f"{start}{name.removesuffix('_l0')}_l{layer}"] = state.pop(key)


def _with_own_names(_module: nn.Module, state: dict[str, object], prefix: str, *_rest: object) -> None:
    """`network.bias_hh_l1` -> `network.1.bias_hh_l0`: the reverse of `_with_layered_names`."""
    start = f"{prefix}network."
    for key in [key for key in state if key.startswith(start)]:
        name, _, layer = key.removeprefix(start).rpartition("_l")
        state[f"{start}{layer}.{name}_l0"] = state.pop(key)


class _CausalTransformer(nn.Module):
    """Pre-norm transformer encoder with a causal mask and sinusoidal positions (Vaswani et al. 2017)."""

    def __init__(self, dim: int, hidden: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, dropout, batch_first=True, norm_first=True
        )
        # Nested tensors do not work with norm_first; without this argument torch warns about it.
        norm = nn.LayerNorm(hidden)
        self.network = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)

    def forward(self, rows_BTD: Tensor) -> Tensor:
        hidden_BTH = self.enter(rows_BTD)
        steps, hidden = hidden_BTH.shape[1:]
        hidden_BTH = hidden_BTH + _positions(steps, hidden, hidden_BTH.device).to(hidden_BTH)
        mask_TT = torch.ones(steps, steps, dtype=torch.bool, device=rows_BTD.device).triu(1)
        return self.network(hidden_BTH, mask=mask_TT)


def _positions(steps: int, hidden: int, device: torch.device | None = None) -> Tensor:
    """Return sinusoidal positions (steps, hidden), made on `device`."""
    half = (hidden + 1) // 2
    # The logarithm as float32: existing checkpoints were trained with these positions; more digits would
    # change them.
    log = torch.log(torch.tensor(10000.0)).item()
    rate_H = torch.exp(torch.arange(half, device=device) * (-log / half))
    angle_TH = torch.arange(steps, device=device)[:, None] * rate_H
    return torch.cat([angle_TH.sin(), angle_TH.cos()], dim=1)[:, :hidden]


class _FullSoftmax(nn.Module):
    """(hidden_BTH, targets_BT) -> loss_BT of a softmax over all words; 0 where there is no target."""

    def __init__(self, hidden: int, num_words: int) -> None:
        super().__init__()
        self.layer = nn.Linear(hidden, num_words)
        nn.init.uniform_(self.layer.weight, -0.1, 0.1)
        nn.init.zeros_(self.layer.bias)

    def forward(self, hidden_BTH: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_XH, layer = hidden_BTH.flatten(0, 1), self.layer
        loss_X = linear_cross_entropy(hidden_XH, layer.weight, targets_BT.flatten(), layer.bias)
        return loss_X.view_as(targets_BT)

    def log_probabilities(self, hidden_BH: Tensor) -> Tensor:
        """Return log-probabilities (B, V)."""
        return torch.log_softmax(self.layer(hidden_BH), -1)


class AdaptiveSoftmax(nn.Module):
    """(hidden_BTH, targets_BT) -> loss_BT of an adaptive softmax (Grave et al. 2017): words are sorted by
    frequency, and narrow layers score the clusters of rare words, so that the cost hardly grows with the
    vocabulary. The losses are exact, not sampled: cluster first, then the word in it."""

    def __init__(self, hidden: int, num_words: int) -> None:
        super().__init__()
        cutoffs = sorted({cut for cut in (num_words // 20, num_words // 5) if 0 < cut < num_words})
        if not cutoffs:
            raise UserError(f"model.output=adaptive: {num_words} words are too few; use model.output=full")
        # Each further cluster has a quarter of the width of the one before it.
        if hidden < 16:
            raise UserError(
                f"model.output=adaptive: the rarest words get a layer of a 16th of model.hidden={hidden}; "
                "use 16 or more"
            )
        self.layer = nn.AdaptiveLogSoftmaxWithLoss(hidden, num_words, cutoffs)

    def forward(self, hidden_BTH: Tensor, targets_BT: Tensor) -> Tensor:
        # torch's layer cannot skip targets: it scores word 0 there, and `where` drops the result.
        known_BT = targets_BT != IGNORED
        score_X = self.layer(hidden_BTH.flatten(0, 1), targets_BT.clamp(min=0).flatten()).output
        return torch.where(known_BT, -score_X.view_as(targets_BT), 0.0)

    def log_probabilities(self, hidden_BH: Tensor) -> Tensor:
        """Return log-probabilities (B, V)."""
        return self.layer.log_prob(hidden_BH)


class _LanguageRegion(nn.Module):
    """Network, output layer and loss: (rows_BTD, tokens_BT, targets_BT) -> (loss_B, weight_B). As the region
    includes the loss, only two numbers per sample leave a device."""

    def __init__(self, network: nn.Module, output: nn.Module, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.network = network
        self.output = output

    def hidden(self, rows_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return the last layer's hidden_BTH."""
        rows_BTD = self.dropout(rows_BTD)
        # Only the decoder has a memory, which needs the tokens themselves.
        given = (rows_BTD, tokens_BT) if isinstance(self.network, Decoder) else (rows_BTD,)
        return self.dropout(self.network(*given))

    def forward(self, rows_BTD: Tensor, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        loss_BT = self.output(self.hidden(rows_BTD, tokens_BT), targets_BT)
        return loss_BT.sum(1), (targets_BT != IGNORED).sum(1).to(loss_BT.dtype)


class _TextModel(nn.Module):
    """Looks words up on the CPU and passes the rows to the region."""

    def __init__(self, words: HostEmbedding, region: DataParallel) -> None:
        super().__init__()
        self.words = words
        self.region = region

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that `forward` looks up, so that their rows can be prefetched."""
        ids = {"words": batch["ids_BT"]}
        network = self.region.module.network
        if isinstance(network, Decoder) and network.memory is not None:
            ids["region.module.network.memory.table"] = network.memory.row_ids(batch["ids_BT"])
        return ids

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows_BTD = self.region.rows(self.words, batch["ids_BT"])
        loss_B, weight_B = self.region(rows_BTD, batch["ids_BT"], batch["targets_BT"])
        return {"loss": loss_B, "weight": weight_B}

    def next_token(self, tokens_BT: Tensor) -> Tensor:
        """Return the log-probabilities (B, V) of the token after tokens_BT."""
        module, home = self.region.module, self.region.devices.home
        hidden_BTH = module.hidden(self.words(tokens_BT).to(home), tokens_BT.to(home))
        return module.output.log_probabilities(hidden_BTH[:, -1])


def build_text(context: ModelContext[TextModelConfig]) -> _TextModel:
    o, num_words = context.options, int(context.info["num_words"])
    network: nn.Module
    if o.kind == "decoder":
        network = Decoder(o.dim, o.hidden, o.layers, o.heads, o.dropout, _memory(context))
    elif o.kind == "transformer":
        network = _CausalTransformer(o.dim, o.hidden, o.layers, o.heads, o.dropout)
    else:
        network = Recurrent(o.kind, o.dim, o.hidden, o.layers, o.dropout)
    output = (AdaptiveSoftmax if o.output == "adaptive" else _FullSoftmax)(o.hidden, num_words)
    region = _LanguageRegion(network, output, o.dropout)
    words = context.table(num_words, o.dim, name="words")
    return _TextModel(words, DataParallel(region, context.devices))


def _memory(context: ModelContext[TextModelConfig]) -> NgramMemory | None:
    o = context.options
    if not o.memory:
        return None
    make = partial(context.table, name="memory")
    return NgramMemory(o.hidden, o.memory, separator=int(context.info["end"]), make=make)
