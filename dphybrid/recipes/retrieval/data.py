"""Reads interactions of users with items: rows of CSV, TSV or Parquet files, or a generated sample.

Users and items that have training rows are numbered, the most frequent first, so that the most popular items
have the smallest numbers. Validation ranks the items that a user has not met in training and looks for the
user's held-out ones.
Letters: B rows of a chunk or a batch (pairs in training, users in validation), N rows or pairs, R users or
items, U users, V items, F id columns (the id itself, then its features), H held-out items of a user, S items
that a user has met.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import polars as pl
import torch
from polars.selectors import by_name
from torch import Tensor

from dphybrid.data.batches import Array, Dataset, lists_of
from dphybrid.data.foreign import writing
from dphybrid.data.store import Content, Prepared, Progress, source_digests
from dphybrid.data.table.files import (
    Rejected,
    check_rejected,
    find_files,
    partitions,
    read_rows,
)
from dphybrid.data.table.kinds import form_as
from dphybrid.data.table.splits import latest_rows
from dphybrid.data.table.values import Form, as_names, in_time, with_gaps
from dphybrid.data.vocabulary import Vocabulary
from dphybrid.recipes.retrieval import RetrievalDataConfig
from dphybrid.recipes.retrieval.histories import histories
from dphybrid.util.errors import UserError, counted, suggestion

_SAMPLE_USERS, _SAMPLE_ITEMS, _SAMPLE_GROUPS, _SAMPLE_ROWS = 1000, 600, 15, 20_000


def _by_user(pairs_N2: Array, num_users: int) -> tuple[Array, Array]:
    """Return each user's distinct items as (starts, items) for `lists_of`. pairs_N2: (user, item)."""
    pairs_N2 = np.unique(pairs_N2, axis=0)
    counts_U = np.bincount(pairs_N2[:, 0], minlength=num_users)
    return np.concatenate([[0], np.cumsum(counts_U)]), np.ascontiguousarray(pairs_N2[:, 1])


def to_find(pairs_N2: Array, seen: tuple[Array, Array], num_users: int) -> tuple[Array, Array]:
    """Return each user's items to find, as (starts, items): those of pairs whose user and item training knows
    (-1: it does not), without the items that the user has `seen`."""
    pairs_N2 = pairs_N2[(pairs_N2 >= 0).all(1)].astype(np.int64)
    starts, items = seen
    width = 1 + max(pairs_N2[:, 1].max(initial=0), items.max(initial=0))
    seen_N = np.repeat(np.arange(num_users), np.diff(starts)) * width + items
    return _by_user(pairs_N2[~np.isin(pairs_N2[:, 0] * width + pairs_N2[:, 1], seen_N)], num_users)


def not_evaluated(pairs_N2: Array, num_held: int) -> str:
    """Return how many pairs, of which `num_held` are to be found, are left out and why."""
    users, items = ((pairs_N2[:, place] < 0).sum() for place in (0, 1))
    return (
        f"not evaluated: {counted(users, 'row')} of unseen users, {items:,} of unseen items, "
        f"{(pairs_N2 >= 0).all(1).sum() - num_held:,} of repeated pairs"
    )


def _in_order(pairs_N2: Array, times_N: Array) -> tuple[Array, Array]:
    """Return each user's items in the order of their times, those of one time in the order of the rows, as
    (starts, items) for `lists_of`. Every user has a pair."""
    order_N = np.lexsort((times_N, pairs_N2[:, 0]))
    counts_U = np.bincount(pairs_N2[:, 0])
    return np.concatenate([[0], np.cumsum(counts_U)]), np.ascontiguousarray(pairs_N2[order_N, 1])


def _lists(starts: Array, items: Array) -> pl.Series:
    """Return (starts, items) of `lists_of` as one list a user, in the order of the users."""
    of_user = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return (
        pl.DataFrame({"user": of_user, "item": items})
        .group_by("user", maintain_order=True)
        .agg("item")["item"]
    )


