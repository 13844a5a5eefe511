"""Reads interactions of users with items: rows of CSV, TSV or Parquet files, or a generated sample.

Users and items that have training rows are numbered, the most frequent first, so that the most popular items
have the smallest numbers. Validation ranks the items that a user has not met in training and looks for the
user's held-out ones.
Letters: B rows of a batch (pairs in training, users in validation), N rows or pairs, U users, V items, H
held-out items of a user, S items that a user has met.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dphybrid.data.batches import Array, Dataset
from dphybrid.data.foreign import writing
from dphybrid.data.store import Content, Prepared, Progress, Source
from dphybrid.data.table.files import (
    Rejected,
    check_rejected,
    complete_rows,
    find_parts,
    folder_values,
    named_columns,
    read_rows,
)
from dphybrid.data.table.kinds import form_as
from dphybrid.data.table.splits import TEST, TRAIN, VALID, latest_rows, random_rows
from dphybrid.data.table.values import Form, as_names, in_time, with_gaps
from dphybrid.recipes.lists import lists_of
from dphybrid.recipes.retrieval import RetrievalDataConfig
from dphybrid.recipes.retrieval.histories import histories
from dphybrid.util.errors import UserError, counted

_SAMPLE_USERS, _SAMPLE_ITEMS, _SAMPLE_GROUPS, _SAMPLE_ROWS = 1000, 600, 15, 20_000
_LISTS = tuple(f"{name}_{part}" for name in ("history", "seen", "held") for part in ("starts", "items"))
"""Arrays of a validation or test part: the lists of all users, each as `lists_of` takes it."""


def part_lists(
    met_N2: Array, asked_N2: Array, sizes: tuple[int, int], exclude_seen: bool, where: str
) -> tuple[dict[str, Array], list[str]]:
    """Return the arrays of a part: `users` with items to find, and of all users `history` (what was met, in
    order), `seen` (what ranking leaves out) and `held` (what is to be found, without what is seen), as starts
    and items for `lists_of`. Also return what is to be found, and what is left out and why, as texts.

    met_N2: (user, item) by number, in the order of time. asked_N2: the rows of the part; -1: unknown. sizes:
    numbers of users and items. where: for the message of the UserError if there is nothing to find.
    """
    known_B = (asked_N2 >= 0).all(1)
    place = np.array([sizes[1], 1])  # a pair as one number, by which lists are sorted
    seen = np.unique(met_N2 @ place) if exclude_seen else np.empty(0, np.int64)
    held = np.setdiff1d(asked_N2[known_B] @ place, seen)
    pairs = {"history": met_N2.T, "seen": divmod(seen, sizes[1]), "held": divmod(held, sizes[1])}
    arrays = {"users": np.unique(held // sizes[1])}
    for name, (of_user, items) in pairs.items():
        counts_U = np.bincount(of_user, minlength=sizes[0])
        arrays[f"{name}_starts"] = np.concatenate([[0], np.cumsum(counts_U)])
        arrays[f"{name}_items"] = items[np.argsort(of_user, kind="stable")].astype(np.int32)
    unseen_users, unseen_items = (asked_N2 < 0).sum(0)
    left_out = (
        f"not evaluated: {counted(unseen_users, 'row')} of unseen users, {unseen_items:,} of unseen items, "
        f"{known_B.sum() - len(held):,} of repeated pairs"
    )
    if not len(held):
        raise UserError(
            f"{where}: there is nothing to find in {counted(len(asked_N2), 'row')} ({left_out}); give more "
            "rows, or other ones"
        )
    found = f"{counted(len(arrays['users']), 'user')} with {counted(len(held), 'item')} to find"
    return arrays, [found, left_out]


def _by_frequency(names: pl.Series) -> pl.Series:
    """Return the different names, the most frequent first."""
    counts = pl.DataFrame({"name": names}).group_by("name").len()
    # Ties by name, because the order of polars' groups depends on its threads.
    return counts.sort("len", "name", descending=[True, False])["name"]


def _numbers(names: pl.Series, known: pl.Series) -> Array:
    """Return the place of each name in `known`; -1 for others."""
    return names.replace_strict(known, pl.int_range(len(known), eager=True), default=-1).to_numpy()


@dataclass(frozen=True)
class _InteractionSource(Source):
    """Source of interactions. read_files: empty for the generated sample."""

    data: RetrievalDataConfig
    seed: int
    read_files: tuple[Path, ...]
    test_files: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.read_files + self.test_files

    @property
    def options(self) -> dict[str, object]:
        values = self.data.model_dump(mode="json", exclude={"path", "test_path"})
        values |= {"test_files": len(self.test_files)} if self.test_files else {}
        folders = [folder_values(file) for file in self.files]
        return values | {"sample": not self.read_files, "folders": folders}

    @property
    def num_test_digests(self) -> int:
        return len(self.test_files)

    def read(self, progress: Progress, scratch: Path) -> Content:
        d, forms = self.data, dict[str, Form]()
        if self.read_files:
            rows, rejected, notes = self._rows(
                self.read_files, d.named_columns, scratch / "rows", forms, progress
            )
        else:
            rows, rejected, notes = sample(self.seed), [], []
            forms |= {"user": Form(), "item": Form()}
        num_rows, times_N = len(rows), np.zeros(len(rows))
        if d.time is not None:
            times_N = in_time(rows[d.time], f"data.time={d.time!r}")
        part_N = np.where(self._held_out(rows[d.user], times_N), VALID, TRAIN)
        if self.test_files:
            named = d.named_columns[:2]
            tested, more, told = self._rows(self.test_files, named, scratch / "test", forms, progress)
            rows, rejected = pl.concat([rows, tested], how="diagonal"), rejected + more
            notes = [*dict.fromkeys(notes + told)]
            part_N = np.pad(part_N, (0, len(rows) - num_rows), constant_values=TEST)
        # Stable, so that rows of one time keep the file's order.
        in_time_N = np.argsort(times_N, kind="stable")
        is_train = pl.Series(part_N == TRAIN)
        users, items = (_by_frequency(rows[name].filter(is_train)) for name in (d.user, d.item))
        pairs_N2 = np.stack([_numbers(rows[d.user], users), _numbers(rows[d.item], items)], 1)
        train_N2 = pairs_N2[part_N == TRAIN]
        if np.bincount(train_N2[:, 0]).max() < 2:
            raise UserError(
                f"data.path={d.path}: no user has two training rows, so there is no history to learn from; "
                "give more rows for each user"
            )
        # Only known users and items have vectors.
        met_N = in_time_N[(pairs_N2[in_time_N] >= 0).all(1)]
        sizes, where = (len(users), len(items)), f"data.path={d.path}"
        trained_N, valid_N2 = met_N[part_N[met_N] == TRAIN], pairs_N2[part_N == VALID]
        valid, (found, left_out) = part_lists(
            pairs_N2[trained_N], valid_N2, sizes, d.exclude_seen, f"{where}: validation split"
        )
        split = {
            "random": "at random by train.seed",
            "time": f"the latest by {d.time}",
            "last": f"each user's last by {d.time}",
        }[d.chosen_split]
        lines = [
            f"  {d.path or 'generated sample'}: {counted(num_rows, 'row')}, "
            f"{counted(sizes[0], 'user')} and {counted(sizes[1], 'item')} in training",
            *(f"  reading: {note}" for note in notes),
            f"  {counted(len(train_N2), 'row')} to train, {len(valid_N2):,} to validate ({split}): {found}",
            f"  {left_out}",
        ]
        test = dict[str, Array]()
        if self.test_files:
            test_N2 = pairs_N2[part_N == TEST]
            test, (found, _) = part_lists(
                pairs_N2[met_N], test_N2, sizes, d.exclude_seen, f"data.test_path={d.test_path}"
            )
            lines.append(f"  test: {counted(len(test_N2), 'row')} of {d.test_path}: {found}")
        if not d.exclude_seen:
            lines.append("  items that a user has met may be recommended again (data.exclude_seen=false)")
        info = {
            "num_users": len(users),
            "num_items": len(items),
            "negatives": d.negatives,
            "cutoffs": list(d.cutoffs),
            "forms": {name: form.model_dump(mode="json") for name, form in forms.items()},
        }
        counts_V = np.bincount(train_N2[:, 1], minlength=len(items))
        arrays = {
            "train_pairs": train_N2.astype(np.int32),
            # No logarithm of 0: every numbered item has training rows.
            "log_q_V": np.log(counts_V / len(train_N2)).astype(np.float32),
            "valid_users": valid.pop("users"),
            **valid,
            **{f"test_{name}": array for name, array in test.items()},
        }

        def save(folder: Path) -> None:
            (folder / "encoder").mkdir()
            # What a user has met includes the validation split.
            met = pl.DataFrame(pairs_N2[met_N], ["user", "item"]).sort("user", maintain_order=True)
            history = met.group_by("user", maintain_order=True).agg("item")["item"]
            frames = {"users": {"name": users, "history": history}, "items": {"name": items}}
            for name, columns in frames.items():
                with writing(file := folder / "encoder" / f"{name}.parquet"):
                    pl.DataFrame(columns).write_parquet(file)

        return Content(arrays, info, lines, rejected=rejected, save=save)

    def _rows(
        self,
        files: Sequence[Path],
        fields: list[tuple[str, str]],
        scratch: Path,
        forms: dict[str, Form],
        progress: Progress,
    ) -> tuple[pl.DataFrame, list[Rejected], list[str]]:
        """Return the columns of files, names as texts, for the rows that have a user and an item; the other
        rows as rejected ones; and what was inferred about how the files are written.

        fields: pairs (field, column). forms: of the columns; gets those of the first files.
        """
        d, names = self.data, [name for _, name in fields]
        rows = read_rows(files, d, scratch, names, on_progress=progress)
        remedy = "name the columns with data.user, data.item and data.time"
        frame = named_columns(rows, names, f"data.path={d.path}: {files[0].name} has", remedy)
        notes, used = list(rows.notes), {name for _, name in d.named_columns}
        if unused := ", ".join(name for name in rows.names if name not in used):
            notes.append(f"not used: {unused}; every row counts as one interaction")
        for field, name in fields:
            cells = frame[name]
            if cells.dtype == pl.List:
                raise UserError(f"data.{field}={name!r}: holds lists; name a column of single values")
            if name not in forms:
                role = "time" if name == d.time and cells.dtype.is_temporal() else "categorical"
                forms[name] = form_as(role, with_gaps(cells, None), rows.form)
            if name != d.time:
                frame = frame.with_columns(as_names(cells, forms[name]).alias(name))
        frame, rejected = complete_rows(rows, frame, [d.user, d.item])
        check_rejected(str(d.path), rejected, len(frame) + len(rejected), d.max_rejected)
        if len(frame) < 2:
            found = counted(len(frame), "row")
            raise UserError(f"data.path={d.path}: has {found} with a user and an item; give 2 or more")
        return frame, rejected, notes

    def _held_out(self, users: pl.Series, times_N: Array) -> Array:
        """Return held_N, which rows are held out: the latest ones, each user's last one, or random ones."""
        num_rows, split = len(users), self.data.chosen_split
        if split == "random":
            # 11: other draws than those of `sample`, which may have the same seed.
            return random_rows([self.seed, 11], num_rows, self.data.valid_fraction)
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
    files, tested = find_parts({"data.path": data.path, "data.test_path": data.test_path})
    if tested and not files:
        raise UserError(f"data.test_path={data.test_path}: set data.path, too; the sample has no test part")
    return _InteractionSource(data, seed, files, tested)


