"""Knowledge-graph embeddings: which entity completes (head, relation, ?) and (?, relation, tail).

DistMult (Yang et al. 2015), ComplEx (Trouillon et al. 2016), RotatE (Sun et al. 2019) and TransE (Bordes et
al. 2013), trained as Lacroix et al. 2018 do: a relation has a row for each direction, and the answer competes
with negatives in a softmax, which the whole batch shares.

Letters: B triples, 2 directions (tail asked, head asked), X both directions of all triples (2 B), Q queries,
K negatives, D width of a row, M known answers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbedding, rank_rows
from dphybrid.embedding.ranking import dot_products
from dphybrid.parallel import DataParallel, Parts, Whole
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.kge import KgeModelConfig
from dphybrid.util.errors import UserError


def _complex_product(entity_BD: Tensor, relation_BD: Tensor) -> Tensor:
    """Return the query of ComplEx: rows are complex numbers, real parts first. The query's dot product with t
    is Re(h r conj(t))."""
    (a, b), (c, d) = entity_BD.chunk(2, -1), relation_BD.chunk(2, -1)
    return torch.cat([a * c - b * d, a * d + b * c], -1)


def _rotation(entity_BD: Tensor, relation_BD: Tensor) -> Tensor:
    """Return the query of RotatE: each complex number of the entity, turned by the relation's angle."""
    size = _moduli(relation_BD).clamp(min=1e-12)
    return _complex_product(entity_BD, relation_BD / torch.cat([size, size], -1))


def _moduli(rows: Tensor) -> Tensor:
    """Return the moduli (..., D / 2) of rows (..., D) of complex numbers, with a gradient of zero at zero."""
    real, imaginary = rows.chunk(2, -1)
    return (real.square() + imaginary.square()).clamp(min=1e-24).sqrt()


_STD = 1e-3
"""Standard deviation of initial values. Larger ones would partly remain after training, as noise."""
_Query = Callable[[Tensor, Tensor], Tensor]
_QUERIES: dict[str, _Query] = {
    "distmult": torch.mul,
    "complex": _complex_product,
    "rotate": _rotation,
    "transe": torch.add,
}
"""Kind -> function (entity, relation) -> query (..., D), to be scored against other entities."""


def _distances(query_QD: Tensor, others_KD: Tensor) -> Tensor:
    """Return RotatE's scores (..., Q, K): minus the sum of the moduli of the differences."""
    return -_moduli(query_QD.unsqueeze(-2) - others_KD.unsqueeze(-3)).sum(-1)


def _city_block_distances(query_QD: Tensor, others_KD: Tensor) -> Tensor:
    """Return TransE's scores (..., Q, K): minus the sum of the absolute differences."""
    return -(query_QD.unsqueeze(-2) - others_KD.unsqueeze(-3)).abs().sum(-1)


_SCORES = {"rotate": _distances, "transe": _city_block_distances}
"""Kind -> function (queries (..., Q, D), entities (..., K, D)) -> scores (..., Q, K). Other kinds use dot
products."""