@dataclass(frozen=True)
class _Side:
    """All users, or all items, in the order of their numbers. ids_RF: their ids, by column; num_ids: rows
    of the tables, by column."""

    names: pl.Series
    ids_RF: Array
    num_ids: dict[str, int]

    @classmethod
    def of(cls, name: str, features: tuple[str, ...], train: pl.DataFrame) -> Self:
        """Number the values of the column `name`, most frequent first. A feature's value is that of the last
        row that has one. train: the training rows, the latest last."""
        # by_name, because pl.col reads names such as `*` as patterns. No column has a line break as its name,
        # so "\n" is free for the count.
        last = by_name(*features).drop_nulls().last()
        rows = train.group_by(by_name(name)).agg(pl.len().alias("\n"), last)
        # Ties by name, because the order of polars' groups depends on its threads.
        rows = rows.sort(pl.nth(1), pl.nth(0), descending=[True, False])
        words = {feature: Vocabulary.fit(rows[feature]) for feature in features}
        columns = [np.arange(len(rows)), *(words[feature].ids(rows[feature]) for feature in features)]
        sizes = {feature: len(vocabulary) for feature, vocabulary in words.items()}
        return cls(rows[name], np.stack(columns, 1).astype(np.int32), {name: len(rows)} | sizes)

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self, names: pl.Series) -> Array:
        """Return the number of each name; -1 for names that training does not have."""
        known = pl.int_range(len(self), dtype=pl.Int32, eager=True)
        return names.replace_strict(self.names, known, default=-1).to_numpy()

    def save(self, file: Path, **more: pl.Series) -> None:
        """Write names and ids, in the order of the numbers, with further columns `more`."""
        with writing(file):
            pl.DataFrame({"name": self.names, "ids": self.ids_RF, **more}).write_parquet(file)