class _PairDataset(Dataset):
    """The training pairs (user, item). `histories.training_histories` makes batches of users of them."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["train_pairs"])

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        return {"pairs_B2": torch.from_numpy(self.arrays["train_pairs"][index_B]).long()}


class HeldDataset(Dataset):
    """The users of a validation or test part, each with the held-out items to find and the items met before,
    which ranking leaves out. Both lists are padded with the number of items, which is no item's number.

    lists: the part's, see `part_lists`.
    """

    def __init__(self, lists: Mapping[str, Array], num_items: int) -> None:
        self.lists, self.num_items = lists, num_items

    def __len__(self) -> int:
        return len(self.lists["users"])

    def fetch(self, index_B: Array) -> dict[str, Tensor]:
        users_B = self.lists["users"][index_B]

        def of_users(name: str) -> tuple[Array, Array, Array]:
            starts = self.lists[f"{name}_starts"]
            return self.lists[f"{name}_items"], starts[users_B], starts[users_B + 1]

        return {
            **histories(*of_users("history"), self.num_items),
            "held_BH": lists_of(*of_users("held"), self.num_items),
            "seen_BS": lists_of(*of_users("seen"), self.num_items),
        }


def part_of(prepared: Prepared, name: str) -> Dataset:
    """Return a split of prepared interactions: "train" as pairs, the others as users."""
    arrays = prepared.arrays
    if name == "train":
        return _PairDataset(arrays)
    prefix = "test_" if name == "test" else ""
    lists = {list_name: arrays[prefix + list_name] for list_name in _LISTS}
    return HeldDataset(lists | {"users": arrays[f"{name}_users"]}, prepared.info["num_items"])
