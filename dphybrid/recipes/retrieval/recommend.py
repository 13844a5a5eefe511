"""Recommends items with a trained model: for each user the items with the highest scores, without those that
the user has met in the training or the validation split; also to people who were not in training, by the
items that they have met.

One function, `Recommender._lists`, makes lists of people: their names, and what they have met besides what
training knows. Names, frames, files and later events become such people. The search is exact, not
approximate. It goes block by block over users and items, so memory holds only the items' vectors and one
block of scores. Letters: B users, S items that a user has met, K places of a list, N users and places, flat.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.data.batches import Array
from dphybrid.data.foreign import misread
from dphybrid.data.table.files import Rows, find_files
from dphybrid.data.table.frames import (
    Written,
    as_frame,
    new_rows,
    table_target,
    write_frames,
)
from dphybrid.data.table.values import Form, as_names, in_time, typed
from dphybrid.embedding import rank_rows
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.lists import lists_of
from dphybrid.recipes.retrieval import RetrievalDataConfig
from dphybrid.recipes.retrieval.data import HeldDataset, part_lists
from dphybrid.recipes.retrieval.histories import HistoryModel, histories
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.threads import use_num_threads

_COLUMNS = {"user": pl.String, "rank": pl.Int32, "item": pl.String, "score": pl.Float32}
"""Columns of recommendations. Ranks start at 1. score: null for an unknown user, who gets popular items."""
_ITEMS = pl.List(pl.Int64)


@dataclass
class _Recommended(Written):
    """Result of `predict_file`. num_rows: users; unknown: how many of them have no item that training knows,
    and no training row."""

    top: int = 10
    unknown: int = 0


class Recommender:
    """A trained model, with the names of its users and items and the items that each user has
    met."""

    def __init__(
        self, checkpoint: Path, config: ExperimentConfig, build: Callable[[], nn.Module], batch_size: int
    ) -> None:
        """checkpoint: its folder. build: returns the model with the checkpoint's weights. Raises UserError
        for a model of another class."""
        model = build()
        if not isinstance(model, HistoryModel):
            raise UserError(
                f"{checkpoint}: model.factory made {type_text(model)}, which cannot recommend; "
                "dphybrid.load_model gives the module"
            )
        assert isinstance(config.data, RetrievalDataConfig)
        d, self.batch_size = config.data, batch_size
        self._recipe, self._data, self._model = config.recipe, d, model.eval()
        with misread(checkpoint / "encoder"):
            users, items = (
                pl.read_parquet(checkpoint / "encoder" / f"{name}.parquet", glob=False)
                for name in ("users", "items")
            )
            forms = read_state(checkpoint).info["forms"]
            self._forms = {name: Form(**forms[name]) for name in (d.user, d.item, d.time) if name is not None}
            self._users, history = users["name"], users["history"].cast(_ITEMS)
            self.items = items["name"]
            """Names of the items in the order of their numbers, the most popular first."""
            if not history.explode().drop_nulls().is_between(0, len(items) - 1).all():
                raise ValueError("column history of users.parquet has items that items.parquet lacks")
            if len(items) != model.inputs.num_rows - 1:
                raise ValueError(f"items.parquet has {len(items)} items, others than the model")
        self._numbers = {name: number for number, name in enumerate(self._users)}
        self._item_numbers = {name: number for number, name in enumerate(self.items)}
        # The last list is that of all users whom training does not know.
        self._history = pl.concat([history, pl.Series([[]], dtype=_ITEMS)])

    def recommend(self, users: Any = None, k: int = 10, *, history: Any = None) -> pl.DataFrame:
        """Return user, rank (1 to k), item and score: for each user the k best of the items that the user has
        not met, or fewer if fewer are left.

        users: one, or a list, array or Series of them; None: all users that have training rows. history: the
        items that the user has met, in their order, behind those that training knows; for a list of users a
        list of such lists; without users that of somebody new. A user without a known item gets the most
        popular items, without a score. Raises UserError for a k below 1.
        """
        if k < 1:
            raise UserError(f"k={k}: give 1 or more items per user")
        if users is None and history is None:
            users = self._users
        elif users is None or _is_single(users):
            users, history = ["" if users is None else users], None if history is None else [history]
        names, new = self._names(users, self._data.user).fill_null(""), None
        if history is not None:
            lists = [] if _is_single(history) else list(history)
            if len(lists) != len(names) or any(map(_is_single, lists)):
                raise UserError(f"history: give each of {counted(len(names), 'user')} a list of items")
            known = [self._item_ids(self._names(items, self._data.item)) for items in lists]
            new = pl.Series([ids[ids >= 0].tolist() for ids in known], dtype=_ITEMS)
        return self._whole(self._people(names, new), k)

    def predict(self, rows: object) -> pl.DataFrame:
        """Return recommendations for the users in a table. rows: a frame or a dict of columns; the column of
        users must have the same name as in training. If the table has the column of items, too, its rows are
        events, in the order of data.time's column or else of the rows: those that training lacks
        are added to what the model knows of a user. Raises UserError if the column of users is missing."""
        frame = as_frame(rows, "the rows").lazy().collect()
        return self._whole(self._from_events(self._events(frame, self._data)), 10)

    def _events(self, rows: pl.DataFrame, d: RetrievalDataConfig) -> pl.DataFrame:
        """Return the rows that have a user: its name, and the item's number (-1: none that training knows),
        in the order of their times. d: has the names of the columns. Raises UserError if that of the users is
        missing."""
        if d.user not in rows.columns:
            raise UserError(f"the rows have no column {d.user!r} with users; add it, or name it as data.user")
        numbers, order, trained = np.full(len(rows), -1), np.arange(len(rows)), self._data
        if d.item in rows.columns:
            numbers = self._item_ids(self._names(rows[d.item], trained.item))
        if d.time in rows.columns and trained.time is not None:
            times = typed(rows[d.time], self._forms[trained.time], trained.no_value)
            if times.count():
                order = np.argsort(in_time(times, f"data.time={d.time!r}"), kind="stable")
        events = pl.DataFrame({"user": self._names(rows[d.user], trained.user), "item": numbers})
        return events[order].drop_nulls("user")

    def _from_events(self, events: pl.DataFrame) -> pl.DataFrame:
        """Return the people of `_events`, each once, with the items that training does not have of them."""
        people = self._people(events["user"].unique(maintain_order=True))
        known = people.select("user", item=self._history.gather(people["number"])).explode("item")
        new = events.filter(pl.col("item") >= 0).join(known, ["user", "item"], "anti", maintain_order="left")
        lists = new.group_by("user", maintain_order=True).agg(new="item")
        joined = people.select("user").join(lists, "user", "left", maintain_order="left")
        return people.with_columns(new=joined["new"].fill_null([]))

    def held(self, rows: object) -> tuple[HeldDataset, list[str]]:
        """Return the users of later interactions with the items to find, as a test part has them, and what is
        left out. rows: a frame with the columns of users and items, or the path of files. Raises UserError
        without these columns, and if there is nothing to find."""
        d = self._data
        if isinstance(rows, str | Path):
            with new_rows(find_files(str(rows), "data.path"), d, [d.user, d.item], whole=True) as read:
                frame = _used(read, d)
        else:
            frame = as_frame(rows, "the rows").lazy().collect()
        if d.item not in frame.columns:
            raise UserError(f"the rows have no column {d.item!r}; add it")
        events, num_users = self._events(frame, d), len(self._users)
        users_N = self._people(events["user"])["number"].to_numpy()
        asked_N2 = np.stack([np.where(users_N < num_users, users_N, -1), events["item"].to_numpy()], 1)
        starts, items = _flat(self._history)
        met_N2 = np.stack([np.repeat(np.arange(num_users + 1), np.diff(starts)), items], 1)
        sizes = num_users, len(self.items)
        lists, texts = part_lists(met_N2, asked_N2, sizes, d.exclude_seen, "the rows")
        return HeldDataset(lists, len(self.items)), ["; ".join([counted(len(events), "row"), *texts])]

    def predict_file(
        self,
        path: str | Path,
        out: str | Path,
        on_progress: Callable[[str, int, int], None] | None = None,
        keep: Sequence[str] = (),
        threshold: float | None = None,
        top: int = 10,
        **values: object,
    ) -> _Recommended:
        """Write recommendations for the users in `path` (file, folder or pattern), each user once, to a
        .parquet or .csv file.

        values: fields of the config's data section, if the new files have another format (user, header,
        delimiter, ...). keep, threshold: for recipes that score rows; refused here. Raises UserError for
        files without the column of users and then leaves no file at `out`. OUT.rejected.jsonl lists the rows
        that cannot be read, with the reason.
        """
        if keep or threshold is not None:
            raise UserError(
                "--keep, --threshold: only for recipes that score rows; recommendations have user, rank, "
                "item and score"
            )
        if top < 1:
            raise UserError(f"--top {top}: give 1 or more items per user")
        # Before any work, so that a target that cannot be written costs none.
        files = find_files(str(path), "data.path")
        done = _Recommended(table_target(out, files), top=top)
        section = self._data.model_dump() | {"path": str(path)} | values
        data: Any = build_config({"recipe": self._recipe, "data": section}).data
        with new_rows(files, data, [data.user]) as rows:
            people = self._from_events(self._events(_used(rows, data), data))
        done.num_rows, done.num_rejected = len(people), len(rows.rejected)
        done.unknown = int((~self._has_vector(people)).sum())
        write_frames(self._lists(people, top, on_progress), _COLUMNS, done.out, rows.rejected)
        return done

    def summary(self, done: _Recommended) -> list[str]:
        """Return lines for the console: how many users got recommendations, and how many of them are
        unknown."""
        lines = [f"The {counted(done.top, 'best item')} for {counted(done.num_rows, 'user')}: {done.out}"]
        if done.unknown:
            users = counted(done.unknown, "user")
            lines.append(f"Without a known item: {users}, given the most popular items without a score")
        return lines + done.summary()

    def _names(self, values: Any, column: str) -> pl.Series:
        """Return the names of users or items in the form that training settled; null for no value."""
        cells = values if isinstance(values, pl.Series) else list(values)
        cells = as_frame({column: cells}, "the names").lazy().collect()[column]
        return as_names(cells, self._forms[column], self._data.no_value)

    def _item_ids(self, names: pl.Series) -> Array:
        return np.fromiter((self._item_numbers.get(name, -1) for name in names), np.int64, len(names))

    def _people(self, names: pl.Series, new: pl.Series | None = None) -> pl.DataFrame:
        """Return people by their names: user, number in training (behind the last one: unknown), and new, the
        numbers of the items met besides those that training knows (None: none)."""
        unknown = len(self._users)
        numbers = np.fromiter((self._numbers.get(name, unknown) for name in names), np.int64, len(names))
        if new is None:
            new = pl.Series([[]], dtype=_ITEMS).new_from_index(0, len(names))
        return pl.DataFrame({"user": names, "number": numbers, "new": new})

    def _has_vector(self, people: pl.DataFrame) -> Array:
        """Return whether each user can be scored: by a training row, or by an item that training knows."""
        known_B: Array = people["number"].to_numpy() < len(self._users)
        return known_B | (people["new"].list.len().to_numpy() > 0)

    def _whole(self, people: pl.DataFrame, k: int) -> pl.DataFrame:
        return pl.concat([pl.DataFrame(schema=_COLUMNS), *self._lists(people, k)])

    @torch.inference_mode()
    def _lists(
        self, people: pl.DataFrame, k: int, on_progress: Callable[[str, int, int], None] | None = None
    ) -> Iterator[pl.DataFrame]:
        """Yield the recommendations of `batch_size` people at a time. people: of `_people`."""
        use_num_threads()
        for number, part in enumerate(people.iter_slices(self.batch_size) if len(people) else ()):
            if on_progress:
                on_progress("recommend items", number * self.batch_size, len(people))
            # The most popular items, for unknown users; those of the others are replaced below.
            items_BK = np.tile(np.arange(min(k, len(self.items))), (len(part), 1))
            scores_BK = np.full(items_BK.shape, np.nan, np.float32)
            if len(rows := np.flatnonzero(self._has_vector(part))):
                scored = part[rows]
                starts, items = _flat(self._history.gather(scored["number"]).list.concat(scored["new"]))
                met = items, starts[:-1], starts[1:]
                batch = histories(*met, len(self.items))
                users_BE = self._model.vectors(batch["history_BL"], batch["lengths_B"])
                hidden_BS = lists_of(*met, -1) if self._data.exclude_seen else None
                best = rank_rows(users_BE, self._model.catalog(), hidden_QS=hidden_BS, k=items_BK.shape[1])
                items_BK[rows], scores_BK[rows] = best.rows_QK.cpu(), best.scores_QK.cpu()
            # -1 where a user has met so many items that fewer than k are left.
            user_N, place_N = np.nonzero(items_BK >= 0)
            # Made by indexing: for one user, polars' engine (gather, fill_nan, filter) takes a fifth of the
            # time.
            columns = {
                "user": part["user"][user_N],
                "rank": pl.Series(place_N.astype(np.int32) + 1),
                "item": self.items[items_BK[user_N, place_N]],
                "score": pl.Series(scores_BK[user_N, place_N], nan_to_null=True),
            }
            yield pl.DataFrame(columns)


def _is_single(value: object) -> bool:
    """Return whether a value is one name, such as a text or a number of numpy, not several."""
    return isinstance(value, str) or not isinstance(value, Iterable)


def _used(rows: Rows, d: RetrievalDataConfig) -> pl.DataFrame:
    """Return the columns of users, items and times, as far as files have them."""
    return rows.table([name for name in rows.names if name in (d.user, d.item, d.time)])


def _flat(lists: pl.Series) -> tuple[Array, Array]:
    """Return lists of item numbers as (starts, items) for `lists_of`."""
    starts = np.concatenate([[0], np.cumsum(lists.list.len().to_numpy(), dtype=np.int64)])
    return starts, lists.explode().drop_nulls().to_numpy()  # an empty list explodes to a null
