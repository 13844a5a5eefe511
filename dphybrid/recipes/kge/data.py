"""Reads triples (head, relation, tail): a folder with train, valid and perhaps test files, or one file of
which a part is held out.

The entities and relations of all splits get numbers, also those that only valid or test has: published
results rank an answer among all entities.
Letters: B triples, 3 columns (head, relation, tail), Q questions (two per triple), X questions of all
triples, K negatives, M known answers of a question.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dphybrid.config.tables import DelimitedFiles, RowFiles
from dphybrid.data.batches import Array, ArrayDataset, Dataset, DrawnDataset, Draws
from dphybrid.data.foreign import writing
from dphybrid.data.store import PARTS, Content, Prepared, Progress, Source
from dphybrid.data.table.files import (
    SUFFIXES,
    Rejected,
    check_rejected,
    complete_rows,
    named_columns,
    names_of,
    read_rows,
)
from dphybrid.data.table.splits import random_rows
from dphybrid.data.table.values import Form, as_names
from dphybrid.recipes.kge import KgeDataConfig
from dphybrid.recipes.lists import lists_of
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import given_path, no_such_file

_COLUMNS, _NAMES = ("heads_B", "relations_B", "tails_B"), ["head", "relation", "tail"]
_REMEDY = (
    "name head, relation and tail with data.head, data.relation and data.tail, or keep these three columns "
    "without a header"
)


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
    """Return a split of prepared triples: "train" with negatives, which a batch shares, the others with the
    known answers, which the ranking leaves out."""
    arrays, info = prepared.arrays, prepared.info
    triples_B3, num_entities = arrays[f"{name}_triples"], info["num_entities"]

    def negatives(_: object, draws: Draws) -> dict[str, Tensor]:
        numbers_K = draws.of_batch().integers(0, num_entities, info["num_negatives"])
        return {"negatives_K": torch.from_numpy(numbers_K)}

    def known(batch: dict[str, Tensor], _: object) -> dict[str, Tensor]:
        """Return known_B2M, the known answers of each question, padded with -1."""
        triples = np.stack([batch[column].numpy() for column in _COLUMNS], axis=1)
        asked_B2 = _questions(triples, num_entities, info["num_relations"])
        places_Q = np.searchsorted(arrays["keys"], asked_B2).ravel()
        starts = arrays["starts"]
        lists_QM = lists_of(arrays["answers"], starts[places_Q], starts[places_Q + 1], none=-1)
        return {"known_B2M": lists_QM.view(*asked_B2.shape, -1)}

    rows = ArrayDataset(dict(zip(_COLUMNS, triples_B3.T, strict=True)), np.arange(len(triples_B3)))
    return DrawnDataset(rows, negatives if name == "train" else known)


def _reading(data: KgeDataConfig, file: Path) -> RowFiles:
    """Return how a file of triples is read: any text but the empty one is a name, also NA and null. A first
    line with the names of the three columns is a header. Rejected rows are counted over all parts."""
    written = data.model_dump(include={*DelimitedFiles.model_fields})
    written |= {"path": str(file), "missing": None, "max_rejected": 1.0}
    named = RowFiles(header="yes", **written)
    return named if {*data.columns} <= {*names_of(file, named)} else RowFiles(header="no", **written)


@dataclass(frozen=True)
class _TripleSource(Source):
    """Source of triples. parts: the file of each split; without one for "valid", a share of "train" is held
    out."""

    data: KgeDataConfig
    seed: int
    parts: dict[str, Path]

    @property
    def options(self) -> dict[str, object]:
        return self.data.model_dump(mode="json", exclude={"path", "test_path"}) | {"parts": list(self.parts)}

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.parts.values())

    @property
    def num_test_digests(self) -> int:
        return 1 if "test" in self.parts else 0

    def read(self, progress: Progress, scratch: Path) -> Content:
        d, rejected, notes, frames = self.data, list[Rejected](), list[str](), dict[str, pl.DataFrame]()
        for done, (part, file) in enumerate(self.parts.items()):
            progress("read triples", done, len(self.parts))
            rows = read_rows([file], _reading(d, file), scratch / part, as_text=True)
            chosen = rows.names if rows.names == ["0", "1", "2"] else d.columns
            cells = named_columns(rows, chosen, f"data.path={d.path}: {file.name} has", _REMEDY)
            names = [
                as_names(cells[name], Form(), ()).alias(to) for name, to in zip(chosen, _NAMES, strict=True)
            ]
            frames[part], bad = complete_rows(rows, pl.DataFrame(names), _NAMES)
            rejected += bad
            notes += [note for note in rows.notes if "header" not in note]
            if unused := [name for name in rows.names if rows.header and name not in d.columns]:
                notes.append(f"not used: {', '.join(unused)}")
        num_rows = sum(map(len, frames.values()))
        check_rejected(str(d.path), rejected, num_rows + len(rejected), d.max_rejected)
        whole = pl.concat(frames.values())
        # In the order of the rows, each with its head first.
        entities = whole.select(pl.concat_list("head", "tail").explode()).to_series()
        entities = entities.unique(maintain_order=True)
        relations = whole["relation"].unique(maintain_order=True)
        kinds = [pl.Enum(names) for names in (entities, relations, entities)]
        parts = {
            part: pl.DataFrame(map(_numbers, triples, kinds)).to_numpy(order="c")
            for part, triples in frames.items()
        }
        if "valid" not in parts:
            held_B = random_rows(self.seed, len(parts["train"]), d.valid_fraction)
            parts = {**parts, "train": parts["train"][~held_B], "valid": parts["train"][held_B]}
        if empty := [part for part, triples in parts.items() if not len(triples)]:
            raise UserError(f"data.path={d.path}: the {empty[0]} split has no triples; give a file with some")
        # Entities that training lacks keep their initial values. They are evaluated all the same, as in
        # published results, and the printed lines count them.
        seen = np.zeros(len(entities), dtype=bool)
        seen[parts["train"][:, [0, 2]]] = True
        lines = [
            f"  triples from {d.path}: {counted(len(entities), 'entity', 'entities')}, "
            f"{counted(len(relations), 'relation')}",
            *(f"  reading: {note}" for note in dict.fromkeys(notes)),
        ]
        for part, triples in parts.items():
            more = f"{len(triples) / len(entities):.3g} per entity"
            if part != "train":
                unseen = (~seen[triples[:, [0, 2]]]).any(1).sum()
                more = f"{unseen:,} of them with an entity that train lacks"
            lines.append(f"  {part}: {counted(len(triples), 'triple')}, {more}")
        sizes = {"num_entities": len(entities), "num_relations": len(relations)}
        arrays = {f"{part}_triples": triples for part, triples in parts.items()}
        arrays |= _known_answers(np.concatenate([*parts.values()]), **sizes)

        def save(folder: Path) -> None:
            (folder / "encoder").mkdir()
            for name, names in (("entities", entities), ("relations", relations)):
                with writing(file := folder / "encoder" / f"{name}.parquet"):
                    names.to_frame("name").write_parquet(file)

        info = sizes | {"num_negatives": d.negatives}
        return Content(arrays, info, lines, rejected=rejected, save=save)


def _numbers(names: pl.Series, kind: pl.Enum) -> pl.Series:
    return names.cast(kind).to_physical().cast(pl.Int64)


def open_source(data: KgeDataConfig, seed: int) -> _TripleSource:
    """Find the files of triples. Raises UserError for a missing path, a folder without a train file, and two
    files for one split."""
    if data.path is None:
        raise UserError("data.path is not set; give a file of triples, or a folder with train.txt")
    root = given_path(data.path, "data.path")
    if not root.exists():
        raise no_such_file(data.path, "data.path")
    found: dict[str, list[Path]] = {"train": [root]}
    if root.is_dir():
        endings = ("", *SUFFIXES)
        found = {part: [f for end in endings if (f := root / f"{part}{end}").is_file()] for part in PARTS}
    if data.test_path is not None:
        test = given_path(data.test_path, "data.test_path")
        if not test.is_file() or test.resolve() == root.resolve():
            raise UserError(f"data.test_path={data.test_path}: is no other file; give a file of triples")
        found["test"] = [*found.get("test", []), test]
    for part, files in found.items():
        if len(files) > 1:
            names = " and ".join(file.name for file in files)
            raise UserError(f"data.path={data.path}: {names} are both the {part} split; keep only one")
    parts = {part: files[0] for part, files in found.items() if files}
    if "train" not in parts:
        raise UserError(
            f"data.path={data.path}: the folder has no train.txt (or .tsv, .csv); name the files train, "
            "valid and test"
        )
    if "valid" in parts:
        data.check_unset("valid_fraction", f"the folder has {parts['valid'].name}")
    return _TripleSource(data, seed, parts)
