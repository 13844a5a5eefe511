"""Reads triples (head, relation, tail): a folder with train, valid and perhaps test files, or one file of
which a part is held out.

The entities and relations of all splits get numbers, also those that only valid or test has: published
results rank an answer among all entities.
Letters: B triples, 3 columns (head, relation, tail), Q questions (two per triple), X questions of all
triples, K negatives, M known answers of a question.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import Array, ArrayDataset, Dataset, Draw, DrawnDataset, Draws, lists_of
from dphybrid.data.store import Content, Prepared, Progress, Source
from dphybrid.data.table.rows import SHOWN, Rejected, check_rejected
from dphybrid.recipes.kge import KgeDataConfig, files_of
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path

_PARTS, _COLUMNS = ("train", "valid", "test"), ("heads_B", "relations_B", "tails_B")
_HEADERS = ("head relation tail", "subject predicate object", "source relation target", "h r t")


def _negatives(num_entities: int, num_negatives: int) -> Draw:
    """Return the draw of the negatives that a batch shares; num_negatives 0: all entities."""

    def draw(_: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        if not num_negatives:
            return {"negatives_K": torch.arange(num_entities)}
        return {"negatives_K": torch.from_numpy(draws.of_batch().integers(0, num_entities, num_negatives))}

    return draw


def _questions(triples_B3: Array, num_entities: int, num_relations: int) -> Array:
    """Return (B, 2): for each triple a number that identifies the question (head, relation, ?), and one that
    identifies (?, relation, tail)."""
    heads_B, relations_B, tails_B = triples_B3.T
    forth_B = relations_B * num_entities + heads_B
    return np.stack([forth_B, (relations_B + num_relations) * num_entities + tails_B], axis=1)


def _known_answers(triples_B3: Array, num_entities: int, num_relations: int) -> dict[str, Array]:
    """Return all known answers of each question, from all splits. The answers of the question keys[q] are
    answers[starts[q] : starts[q + 1]]; keys are sorted."""
    # order="F": the forward questions of all triples, then the backward ones, in the order of their answers.
    asked_X = _questions(triples_B3, num_entities, num_relations).ravel(order="F")
    answers_X = triples_B3[:, [2, 0]].ravel(order="F")
    pairs = np.unique(np.stack([asked_X, answers_X], axis=1), axis=0)
    keys, starts = np.unique(pairs[:, 0], return_index=True)
    answers = np.ascontiguousarray(pairs[:, 1])
    return {"keys": keys, "starts": np.append(starts, len(pairs)), "answers": answers}


def part_of(prepared: Prepared, name: str) -> Dataset:
    """Return a split of prepared triples: "train" with negatives, the others with the known answers, which
    the ranking leaves out."""
    arrays, info = prepared.arrays, prepared.info
    triples_B3 = arrays[f"{name}_triples"]
    rows = ArrayDataset(dict(zip(_COLUMNS, triples_B3.T, strict=True)), np.arange(len(triples_B3)))
    if name == "train":
        return DrawnDataset(rows, _negatives(info["num_entities"], info["num_negatives"]))

    def known(batch: dict[str, Tensor], _: object) -> dict[str, Tensor]:
        """Return known_B2M, the known answers of each question, padded with -1."""
        triples = np.stack([batch[column].numpy() for column in _COLUMNS], axis=1)
        asked_B2 = _questions(triples, info["num_entities"], info["num_relations"])
        places_Q = np.searchsorted(arrays["keys"], asked_B2).ravel()
        lists_QM = lists_of(arrays["starts"], arrays["answers"], places_Q, none=-1)
        return {"known_B2M": lists_QM.view(*asked_B2.shape, -1)}

    return DrawnDataset(rows, known)


@dataclass(frozen=True)
class _TripleSource(Source):
    """Source of triples. parts: the file of each split; without one for "valid", a share of "train" is held
    out."""

    data: KgeDataConfig
    seed: int
    parts: dict[str, Path]

    @property
    def options(self) -> dict[str, object]:
        return self.data.model_dump(mode="json", exclude={"path"}) | {"parts": list(self.parts)}

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.parts.values())

    def read(self, progress: Progress, scratch: Path) -> Content:
        entities: dict[str, int] = {}
        relations: dict[str, int] = {}
        rejected: list[Rejected] = []
        parts: dict[str, Array] = {}
        for done, (part, file) in enumerate(self.parts.items()):
            progress("read triples", done, len(self.parts))
            numbers = [
                (
                    entities.setdefault(head, len(entities)),
                    relations.setdefault(relation, len(relations)),
                    entities.setdefault(tail, len(entities)),
                )
                for head, relation, tail in self._triples(file, rejected)
            ]
            parts[part] = np.array(numbers, dtype=np.int64).reshape(-1, 3)
        num_rows = sum(map(len, parts.values()))
        check_rejected(str(self.data.path), rejected, num_rows + len(rejected), self.data.max_rejected)
        if "valid" not in parts:
            # At least one triple is held out, and at least one stays for training.
            order = np.random.default_rng(self.seed).permutation(num_rows)
            held = min(max(1, round(num_rows * self.data.valid_fraction)), num_rows - 1)
            valid, train = (parts["train"][np.sort(rows)] for rows in (order[:held], order[held:]))
            parts = {"train": train, "valid": valid}
        if empty := [part for part, triples in parts.items() if not len(triples)]:
            raise UserError(
                f"data.path={self.data.path}: the {empty[0]} split has no triples; give a file with some"
            )
        # Entities that training lacks keep their start values. They are evaluated all the same, as in
        # published results, and the printed lines count them.
        seen = np.zeros(len(entities), dtype=bool)
        seen[parts["train"][:, [0, 2]]] = True
        lines = [f"  triples from {self.data.path}: {len(entities):,} entities, {len(relations):,} relations"]
        for part, triples in parts.items():
            known = (
                f", {(~seen[triples[:, [0, 2]]]).any(1).sum():,} of them with an entity that train lacks"
                if part != "train"
                else f", {len(triples) / len(entities):.3g} per entity"
            )
            lines.append(f"  {part}: {len(triples):,} triples{known}")
        info = {
            "num_entities": len(entities),
            "num_relations": len(relations),
            "num_negatives": self.data.negatives,
        }
        arrays = {f"{part}_triples": triples for part, triples in parts.items()}
        arrays |= _known_answers(np.concatenate(list(parts.values())), len(entities), len(relations))
        extra = {"entities": list(entities), "relations": list(relations)}
        return Content(arrays, info, lines, extra=extra, rejected=rejected)

    def _triples(self, file: Path, rejected: list[Rejected]) -> Iterator[list[str]]:
        """Yield the triples of a file. Other lines go to `rejected`, except blank ones and a header."""
        given = self.data.delimiter
        separator: str | None = "\t" if given in ("auto", "tab", "\\t") else given
        try:
            # utf-8-sig: a byte-order mark would become part of the first head.
            with file.open(encoding="utf-8-sig") as stream:
                first = True
                for number, line in enumerate(stream, start=1):
                    if not line.strip():
                        continue
                    if first and given == "auto" and "\t" not in line:
                        separator = "," if line.count(",") == 2 else None  # None: split at any blanks
                    cells = [cell.strip() for cell in line.split(separator)]
                    if len(cells) == 3 and all(cells):
                        if not first or " ".join(cells).lower() not in _HEADERS:
                            yield cells
                    else:
                        why = "an empty value"
                        if len(cells) != 3:
                            why = f"{len(cells)} values, expected head, relation and tail"
                        text = line[:SHOWN].rstrip("\n")
                        rejected.append(Rejected(file=str(file), line=number, reason=why, text=text))
                    first = False
        except UnicodeDecodeError as error:
            where = f"data.path: {file} is not UTF-8 text (byte {error.start})"
            raise UserError(f"{where}; save it as UTF-8") from error


def open_source(data: KgeDataConfig, seed: int) -> _TripleSource:
    """Find the files of triples. Raises UserError for a missing path and a folder without a train file."""
    if data.path is None:
        raise UserError("data.path is not set; give a file of triples, or a folder with train.txt")
    root = given_path(data.path, "data.path")
    if root.is_file():
        return _TripleSource(data, seed, {"train": root})
    if not root.is_dir():
        raise UserError(
            f"data.path={data.path}: no such file or folder; give a file of triples, or a folder with "
            "train.txt"
        )
    parts: dict[str, Path] = {}
    for part in _PARTS:
        found = files_of(root, part)
        if len(found) > 1:
            raise UserError(
                f"data.path={data.path}: holds {found[0].name} and {found[1].name}; keep only one"
            )
        if found:
            parts[part] = found[0]
    if "train" not in parts:
        raise UserError(
            f"data.path={data.path}: the folder has no train.txt (or .tsv, .csv); name the files train, "
            "valid and test"
        )
    return _TripleSource(data, seed, parts)