class _TripleRegion(nn.Module):
    """The relations' rows, scores and loss.

    (heads_BD, relations_B, tails_BD) -> query_B2D, a query for each direction. With the other arguments ->
    loss_B: each answer competes with the entities others_KD, the answer itself left out. asked: numbers of
    heads and tails. ids_K: numbers of the others.

    penalty: weight of the cubed moduli. A buffer, because it depends on the training triples and so belongs
    to the checkpoint.
    """

    penalty: Tensor

    def __init__(self, kind: str, dim: int, num_entities: int, num_relations: int, penalty: float) -> None:
        super().__init__()
        self.kind, self.num_entities, self.num_relations = kind, num_entities, num_relations
        self._penalized = penalty > 0
        self.register_buffer("penalty", torch.tensor(penalty))
        self.relations = nn.Embedding(2 * num_relations, dim)
        nn.init.normal_(self.relations.weight, std=_STD)

    def forward(
        self,
        heads_BD: Tensor,
        relations_B: Tensor,
        tails_BD: Tensor,
        asked: tuple[Tensor, Tensor] | None = None,
        *,
        others_KD: Tensor | None = None,
        ids_K: Tensor | None = None,
    ) -> Tensor:
        # Each relation has two rows: the first half of the table is for asking tails, the second for heads.
        relations_B2D = self.relations(torch.stack([relations_B, relations_B + self.num_relations], 1))
        query_B2D = _QUERIES[self.kind](torch.stack([heads_BD, tails_BD], 1), relations_B2D)
        if asked is None or others_KD is None or ids_K is None:
            return query_B2D
        score = _SCORES.get(self.kind, dot_products)
        answers_X1D = torch.stack([tails_BD, heads_BD], 1).flatten(0, 1).unsqueeze(1)
        scores_B2 = score(query_B2D.flatten(0, 1).unsqueeze(1), answers_X1D).view(-1, 2)
        # Compared on the device, so that one number per answer is copied there, not a mask of K.
        excluded_B2K = torch.stack([asked[1], asked[0]], 1).unsqueeze(2) == ids_K
        others_B2K = score(query_B2D, others_KD).masked_fill(excluded_B2K, -math.inf)
        # The K negatives stand for all entities except the answer.
        weight = math.log(max(1, self.num_entities - 1) / len(others_KD))
        loss_B = (torch.logaddexp(scores_B2, others_B2K.logsumexp(-1) + weight) - scores_B2).sum(1)
        if self._penalized and self.training:
            rows_BD = _moduli(heads_BD) ** 3 + _moduli(tails_BD) ** 3 + (_moduli(relations_B2D) ** 3).sum(1)
            # N3 penalizes the rows of the batch's triples, not the whole tables.
            loss_B = loss_B + self.penalty * rows_BD.sum(1)
        return loss_B


class TripleModel(nn.Module):
    """Trains against shared negatives. In evaluation it ranks each answer among all entities without the
    other known answers ("filtered")."""

    whole = ("negatives_K",)

    def __init__(self, entities: HostEmbedding, region: DataParallel, kind: str) -> None:
        super().__init__()
        self.entities, self.region, self.kind = entities, region, kind

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return the ids that `forward` looks up in training, so that their rows can be prefetched."""
        return {"entities": [batch["heads_B"], batch["tails_B"], batch["negatives_K"]]}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        heads_BD, tails_BD = (self.region.rows(self.entities, batch[name]) for name in ("heads_B", "tails_B"))
        triple = (heads_BD, batch["relations_B"], tails_BD)
        if "negatives_K" not in batch:
            return self._rank(batch, triple)
        ids_K = batch["negatives_K"]
        # Each device fetches a share of the others' rows, and every device gets all of them.
        others_KD, numbers_K = Whole(self.region.rows(self.entities, ids_K)), Whole(ids_K)
        asked = batch["heads_B"], batch["tails_B"]
        loss_B = self.region(*triple, asked, others_KD=others_KD, ids_K=numbers_K)
        # Each triple has two answers.
        return {"loss": loss_B, "weight": torch.full_like(loss_B, 2.0)}

    def _rank(
        self, batch: dict[str, Tensor], triple: tuple[Tensor | Parts, Tensor, Tensor | Parts]
    ) -> dict[str, Tensor]:
        """Return ranks_B2 of the answers among all entities without the other known answers."""
        ranked = rank_rows(
            self.region(*triple).flatten(0, 1),
            self.entities,
            torch.stack([batch["tails_B"], batch["heads_B"]], 1).flatten(),
            hidden_QS=batch["known_B2M"].flatten(0, 1),
            score=_SCORES.get(self.kind, dot_products),
            numbers_a_score=self.entities.dim if self.kind in _SCORES else 1,
        )
        loss_B = ranked.loss_Q.view(-1, 2).sum(1)
        weight_B = torch.full_like(loss_B, 2.0)
        return {"loss": loss_B, "weight": weight_B, "ranks_B2": ranked.ranks_Q.view(-1, 2)}


def build_kge(context: ModelContext[KgeModelConfig]) -> TripleModel:
    o, info = context.options, context.info
    if o.kind in ("complex", "rotate") and o.dim % 2:
        raise UserError(f"model.dim={o.dim}: {o.kind} reads a row as complex numbers; give an even number")
    num_entities, rows = int(info["num_entities"]), context.rows
    density = len(rows) / num_entities if rows is not None else 1.0  # else the checkpoint has the penalty
    penalty = o.penalty / math.sqrt(density)
    region = _TripleRegion(o.kind, o.dim, num_entities, int(info["num_relations"]), penalty)
    entities = context.table(num_entities, o.dim, name="entities", std=_STD)
    blocks = DataParallel(region, context.devices)
    return TripleModel(entities, blocks, o.kind)
