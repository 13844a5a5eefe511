"""Language model: the tokens' table in host memory, network and loss in one data-parallel region.

Letters: B samples, T tokens of a sample, D width of a row, H width of the network, V words.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
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
from dphybrid.recipes.text.tokens import read_tokens
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError


class Lstm(nn.Module):
    """LSTM over rows_BTD. Every sample starts from a zero state, so samples are independent and any split
    over devices gives the same result.

    One module per layer with dropout between them, not one nn.LSTM of several layers: there, cuDNN would draw
    the dropout from its own random state, which no checkpoint holds. Without dropout the results equal.
    """

    def __init__(self, dim: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        widths = [dim] + [hidden] * (layers - 1)
        self.network = nn.ModuleList(nn.LSTM(width, hidden, batch_first=True) for width in widths)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_BTD: Tensor) -> Tensor:
        hidden_BTH = rows_BTD
        for number, layer in enumerate(cast(Iterable[nn.LSTM], self.network)):
            if number:
                hidden_BTH = self.dropout(hidden_BTH)
            if vars(layer).get("_is_replica"):
                # The weights of a replica are views of one broadcast buffer; cuDNN needs them contiguous.
                layer.flatten_parameters()
            hidden_BTH, _ = layer(hidden_BTH)
        return hidden_BTH


class _Softmax(nn.Module):
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

    @torch.inference_mode()
    def continued(
        self, checkpoint: Path, prompt: str, length: int, temperature: float, seed: int
    ) -> Iterator[str]:
        """Yield the text that follows `prompt`, in pieces, of at most `length` tokens. Ends early where the
        model ends a document. checkpoint: this model's. temperature: 0 for the likeliest token each time.
        Raises UserError for a prompt without tokens."""
        info, generator = read_state(checkpoint).info, torch.Generator().manual_seed(seed)
        tokens = read_tokens(checkpoint, int(info["num_words"]))
        ids = tokens.encode([prompt])[0]
        if not ids:
            raise UserError(f"--prompt {prompt!r}: has no words; give the beginning of a text")
        module, home = self.region.module, self.region.devices.home
        # The text of a token can depend on the one before: a character may be several tokens.
        known = tokens.decode(ids)
        for _ in range(length):
            tokens_BT = torch.tensor([ids[-int(info["window"]) :]])
            hidden_BTH = module.hidden(self.words(tokens_BT).to(home), tokens_BT.to(home))
            scores_V = module.output.layer(hidden_BTH[0, -1]).float().cpu()
            if temperature:
                chosen = torch.multinomial((scores_V / temperature).softmax(0), 1, generator=generator)
            else:
                chosen = scores_V.argmax()
            if int(chosen) == tokens.end:
                return
            ids.append(int(chosen))
            text = tokens.decode(ids)
            if not text.endswith("\ufffd"):  # the first bytes of a character
                yield text[len(known) :]
                known = text


def build_text(context: ModelContext[TextModelConfig]) -> _TextModel:
    o, num_words = context.options, int(context.info["num_words"])
    network: nn.Module
    if o.kind == "decoder":
        memory = None
        if o.memory:
            separator = int(context.info["end"])
            memory = NgramMemory(o.hidden, o.memory, separator=separator, make=context.table)
        network = Decoder(o.dim, o.hidden, o.layers, o.heads, o.dropout, memory)
    else:
        network = Lstm(o.dim, o.hidden, o.layers, o.dropout)
    region = _LanguageRegion(network, _Softmax(o.hidden, num_words), o.dropout)
    words = context.table(num_words, o.dim, name="words")
    return _TextModel(words, DataParallel(region, context.devices))