@dataclass(frozen=True)
class _InteractionSource:
    """Source of interactions. read_files: empty for the generated sample."""

    data: RetrievalDataConfig
    seed: int
    read_files: tuple[Path, ...]
    test_files: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return self.read_files + self.test_files

    @property
    def options(self) -> dict[str, object]:
        found = [partitions(file) for file in self.files]
        values = self.data.model_dump(mode="json", exclude={"path", "test_path"})
        values |= {"test_files": len(self.test_files)} if self.test_files else {}
        return values | {"sample": not self.read_files, "partitions": found if any(found) else []}

    def digests(self, progress: Progress) -> list[bytes]:
        return source_digests(self.files, progress)

    def read(self, progress: Progress, scratch: Path) -> Content:
        if not self.read_files:
            forms = {"user": Form(), "item": Form()}
            return self._content(sample(self.seed), None, [], [], forms)
        notes = list[str]()
        forms = dict[str, Form]()
        rows, rejected = self._rows(self.read_files, scratch / "rows", forms, notes, progress)
        tested = None
        if self.test_files:
            tested, odd = self._rows(self.test_files, scratch / "test", forms, notes, progress)
            rejected += odd
        return self._content(rows, tested, rejected, notes, forms)

    def _content(
        self,
        rows: pl.DataFrame,
        tested: pl.DataFrame | None,
        rejected: list[Rejected],
        notes: list[str],
        forms: dict[str, Form],
    ) -> Content:
        """Return what is prepared from rows. tested: those of data.test_path. forms: of the columns."""
        d = self.data
        times_N = np.zeros(len(rows))
        if d.time is not None:
            dates = "" if d.dateformat else forms[d.time].dates
            times_N = in_time(rows[d.time], f"data.time={d.time!r}", dates)
        held_N = self._held_out(rows[d.user], times_N)
        # The latest rows last, for the features; stable, so that rows of one time keep the file's order.
        train = rows.filter(~held_N)[np.argsort(times_N[~held_N], kind="stable")]
        users, items = _Side.of(d.user, d.user_features, train), _Side.of(d.item, d.item_features, train)
        pairs_N2 = np.stack([users.numbers(rows[d.user]), items.numbers(rows[d.item])], 1)
        train_N2, valid_N2, met_N = pairs_N2[~held_N], pairs_N2[held_N], (pairs_N2 >= 0).all(1)
        if np.bincount(train_N2[:, 0]).max() < 2:
            raise UserError(
                f"data.path={d.path}: no user has two training rows, so there is no history to learn from; "
                "give more rows for each user"
            )
        of_valid = self._to_find(train_N2, times_N[~held_N], valid_N2, len(users), "validation rows")
        split = {
            "random": "at random by train.seed",
            "time": f"the latest by {d.time}",
            "last": f"each user's last by {d.time}",
        }[d.chosen_split]
        lines = [
            f"  {d.path or 'generated sample'}: {counted(len(rows), 'row')}, "
            f"{counted(len(users), 'user')} and {counted(len(items), 'item')} in training",
            *(f"  reading: {note}" for note in notes),
            f"  {counted(len(train_N2), 'row')} to train, {len(valid_N2):,} to validate ({split}): "
            f"{counted(len(of_valid['users']), 'user')} with "
            f"{counted(len(of_valid['held_items']), 'item')} to find",
            f"  {not_evaluated(valid_N2, len(of_valid['held_items']))}",
        ]
        test: dict[str, Array] = {}
        if tested is not None:
            # What was met before is in all rows of data.path.
            test_N2 = np.stack([users.numbers(tested[d.user]), items.numbers(tested[d.item])], 1)
            test = self._to_find(pairs_N2[met_N], times_N[met_N], test_N2, len(users), "test rows")
            lines.append(
                f"  test: {counted(len(test_N2), 'row')} of {d.test_path}: "
                f"{counted(len(test['users']), 'user')} with "
                f"{counted(len(test['held_items']), 'item')} to find"
            )
        if not d.exclude_seen:
            lines.append("  items that a user has met may be recommended again (data.exclude_seen=false)")
        info = {
            "user_ids": users.num_ids,
            "item_ids": items.num_ids,
            "negatives": d.negatives,
            "cutoffs": list(d.cutoffs),
            "num_users": len(users),
            "forms": {name: form.model_dump(mode="json") for name, form in forms.items()},
        }
        counts_V = np.bincount(train_N2[:, 1], minlength=len(items))
        arrays = {
            "train_pairs": train_N2,
            "valid_users": of_valid.pop("users"),
            "users_UF": users.ids_RF,
            "items_VF": items.ids_RF,
            # The last row is the padding of histories: an id behind the last one of each column.
            "inputs_PF": np.vstack([items.ids_RF, list(items.num_ids.values())]).astype(np.int32),
            # No logarithm of 0: every numbered item has training rows.
            "log_q_V": np.log(counts_V / len(train_N2)).astype(np.float32),
            **of_valid,
            **{f"test_{name}": array for name, array in test.items()},
        }

        def save(folder: Path) -> None:
            (folder / "encoder").mkdir()
            # Recommendations leave out all items that a user has met, those of the validation split, too.
            lists = _lists(*_by_user(pairs_N2[met_N], len(users)))
            if not d.exclude_seen:
                lists = lists.list.head(0)
            ordered = _lists(*_in_order(pairs_N2[met_N], times_N[met_N]))
            users.save(folder / "encoder" / "users.parquet", seen=lists, history=ordered)
            items.save(folder / "encoder" / "items.parquet")

        return Content(arrays, info, lines, rejected=rejected, save=save)

    def _to_find(
        self, before_N2: Array, times_N: Array, pairs_N2: Array, num_users: int, what: str
    ) -> dict[str, Array]:
        """Return the arrays of a part: the users with items to find in `pairs_N2`, these items, and what was
        met before. what: for the message. Raises UserError if there is nothing to find."""
        # Only known users and items have vectors, and the ranking leaves out what a user met before.
        seen = _by_user(before_N2 if self.data.exclude_seen else before_N2[:0], num_users)
        held = to_find(pairs_N2, seen, num_users)
        if not len(held[1]):
            raise UserError(
                f"data.path={self.data.path}: none of the {len(pairs_N2):,} {what} pairs a known user with "
                "a known item that is new to this user, so there is nothing to find; give more rows, or "
                "other ones"
            )
        arrays = {"users": np.flatnonzero(np.diff(held[0]))}
        for name, (starts, items) in (
            ("history", _in_order(before_N2, times_N)),
            ("seen", seen),
            ("held", held),
        ):
            arrays |= {f"{name}_starts": starts, f"{name}_items": items}
        return arrays

    def _rows(
        self,
        files: tuple[Path, ...],
        scratch: Path,
        forms: dict[str, Form],
        notes: list[str],
        progress: Progress,
    ) -> tuple[pl.DataFrame, list[Rejected]]:
        """Return the named columns of files, names as texts, for the rows that have a user and an item; and
        the other rows as rejected ones. forms: of the columns; empty before the first files. notes: gets what
        was inferred about how the files are written."""
        d = self.data
        names = list(dict.fromkeys(name for _, name in d.named_columns))
        rows = read_rows(files, d, scratch, names, on_progress=progress)
        columns = rows.names
        if missing := [name for name in names if name not in columns]:
            raise UserError(
                f"data.path={d.path}: {files[0].name} has no column {missing[0]!r}"
                f"{suggestion(missing[0], columns)}; name the columns with data.user, "
                "data.item, data.time, data.user_features and data.item_features"
            )
        notes += [note for note in rows.notes if note not in notes]
        if others := [name for name in columns if name not in (*names, *rows.index)]:
            notes.append(f"not used: {', '.join(others)}; every row counts as one interaction")
        frame = rows.frame.select(by_name(*names)).collect(engine="streaming")
        for field, name in d.named_columns:
            cells = frame[name]
            if cells.dtype == pl.List:
                raise UserError(f"data.{field}={name!r}: holds lists; name a column of single values")
            if name not in forms:
                role = "time" if name == d.time and cells.dtype.is_temporal() else "categorical"
                forms[name] = form_as(role, with_gaps(cells, None), rows.forms.get(name, Form()))
            if name != d.time:
                frame = frame.with_columns(as_names(cells, forms[name]).alias(name))
        rejected = list(rows.rejected)
        whole_B = frame[d.user].is_not_null() & frame[d.item].is_not_null()
        if not whole_B.all():
            of_file, lines = rows.lines()
            for place in (~whole_B).arg_true():
                odd = d.user if frame[d.user][place] is None else d.item
                why = f"no value in {odd!r}"
                rejected.append(Rejected(file=of_file[place], line=lines[place], reason=why))
            frame = frame.filter(whole_B)
        check_rejected(str(d.path), rejected, len(frame) + len(rejected), d.max_rejected)
        if len(frame) < 2:
            found = counted(len(frame), "row")
            raise UserError(f"data.path={d.path}: has {found} with a user and an item; give 2 or more")
        return frame, rejected

    def _held_out(self, users: pl.Series, times_N: Array) -> Array:
        """Return held_N, which rows are held out: the latest ones, each user's last one, or random ones."""
        num_rows, split = len(users), self.data.chosen_split
        if split == "random":
            wanted = min(max(1, round(num_rows * self.data.valid_fraction)), num_rows - 1)
            # 11: other draws than those of `sample`, which may have the same seed.
            held_N = np.zeros(num_rows, bool)
            held_N[np.random.default_rng([self.seed, 11]).permutation(num_rows)[:wanted]] = True
            return held_N
        if split == "last":
            rows = pl.DataFrame({"user": users, "time": times_N, "row": np.arange(num_rows)})
            # Of rows of one time the file's last one. Users with one row keep it for training.
            later = rows.sort("time", "row").group_by("user").agg(pl.len().alias("count"), pl.last("row"))
            held_N = np.zeros(num_rows, bool)
            held_N[later.filter(pl.col("count") > 1)["row"].to_numpy()] = True
            return held_N
        held_N = latest_rows(times_N, self.data.valid_fraction)
        if held_N.all():
            raise UserError(
                f"data.time={self.data.time!r}: all rows have the same time, so none are the latest; leave "
                "it out to hold out random rows"
            )
        return held_N


