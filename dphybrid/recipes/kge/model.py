"""Knowledge-graph embeddings: which entity completes (head, relation, ?) and (?, relation, tail).

DistMult (Yang et al. 2015), ComplEx (Trouillon et al. 2016) and RotatE (Sun et al. 2019), each trained as by
Lacroix et al. 2018: a relation has a row for each direction, and the answer competes in a softmax; here
against negatives that the whole batch shares, or, as there, against all entities.
Letters: B triples, 2 directions (tail asked, head asked), K other entities, D width of a row, M known
answers, V entities.
"""

import math

import torch
from torch import Tensor, nn

from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import DataParallel, Parts
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.kge.config import KgeModelConfig
from dphybrid.recipes.softmax import linear_cross_entropy
from dphybrid.util.errors import UserError

DISTANCES = 2**24
"""Differences of single numbers that RotatE computes at a time when it ranks."""
TIE = 1e-6
"""Scores closer than this share are equal: their sums were taken in another order, perhaps."""
PRODUCTS = 2**23
"""Scores that the others compute at a time when they rank."""


def distmult(entity_BD: Tensor, relation_BD: Tensor) -> Tensor:
    """The query of DistMult; its dot product with an entity is the score."""
    return entity_BD * relation_BD


def complex_product(entity_BD: Tensor, relation_BD: Tensor) -> Tensor:
    """The query of ComplEx: rows are complex numbers, real parts first. Its dot product with t is Re(h r
    conj(t))."""
    (a, b), (c, d) = entity_BD.chunk(2, -1), relation_BD.chunk(2, -1)
    return torch.cat([a * c - b * d, a * d + b * c], -1)


def rotation(entity_BD: Tensor, relation_BD: Tensor) -> Tensor:
    """The query of RotatE: each complex number turned by the relation's angle."""
    size = moduli(relation_BD).clamp(min=1e-12)
    return complex_product(entity_BD, relation_BD / torch.cat([size, size], -1))


def moduli(rows: Tensor) -> Tensor:
    """Return the moduli (..., D / 2) of rows (..., D) of complex numbers, with a gradient of zero at zero."""
    real, imaginary = rows.chunk(2, -1)
    return (real.square() + imaginary.square()).clamp(min=1e-24).sqrt()


QUERIES = {"distmult": distmult, "complex": complex_product, "rotate": rotation}


