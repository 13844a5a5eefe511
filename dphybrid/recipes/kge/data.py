"""Reads triples (head, relation, tail): a folder with train, valid and perhaps test files, or one file of
which a part is held out.

The entities and relations of all splits get numbers, also those that only valid or test has: published
results rank an answer among all entities.
Letters: B triples, 3 columns (head, relation, tail), Q questions (two per triple), X questions of all
triples, K negatives, M known answers of a question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dphybrid.config import ExperimentConfig
from dphybrid.config.tables import DelimitedFiles, RowFiles
from dphybrid.data.batches import Array, ArrayDataset, Dataset, Draw, DrawnDataset, Draws, lists_of
from dphybrid.data.foreign import misread, writing
from dphybrid.data.store import Content, Prepared, Progress, Source
from dphybrid.data.table.delimited import head_of
from dphybrid.data.table.files import Rejected, check_rejected, read_rows
from dphybrid.data.table.frames import as_frame, rows_of
from dphybrid.data.table.values import Form, as_names
from dphybrid.recipes.kge import KgeDataConfig, files_of
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import given_path

_PARTS, _COLUMNS = ("train", "valid", "test"), ("heads_B", "relations_B", "tails_B")


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
    if name != "train":
        return _ranked(triples_B3, arrays, info)
    return DrawnDataset(_rows(triples_B3), _negatives(info["num_entities"], info["num_negatives"]))


def _rows(triples_B3: Array) -> ArrayDataset:
    return ArrayDataset(dict(zip(_COLUMNS, triples_B3.T, strict=True)), np.arange(len(triples_B3)))


def _ranked(triples_B3: Array, arrays: Mapping[str, Array], info: Mapping[str, Any]) -> Dataset:
    """Return triples with the known answers of their questions. arrays: of `_known_answers`."""

    def known(batch: dict[str, Tensor], _: object) -> dict[str, Tensor]:
        """Return known_B2M, the known answers of each question, padded with -1."""
        triples = np.stack([batch[column].numpy() for column in _COLUMNS], axis=1)
        asked_B2 = _questions(triples, info["num_entities"], info["num_relations"])
        places_Q = np.searchsorted(arrays["keys"], asked_B2).ravel()
        lists_QM = lists_of(arrays["starts"], arrays["answers"], places_Q, none=-1)
        return {"known_B2M": lists_QM.view(*asked_B2.shape, -1)}

    return DrawnDataset(_rows(triples_B3), known)


class _Reading(RowFiles):
    """How files of triples are read: any text but the empty one is a name, also NA and null."""

    @property
    def no_value(self) -> tuple[str, ...]:
        return ()


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

    def read(self, progress: Progress, scratch: Path) -> Content:
        rejected: list[Rejected] = []
        notes: dict[str, None] = {}
        frames = dict[str, pl.DataFrame]()
        for done, (part, file) in enumerate(self.parts.items()):
            progress("read triples", done, len(self.parts))
            frames[part] = self._triples(file, scratch / part, rejected, notes)
        frames = _without_headers(frames, notes)
        num_rows = sum(map(len, frames.values()))
        check_rejected(str(self.data.path), rejected, num_rows + len(rejected), self.data.max_rejected)
        whole = pl.concat(frames.values())
        # In the order of the rows, each with its head first.
        ends = pl.concat_list(pl.nth(0), pl.nth(2)).explode()
        entities = whole.select(ends).to_series().unique(maintain_order=True)
        relations = whole.to_series(1).unique(maintain_order=True)
        parts = {
            part: _numbered(triples, entities, relations).to_numpy(order="c")
            for part, triples in frames.items()
        }
        if "valid" not in parts:
            # At least one triple is held out, and at least one stays for training.
            num_triples = len(parts["train"])
            order = np.random.default_rng(self.seed).permutation(num_triples)
            held = min(max(1, round(num_triples * self.data.valid_fraction)), num_triples - 1)
            valid, train = (parts["train"][np.sort(rows)] for rows in (order[:held], order[held:]))
            parts = {**parts, "train": train, "valid": valid}
        if empty := [part for part, triples in parts.items() if not len(triples)]:
            raise UserError(
                f"data.path={self.data.path}: the {empty[0]} split has no triples; give a file with some"
            )
        # Entities that training lacks keep their initial values. They are evaluated all the same, as in
        # published results, and the printed lines count them.
        seen = np.zeros(len(entities), dtype=bool)
        seen[parts["train"][:, [0, 2]]] = True
        lines = [
            f"  triples from {self.data.path}: {counted(len(entities), 'entity', 'entities')}, "
            f"{counted(len(relations), 'relation')}"
        ]
        lines += [f"  reading: {note}" for note in notes]
        for part, triples in parts.items():
            if part != "train":
                lines += [f"  check {part}: {note}" for note in _repeated(triples, parts["train"])]
            known = (
                f", {(~seen[triples[:, [0, 2]]]).any(1).sum():,} of them with an entity that train lacks"
                if part != "train"
                else f", {len(triples) / len(entities):.3g} per entity"
            )
            lines.append(f"  {part}: {counted(len(triples), 'triple')}{known}")
        info = {
            "num_entities": len(entities),
            "num_relations": len(relations),
            "num_negatives": self.data.negatives,
        }
        arrays = {f"{part}_triples": triples for part, triples in parts.items()}
        known_B3 = np.concatenate([parts["train"], *(parts[part] for part in parts if part != "train")])
        arrays |= _known_answers(known_B3, len(entities), len(relations))

        def save(folder: Path) -> None:
            known = pl.DataFrame(known_B3.astype(np.int32), _NAMES)
            is_trained = (pl.int_range(pl.len()) < len(parts["train"])).alias("trained")
            names = {"entities": entities.to_frame("name"), "relations": relations.to_frame("name")}
            (folder / "encoder").mkdir()
            for name, frame in (names | {"known": known.with_columns(is_trained)}).items():
                with writing(file := folder / "encoder" / f"{name}.parquet"):
                    frame.write_parquet(file)

        return Content(arrays, info, lines, rejected=rejected, save=save)

    def _triples(
        self, file: Path, scratch: Path, rejected: list[Rejected], notes: dict[str, None]
    ) -> pl.DataFrame:
        """Return the rows of a file as texts (head, relation, tail), perhaps with a header as the first one.
        Rows that are no triples go to `rejected`."""
        reading = reading_of(self.data, file)
        rows = read_rows([file], reading.model_copy(update={"max_rejected": 1.0}), scratch, as_text=True)
        notes |= dict.fromkeys(note for note in rows.notes if "header" not in note)
        found = triples_of(rows.frame.collect(), f"data.path={self.data.path}: {file.name}", notes)
        whole_B = found.select(pl.all_horizontal(pl.all().is_not_null())).to_series()
        rejected += rows.rejected
        if not whole_B.all():
            _, lines = rows.lines()
            for row in (~whole_B).arg_true():
                shown = "\t".join(text or "" for text in found.row(row))
                why = "an empty value"
                rejected.append(Rejected(file=str(file), line=lines[row], reason=why, text=shown))
        return found.filter(whole_B)


def reading_of(data: KgeDataConfig, file: Path) -> _Reading:
    """Return how a file of triples is read. Unless it is set, the separator is a blank if the first line has
    neither tabs nor commas."""
    separator = data.delimiter
    if separator == "auto":
        first = next((line for line in head_of(file).splitlines() if line.strip()), b"")
        separator = "blank" if first.count(b" ") == 2 and not {*b"\t,;|{\0"} & {*first} else "auto"
    written = data.model_dump(include={*DelimitedFiles.model_fields})
    return _Reading(**written | {"header": "no", "delimiter": separator, "path": str(file)})


def triples_of(rows: pl.DataFrame, where: str, notes: dict[str, None]) -> pl.DataFrame:
    """Return rows as texts (head, relation, tail). where: for the message. notes: gets which columns are
    used. Raises UserError if there are others than three columns without such names."""
    texts = pl.DataFrame([as_names(column, Form(), ()) for column in rows])
    names = texts.columns
    if all(name.isdigit() for name in names) and len(texts):
        names = [text or "" for text in texts.row(0)]
    order = _order(where, names)
    if order != [0, 1, 2]:
        places = ", ".join(str(place + 1) for place in order)
        notes[f"head, relation and tail are the columns {places}"] = None
    if others := [name for place, name in enumerate(names) if place not in order]:
        notes[f"not used: {', '.join(others)}"] = None
    found = texts.select(pl.nth(order))
    found.columns = _NAMES
    return found


_NAMES = ["head", "relation", "tail"]
_ROLES = (
    ("head", "h", "subject", "s", "source", "from"),
    ("relation", "r", "rel", "predicate", "p", "edge"),
    ("tail", "t", "object", "o", "target", "to"),
)
"""Names of columns of triples."""


def _places(names: Sequence[str]) -> list[int] | None:
    """Return the places of head, relation and tail among columns of these names; None if some are others."""
    found = [[i for i, name in enumerate(names) if name.strip().lower() in words] for words in _ROLES]
    return [places[0] for places in found] if all(len(places) == 1 for places in found) else None


def _order(where: str, names: Sequence[str]) -> list[int]:
    """Return the places of head, relation and tail among columns of these names, which may be a first row.
    where: for the message. Raises UserError if there are others than three columns without such names."""
    if (found := _places(names)) is not None:
        return found
    if len(names) != 3:
        raise UserError(
            f"{where} has {counted(len(names), 'column')}, expected head, relation and tail; keep these "
            "three, name them so, or set data.delimiter"
        )
    return [0, 1, 2]


def _numbered(triples: pl.DataFrame, entities: pl.Series, relations: pl.Series) -> pl.DataFrame:
    """Return triples as positions among the names; null for another name."""
    return triples.select(
        cells.cast(pl.Enum(names), strict=False).to_physical().cast(pl.Int64)
        for cells, names in zip(triples, (entities, relations, entities), strict=True)
    )


def _repeated(triples_B3: Array, trained_B3: Array) -> list[str]:
    """Return a note if training has some of these triples."""
    trained = pl.DataFrame(trained_B3)
    again = pl.DataFrame(triples_B3).join(trained, on=trained.columns, how="semi")
    if again.is_empty():
        return []
    return [
        f"{len(again):,} of its {len(triples_B3):,} triples are in train, too; they say nothing about new "
        "ones, so leave them out of one of the two"
    ]


def _without_headers(frames: dict[str, pl.DataFrame], notes: dict[str, None]) -> dict[str, pl.DataFrame]:
    """Return the triples without the files' headers: first rows with the names of columns, or with three
    texts that no other row repeats."""
    others = pl.concat(frame.slice(1) for frame in frames.values())
    entities, relations = pl.concat([others["head"], others["tail"]]), others["relation"]
    found = dict[str, pl.DataFrame]()
    for part, frame in frames.items():
        found[part] = frame
        if not len(frame):
            continue
        head, relation, tail = frame.row(0)
        named = _places([head, relation, tail]) == [0, 1, 2]
        repeated = entities.is_in([head, tail]).any() or (relations == relation).any()
        alone = len(frame) > 2 and head != tail and not repeated
        if named or alone:
            # Files that were joined have such a line inside, too.
            header = {"head": head, "relation": relation, "tail": tail}
            found[part] = frame.filter(
                pl.any_horizontal(pl.col(name) != text for name, text in header.items())
            )
            again = len(frame) - len(found[part]) - 1
            more = f", and so do {counted(again, 'line')} inside, left out" if again else ""
            notes[f"the first line ({head}, {relation}, {tail}) names the columns{more}"] = None
    return found


def open_source(data: KgeDataConfig, seed: int) -> _TripleSource:
    """Find the files of triples. Raises UserError for a missing path and a folder without a train file."""
    if data.path is None:
        raise UserError("data.path is not set; give a file of triples, or a folder with train.txt")
    root = given_path(data.path, "data.path")
    tested = {} if data.test_path is None else {"test": given_path(data.test_path, "data.test_path")}
    for file in tested.values():
        if not file.is_file():
            raise UserError(f"data.test_path={data.test_path}: no such file; give a file of triples")
        if file.resolve() == root.resolve():
            raise UserError(f"data.test_path={data.test_path}: is also data.path; give another file")
    if root.is_file():
        return _TripleSource(data, seed, {"train": root, **tested})
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
    if tested and "test" in parts:
        raise UserError(
            f"data.test_path={data.test_path}: the folder has {parts['test'].name}, too; keep one"
        )
    if "valid" in parts:
        data.check_unset("valid_fraction", f"the folder has {parts['valid'].name}")
    return _TripleSource(data, seed, parts | tested)


def later_triples(
    checkpoint: Path, config: ExperimentConfig, _: object, rows: object
) -> tuple[Dataset, list[str]]:
    """Return triples that a test part could have: ranked without the answers that they or the training's
    files know. rows: a frame with head, relation and tail, or the path of a file. Triples of a name that the
    training's files lack are left out, and counted by the note. Raises UserError if there are no others."""
    with misread(checkpoint / "encoder"):
        entities, relations, known = (
            pl.read_parquet(checkpoint / "encoder" / f"{name}.parquet", glob=False)
            for name in ("entities", "relations", "known")
        )
        names = {"head": entities["name"], "relation": relations["name"], "tail": entities["name"]}
        info = read_state(checkpoint).info
        written = known.select(names[column].gather(known[column]).alias(column) for column in _NAMES)
    notes = dict[str, None]()
    if isinstance(rows, str | Path):
        assert isinstance(config.data, KgeDataConfig)
        file = given_path(str(rows), "data.path")
        if not file.is_file():
            raise UserError(f"data.path={rows}: is not a file; name one with triples")
        with rows_of(str(rows), reading_of(config.data, file)) as found:
            triples = triples_of(found.frame.collect(), f"data.path={rows}", notes).drop_nulls()
        triples = _without_headers({"known": written, "new": triples}, notes)["new"]
    else:
        triples = triples_of(as_frame(rows, "the rows").lazy().collect(), "the rows:", notes).drop_nulls()
    numbered = _numbered(triples, entities["name"], relations["name"])
    triples_B3 = numbered.drop_nulls().to_numpy(order="c")
    if others := [name for column in _NAMES for name in triples[column].filter(numbered[column].is_null())]:
        left = f"{len(numbered) - len(triples_B3):,} of {counted(len(numbered), 'triple')}"
        notes[f"Not evaluated: {left}, with names that training lacks, such as {others[0]!r}"] = None
    if not len(triples_B3):
        raise UserError(f"there is nothing to evaluate. {'. '.join(notes) or 'The rows have no triples'}")
    known_B3 = known.select(_NAMES).cast(pl.Int64).to_numpy()
    notes |= dict.fromkeys(_repeated(triples_B3, known_B3[known["trained"].to_numpy()]))
    answers = _known_answers(np.concatenate([known_B3, triples_B3]), len(entities), len(relations))
    return _ranked(triples_B3, answers, info), list(notes)