def sample(seed: int) -> pl.DataFrame:
    """Return generated interactions: users and items belong to groups, four of five items of a user are from
    the user's own group, and some items are far more frequent than others."""
    random = np.random.default_rng([seed, 7])
    groups_U, groups_V = (
        random.integers(_SAMPLE_GROUPS, size=n).astype(np.int64) for n in (_SAMPLE_USERS, _SAMPLE_ITEMS)
    )
    weight_V = (1 + random.permutation(_SAMPLE_ITEMS)) ** -0.5
    users_N = random.integers(_SAMPLE_USERS, size=_SAMPLE_ROWS)
    items_N = random.choice(_SAMPLE_ITEMS, _SAMPLE_ROWS, p=weight_V / weight_V.sum())
    own_N = random.random(_SAMPLE_ROWS) < 0.8
    for group in range(_SAMPLE_GROUPS):
        rows = np.flatnonzero(own_N & (groups_U[users_N] == group))
        chance_V = weight_V * (groups_V == group)
        items_N[rows] = random.choice(_SAMPLE_ITEMS, len(rows), p=chance_V / chance_V.sum())
    names = {"user": [f"u{n}" for n in users_N], "item": [f"i{n}" for n in items_N]}
    return pl.DataFrame(names)


def open_source(data: RetrievalDataConfig, seed: int) -> _InteractionSource:
    """Find the files of interactions. Raises UserError for a missing path and an empty file."""
    files = () if data.path is None else find_files(data.path, "data.path")
    tested = () if data.test_path is None else find_files(data.test_path, "data.test_path")
    if tested and not files:
        raise UserError(f"data.test_path={data.test_path}: set data.path, too; the sample has no test part")
    if both := {file.resolve() for file in files} & {file.resolve() for file in tested}:
        raise UserError(
            f"data.test_path={data.test_path}: {min(both)} is also among the files of data.path; name "
            "different files"
        )
    return _InteractionSource(data, seed, files, tested)