class TripleRegion(nn.Module):
    """Relations, scores and loss; the fourth argument says what is asked.

    (heads_BD, relations_B, tails_BD, (heads_B, tails_B), others_KD, num_entities, ids_K) -> loss_B: each
    answer competes with the others, itself left out. Without ids_K the others are all entities, by number.
    (heads_BD, relations_B, tails_BD, excluded_B2K, others_KD) -> scores_B2 of the answers, and over the
    others that are not excluded: logsumexp_B2, above_B2 and equal_B2, how many score more than the answer and
    how many the same.
    """

    def __init__(self, kind: str, dim: int, num_relations: int, penalty: float) -> None:
        super().__init__()
        self.kind, self.num_relations, self.penalty = kind, num_relations, penalty
        self.relations = nn.Embedding(2 * num_relations, dim)

    def scores(self, query_QD: Tensor, others_KD: Tensor) -> Tensor:
        """Return the scores (..., Q, K) of entities (..., K, D) for queries (..., Q, D)."""
        if self.kind == "rotate":
            return -moduli(query_QD.unsqueeze(-2) - others_KD.unsqueeze(-3)).sum(-1)
        return query_QD @ others_KD.transpose(-1, -2)

    def forward(
        self,
        heads_BD: Tensor,
        relations_B: Tensor,
        tails_BD: Tensor,
        asked: Tensor | tuple[Tensor, Tensor],
        *,
        others_KD: Tensor,
        num_entities: int = 0,
        ids_K: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
        relations_B2D = self.relations(torch.stack([relations_B, relations_B + self.num_relations], 1))
        query_B2D = QUERIES[self.kind](torch.stack([heads_BD, tails_BD], 1), relations_B2D)
        if isinstance(asked, tuple):
            answers_B2 = torch.stack([asked[1], asked[0]], 1)
            if ids_K is None:
                loss_X = linear_cross_entropy(query_B2D.flatten(0, 1), others_KD, answers_B2.flatten())
                loss_B = loss_X.view(-1, 2).sum(1)
            else:
                # A number an answer travels to the device instead of one for each of the others.
                excluded_B2K = answers_B2.unsqueeze(2) == ids_K
                scores_B2, _, logsumexp_B2 = self._compete(
                    heads_BD, tails_BD, query_B2D, excluded_B2K, others_KD
                )
                # K others stand for all entities but the answer.
                weight = math.log(max(1, num_entities - 1) / len(others_KD))
                loss_B = (torch.logaddexp(scores_B2, logsumexp_B2 + weight) - scores_B2).sum(1)
            if self.penalty and self.training:
                rows_BD = moduli(heads_BD) ** 3 + moduli(tails_BD) ** 3 + (moduli(relations_B2D) ** 3).sum(1)
                loss_B = loss_B + self.penalty * rows_BD.sum(1)
            return loss_B
        scores_B2, others_B2K, logsumexp_B2 = self._compete(heads_BD, tails_BD, query_B2D, asked, others_KD)
        lead_B2K = others_B2K - scores_B2.unsqueeze(2)
        close_B21 = (TIE * (1 + scores_B2.abs())).unsqueeze(2)
        above_B2, equal_B2 = (lead_B2K > close_B21).sum(2), (lead_B2K.abs() <= close_B21).sum(2)
        return scores_B2, logsumexp_B2, above_B2, equal_B2

    def _compete(
        self, heads_BD: Tensor, tails_BD: Tensor, query_B2D: Tensor, excluded_B2K: Tensor, others_KD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the answers' scores_B2, the others' scores_B2K, -inf where excluded, and their
        logsumexp_B2."""
        answers_B2D = torch.stack([tails_BD, heads_BD], 1)
        scores_B2 = self.scores(
            query_B2D.flatten(0, 1).unsqueeze(1), answers_B2D.flatten(0, 1).unsqueeze(1)
        ).view(-1, 2)
        others_B2K = self.scores(query_B2D, others_KD).masked_fill(excluded_B2K, -math.inf)
        return scores_B2, others_B2K, others_B2K.logsumexp(-1)


class TripleModel(nn.Module):
    """Trains against shared negatives; in evaluation ranks each answer among all entities, known other
    answers left out ("filtered")."""

    def __init__(
        self, entities: HostEmbedding, region: DataParallel, kind: str, one_vs_all: bool = False
    ) -> None:
        super().__init__()
        self.entities = entities
        self.region = region
        self.kind, self.one_vs_all = kind, one_vs_all

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """The ids that `forward` will look up in training, so that their rows can be fetched ahead."""
        return {"entities": [batch["heads_B"], batch["tails_B"], batch["negatives_K"]]}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        heads_BD, tails_BD = (self.region.rows(self.entities, batch[name]) for name in ("heads_B", "tails_B"))
        triple = (heads_BD, batch["relations_B"], tails_BD)
        if "negatives_K" not in batch:
            return self._rank(batch, triple)
        ids_K = batch["negatives_K"]
        # RotatE's scores are distances, no products: there the answers are left out of all entities, too.
        in_order = self.one_vs_all and self.kind != "rotate"
        loss_B = self.region(
            *triple,
            (batch["heads_B"], batch["tails_B"]),
            # Each device fetches its share of the rows, and all get all of them from the first one.
            others_KD=self.region.rows(self.entities, ids_K),
            # Of all entities the answer itself is left out, so one more stands for as many others.
            num_entities=self.entities.num_rows + self.one_vs_all,
            ids_K=None if in_order else ids_K,
        )
        return {"loss": loss_B, "weight": torch.full_like(loss_B, 2.0)}

    def _rank(
        self, batch: dict[str, Tensor], triple: tuple[Tensor | Parts, Tensor, Tensor | Parts]
    ) -> dict[str, Tensor]:
        """Return ranks_B2 from 1 on; equal scores share the mean of their ranks."""
        num_entities, known_B2M = self.entities.num_rows, batch["known_B2M"]
        per_entity = 2 * len(known_B2M) * (self.entities.dim if self.kind == "rotate" else 1)
        step = max(1, (DISTANCES if self.kind == "rotate" else PRODUCTS) // per_entity)
        total_B2, ranks_B2, scores_B2 = None, torch.ones(()), torch.zeros(())
        for start in range(0, num_entities, step):
            ids_K = torch.arange(start, min(start + step, num_entities))
            place_B2M = (known_B2M - start).where((known_B2M >= start) & (known_B2M <= ids_K[-1]), len(ids_K))
            excluded_B2K = torch.zeros(*known_B2M.shape[:2], len(ids_K) + 1, dtype=torch.bool)
            excluded_B2K = excluded_B2K.scatter_(2, place_B2M, True)[:, :, : len(ids_K)]
            scores_B2, part_B2, above_B2, equal_B2 = self.region(
                *triple, excluded_B2K, others_KD=self.entities(ids_K)
            )
            total_B2 = part_B2 if total_B2 is None else torch.logaddexp(total_B2, part_B2)
            ranks_B2 = ranks_B2.to(above_B2.device) + above_B2 + equal_B2 / 2
        assert total_B2 is not None
        loss_B = (torch.logaddexp(scores_B2, total_B2) - scores_B2).sum(1)
        return {"loss": loss_B, "weight": torch.full_like(loss_B, 2.0), "ranks_B2": ranks_B2}


def build_kge(context: ModelContext[KgeModelConfig]) -> TripleModel:
    o, info = context.options, context.info
    if o.kind != "distmult" and o.dim % 2:
        raise UserError(f"model.dim={o.dim}: {o.kind} reads a row as complex numbers; give an even number")
    region = TripleRegion(o.kind, o.dim, int(info["num_relations"]), o.penalty)
    entities = context.table(int(info["num_entities"]), o.dim, name="entities")
    blocks = DataParallel(region, context.devices, whole=("others_KD", "ids_K"))
    return TripleModel(entities, blocks, o.kind, one_vs_all=info.get("num_negatives") == 0)