class _PairDataset(Dataset):
    """The training pairs (user, item). `histories.training_histories` makes batches of users of them."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["train_pairs"])

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        return {"pairs_B2": _long(self.arrays["train_pairs"][index_B])}


class HeldDataset(Dataset):
    """Validation or test users, each with the held-out items to find and the items met before, which ranking
    leaves out. Both lists are sorted and padded with the number of items, which is no item's number."""

    def __init__(self, arrays: Mapping[str, Array], part: str) -> None:
        # Those of validation, and of later rows, have no prefix, except for the users.
        of_part = "test_" if part == "test" else ""
        lists = {
            name.removeprefix(of_part): array for name, array in arrays.items() if name.startswith(of_part)
        }
        self.arrays, self.users = {**arrays, **lists}, arrays[f"{part}_users"]
        self.catalog_VF = _long(np.ascontiguousarray(arrays["items_VF"]))

    def __len__(self) -> int:
        return len(self.users)

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        a, none = self.arrays, len(self.catalog_VF)
        users_B = self.users[index_B]
        return {
            **histories(a["history_starts"], a["history_items"], users_B, a["inputs_PF"]),
            "features_BG": _long(a["users_UF"][users_B, 1:]),
            "held_BH": lists_of(a["held_starts"], a["held_items"], users_B, none),
            "seen_BS": lists_of(a["seen_starts"], a["seen_items"], users_B, none),
            "catalog_VF": self.catalog_VF,
        }


def _long(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def part_of(prepared: Prepared, name: str) -> Dataset:
    """Return a split of prepared interactions: "train" as pairs, the others as users."""
    return _PairDataset(prepared.arrays) if name == "train" else HeldDataset(prepared.arrays, name)
