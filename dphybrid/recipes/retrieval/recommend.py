"""Recommends items with a trained model: for each user the items with the highest scores, without those that
the user has met in the training or the validation split; also to people who were not in training, by the
items that they have met.

The search is exact, not approximate. It goes block by block over users and items, so memory holds only the
items' vectors and one block of scores. Letters: B users, S items that a user has met, K places of a list, V
items, E width of a vector, N users and places, flat.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Self

import numpy as np
import polars as pl
import torch
from polars.selectors import by_name
from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.data.batches import Array, lists_of
from dphybrid.data.foreign import misread
from dphybrid.data.table.files import Rejected, find_files, read_rows
from dphybrid.data.table.frames import Written, as_frame, of_objects, rows_of, table_target, write_frames
from dphybrid.data.table.values import Form, as_names, in_time, typed
from dphybrid.embedding import rank_rows
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.retrieval import RetrievalDataConfig
from dphybrid.recipes.retrieval.data import HeldDataset, to_find
from dphybrid.recipes.retrieval.histories import HistoryModel, histories
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.files import scratch_folder
from dphybrid.util.threads import use_num_threads

_COLUMNS = {"user": pl.String, "rank": pl.Int32, "item": pl.String, "score": pl.Float32}
"""Columns of recommendations. Ranks start at 1. score: null for an unknown user, who gets popular items."""


@dataclass
class _Recommended(Written):
    """Result of `predict_file`. num_rows: users; unknown: how many of them training does not have."""

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
        self.checkpoint, self.batch_size = checkpoint, batch_size
        with misread(checkpoint / "encoder"):
            self._read(config, model)

    def _read(self, config: ExperimentConfig, model: HistoryModel) -> None:
        """Read the names and features of users and items from the checkpoint."""
        users, items = (
            pl.read_parquet(self.checkpoint / "encoder" / f"{name}.parquet", glob=False)
            for name in ("users", "items")
        )
        for column in {"seen", "history"}.intersection(users.columns):
            met = users[column].explode().drop_nulls()
            if not met.is_between(0, len(items) - 1).all():
                raise ValueError(f"column {column} of users.parquet has items that items.parquet lacks")
        self.items = items["name"]
        """Names of the items in the order of their numbers, the most popular first."""
        assert isinstance(config.data, RetrievalDataConfig)
        self._config, self._model = config, model.eval()
        info = read_state(self.checkpoint).info
        self._user, self._item = config.data.user, config.data.item
        self._reading, self._time = config.data, config.data.time
        columns = [self._user, self._item, *([self._time] if self._time else [])]
        self._forms = {name: Form(**info["forms"][name]) for name in columns}
        self._no_value = self._reading.no_value
        self._users, self._numbers = users, {name: number for number, name in enumerate(users["name"])}
        self._item_numbers = {name: number for number, name in enumerate(self.items)}
        self._catalog_VF, self._users_UF = _ids(items), _ids(users)
        self._excludes_seen = config.data.exclude_seen
        self._items_VE: torch.Tensor | None = None
        self._seen = _Lists.of(users["seen"])
        self._history = _Lists.of(users["history"])
        padding_F = [count - 1 for count in model.inputs.num_rows.values()]
        self._inputs_PF = np.vstack([self._catalog_VF.numpy(), padding_F])
        # A last row for users whom training does not know, whose number is -1.
        features = model.users.num_rows.values() if model.users else ()
        unknown_G = torch.tensor([[count - 1 for count in features]], dtype=torch.int64)
        self._features_RG = torch.cat([self._users_UF[:, 1:], unknown_G])

    def __repr__(self) -> str:
        return (
            f"<Recommender of {len(self.items):,} items to {len(self._users):,} users, "
            f"{self.checkpoint.parent.parent.name or '.'}/{self.checkpoint.name}>"
        )

    def recommend(self, users: Any = None, k: int = 10, *, history: Any = None) -> pl.DataFrame:
        """Return user, rank (1 to k), item and score: for each user the k best of the items that the user has
        not met, or fewer if fewer are left.

        users: one, or a list, array or Series of them; None: all users that have training rows. history: the
        items that a user has met, in their order, or a list of such lists, one for each of `users` (None: one
        list of a nameless user); they come behind those that training knows. A user without a known item gets
        the most popular items, without a score. Raises UserError for a k below 1.
        """
        if k < 1:
            raise UserError(f"k={k}: give 1 or more items per user")
        if users is None:
            users = self._users["name"] if history is None else [""]
        elif isinstance(users, str) or not isinstance(users, Iterable):  # such as a number of numpy
            users = [users]
        people = self._people(self._names(users, self._user).fill_null(""))
        if history is not None:
            people = replace(people, new=self._given_histories(len(people.names), history))
        return self._table(people, k)

    def _given_histories(self, num_users: int, history: Any) -> "_Lists":
        """Return the known items of each of `num_users` users."""
        lists = [
            list(items) if isinstance(items, Iterable) and not isinstance(items, str) else items
            for items in history
        ]
        if not any(isinstance(items, list) for items in lists):
            lists = [lists]
        if len(lists) != num_users:
            raise UserError(
                f"history: has {counted(len(lists), 'list')} for {counted(num_users, 'user')}; give one each"
            )
        numbers = [
            [self._item_numbers.get(name, -1) for name in self._names(items, self._item)] for items in lists
        ]
        return _Lists.of(pl.Series(numbers, dtype=pl.List(pl.Int64))).known

    def predict(self, rows: object) -> pl.DataFrame:
        """Return recommendations for the users in a table. rows: a frame or a dict of columns; the column of
        users must have the same name as in training. If the table has the column of items, too, its rows are
        events, in the order of data.time's column or else of the rows: those that training lacks
        are added to what the model knows of a user. Raises UserError if the column of users is missing."""
        frame = as_frame(rows, "the rows").lazy().collect()
        if self._user not in frame.columns:
            raise UserError(f"the rows have no column {self._user!r} with users; add it")
        if self._item in frame.columns:
            return self._table(self._from_events(self._events(frame)), 10)
        return self.recommend(frame[self._user].drop_nulls())

    def _events(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows that have a user: its name, the item's number (-1: none that training knows), and
        the time as a number (None: unknown)."""
        known = self._names(rows[self._user], self._user)
        numbers = np.full(len(rows), -1)
        times = pl.Series([None] * len(rows), dtype=pl.Float64)
        if self._item in rows.columns:
            names = self._names(rows[self._item], self._item)
            numbers = np.fromiter((self._item_numbers.get(name, -1) for name in names), np.int64, len(names))
            if self._time in rows.columns:
                values = typed(rows[self._time], self._forms[self._time], self._no_value)
                if values.count():
                    times = pl.Series(in_time(values, f"data.time={self._time!r}"))
        found = pl.DataFrame({"user": known, "item": numbers, "time": times}).drop_nulls("user")
        return found if self._item in rows.columns else found.unique("user", maintain_order=True)

    def _from_events(self, rows: pl.DataFrame) -> "_People":
        """Return the users of `_events`, each once, with the items of the events that training does not have,
        in the order of their times, or of the rows."""
        people = self._people(rows["user"].unique(maintain_order=True))
        if rows["time"].null_count() < len(rows):
            rows = rows[np.argsort(rows["time"].fill_null(-np.inf).to_numpy(), kind="stable")]
        # Of equal events, training has the first ones.
        known, both = self._history.rows(people.numbers_B), ["user", "item"]
        of_user = people.names.gather(np.repeat(np.arange(len(known)), known.lengths))
        has = pl.DataFrame({"user": of_user, "item": known.items}).group_by(both).len("known")
        rows = rows.with_columns(before=pl.int_range(pl.len()).over(both))
        rows = rows.join(has, both, "left", maintain_order="left")
        rows = rows.filter(pl.col("before") >= pl.col("known").fill_null(0))
        lists = rows.group_by("user", maintain_order=True).agg("item")
        items = people.names.to_frame("user").join(lists, "user", "left", maintain_order="left")["item"]
        return replace(people, new=_Lists.of(items.fill_null([])).known)

    def held(self, rows: object) -> tuple[HeldDataset, list[str]]:
        """Return the users of later interactions with the items to find, as a test part has them, and what is
        left out. rows: a frame with the columns of users and items, or the path of files. Raises UserError
        without these columns, and if there is nothing to find."""
        if isinstance(rows, str | Path):
            with rows_of(str(rows), self._reading, [self._user, self._item]) as found:
                frame = found.frame.collect()
        else:
            frame = as_frame(rows, "the rows").lazy().collect()
        if missing := {self._user, self._item}.difference(frame.columns):
            raise UserError(f"the rows have no column {min(missing)!r}; add it")
        events = self._events(frame)
        pairs_N2 = np.stack([self._people(events["user"]).numbers_B, events["item"].to_numpy()], 1)
        seen, history, num_users = self._seen, self._history, len(self._users)
        held_starts, held_items = to_find(pairs_N2, (seen.starts, seen.items), num_users)
        users, items = ((pairs_N2[:, place] < 0).sum() for place in (0, 1))
        known = (pairs_N2 >= 0).all(1).sum()
        note = (
            f"{counted(len(events), 'row')} with {counted(len(held_items), 'item')} to find; not evaluated: "
            f"{counted(users, 'row')} of unseen users, {items:,} of unseen items, "
            f"{known - len(held_items):,} of repeated pairs"
        )
        if not len(held_items):
            raise UserError(f"there is nothing to find in {note}")
        arrays = {
            "valid_users": np.flatnonzero(np.diff(held_starts)),
            "users_UF": self._users_UF.numpy(),
            "items_VF": self._catalog_VF.numpy(),
            "inputs_PF": self._inputs_PF,
            "held_starts": held_starts,
            "held_items": held_items,
            "seen_starts": seen.starts,
            "seen_items": seen.items,
            "history_starts": history.starts,
            "history_items": history.items,
        }
        return HeldDataset(arrays, "valid"), [note]

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
        target = table_target(out, files)
        done = _Recommended(target, top=top)
        people, rejected = self._people_of(str(path), files, values)
        num_users = done.num_rows = len(people.names)
        done.num_rejected, done.unknown = len(rejected), int((~self._has_vector(people)).sum())

        def frames() -> Iterator[pl.DataFrame]:
            for number, frame in enumerate(self._frames(people, top)):
                if on_progress:
                    on_progress("recommend items", min(num_users, number * self.batch_size), num_users)
                yield frame

        write_frames(frames(), _COLUMNS, target, rejected)
        return done

    def summary(self, done: _Recommended) -> list[str]:
        """Return lines for the console: how many users got recommendations, and how many of them are
        unknown."""
        lines = [
            f"The {counted(done.top, 'best item')} for {counted(done.num_rows, 'user')}: {done.out}",
        ]
        if self._excludes_seen:
            lines.append(
                "Hidden: the items that a user has in the training or the validation split, or in the file"
            )
        if done.unknown:
            users = counted(done.unknown, "user")
            lines.append(f"Without a known item: {users}, given the most popular items without a score")
        return lines + done.summary()

    def _people_of(
        self, path: str, files: Sequence[Path], values: dict[str, object]
    ) -> "tuple[_People, list[Rejected]]":
        """Return the users in the files, each once, with the items of their new events (none where the files
        have no column of items), and the rows that cannot be read."""
        known = self._config.data.model_dump() | {"path": path, "user": self._user, "item": self._item}
        data = build_config({"recipe": self._config.recipe, "data": known | values}).data
        assert isinstance(data, RetrievalDataConfig)
        with scratch_folder(Path(gettempdir()), "dphybrid-rows-") as scratch:
            rows = read_rows(files, data, scratch, [data.user], as_text=True)
            if data.user not in rows.names:
                raise UserError(
                    f"{files[0]}: has no column {data.user!r} with users; columns: {', '.join(rows.names)}"
                )
            renamed = {data.user: self._user, data.item: self._item}
            renamed |= {data.time: self._time} if data.time and self._time else {}
            frame = rows.frame.select(by_name(*renamed, require_all=False)).collect()
        frame = frame.rename(renamed, strict=False)
        return self._from_events(self._events(frame)), rows.rejected

    def _names(self, values: Any, side: str) -> pl.Series:
        """Return the names of users or items in the form that training settled; null for no value."""
        cells = values if isinstance(values, pl.Series) else of_objects(side, list(values))
        return as_names(cells, self._forms[side], self._no_value)

    def _people(self, found: pl.Series) -> "_People":
        """Return users by their names, with no items but those that training knows."""
        numbers = np.fromiter((self._numbers.get(name, -1) for name in found), np.int64, len(found))
        return _People(found, numbers, _Lists.none(len(found)))

    def _has_vector(self, people: "_People") -> Array:
        """Return whether each user can be scored: by a training row, or by an item that training knows."""
        return (people.numbers_B >= 0) | (people.new.lengths > 0)

    def _items(self, device: torch.device) -> torch.Tensor:
        """Return the items' vectors (V, E), to be multiplied with users' vectors on a device."""
        if device.type != "cpu":
            return self._model.catalog(self._catalog_VF)
        if self._items_VE is None:
            # Column by column, so that the product with one user's vector reads memory at its full speed: it
            # takes 60 % of the time.
            self._items_VE = self._model.catalog(self._catalog_VF).T.contiguous().T
            self._model.eval()  # which drops the model's copy
        return self._items_VE

    def _vectors(self, people: "_People") -> torch.Tensor:
        """Return the users' vectors."""
        met = self._history.rows(people.numbers_B) + people.new
        batch = histories(met.starts, met.items, np.arange(len(met)), self._inputs_PF, self._model.longest)
        features_BG = self._features_RG[people.numbers_B]
        return self._model.vectors(batch["history_BLF"], batch["lengths_B"], features_BG)

    def _table(self, people: "_People", k: int) -> pl.DataFrame:
        """Return the recommendations of all users."""
        frames = list(self._frames(people, k))
        return pl.concat(frames) if frames else pl.DataFrame(schema=_COLUMNS)

    @torch.inference_mode()
    def _frames(self, people: "_People", k: int) -> Iterator[pl.DataFrame]:
        """Yield the recommendations of `batch_size` users at a time."""
        if not len(people.names):
            return
        use_num_threads()
        num_items = len(self.items)
        has_vector_U = self._has_vector(people)
        for start in range(0, len(people.names), self.batch_size):
            names = people.names[start : start + self.batch_size]
            # The most popular items, for unknown users; those of the others are replaced below.
            items_BK = np.tile(np.arange(min(k, num_items)), (len(names), 1))
            scores_BK = np.full(items_BK.shape, np.nan, np.float32)
            if len(rows := np.flatnonzero(has_vector_U[start : start + self.batch_size])):
                scored = people.rows(start + rows)
                users_BE, hidden_BS = self._vectors(scored), None
                if self._excludes_seen:
                    hidden_BS = (self._seen.rows(scored.numbers_B) + scored.new).padded()
                items_VE = self._items(users_BE.device)
                best = rank_rows(users_BE, items_VE, hidden_QS=hidden_BS, k=items_BK.shape[1])
                items_BK[rows], scores_BK[rows] = best.rows_QK.cpu(), best.scores_QK.cpu()
            yield self._frame(names, items_BK, scores_BK)

    def _frame(self, names: pl.Series, items_BK: Array, scores_BK: Array) -> pl.DataFrame:
        # -1 where a user has met so many items that fewer than k are left.
        user_N, place_N = np.nonzero(items_BK >= 0)
        # Made by indexing: for one user, polars' engine (gather, fill_nan, filter) takes a fifth of the time.
        columns = {
            "user": names[user_N],
            "rank": pl.Series(place_N.astype(np.int32) + 1),
            "item": self.items[items_BK[user_N, place_N]],
            "score": pl.Series(scores_BK[user_N, place_N], nan_to_null=True),
        }
        return pl.DataFrame(columns)


def later_interactions(
    checkpoint: Path, config: ExperimentConfig, model: nn.Module, rows: object
) -> tuple[HeldDataset, list[str]]:
    """Return `Recommender.held` of a checkpoint's model."""
    return Recommender(checkpoint, config, lambda: model, 1).held(rows)


def _ids(rows: pl.DataFrame) -> torch.Tensor:
    return torch.from_numpy(rows["ids"].to_numpy().astype(np.int64))


@dataclass(frozen=True)
class _Lists:
    """Lists of item numbers: list r is items[starts[r] : starts[r + 1]]."""

    starts: Array
    items: Array

    @classmethod
    def of(cls, lists: pl.Series) -> Self:
        starts = np.concatenate([[0], np.cumsum(lists.list.len().to_numpy(), dtype=np.int64)])
        return cls(starts, lists.explode().drop_nulls().to_numpy())  # an empty list explodes to a null

    @classmethod
    def none(cls, count: int) -> Self:
        """Return empty lists."""
        return cls(np.zeros(count + 1, np.int64), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Array:
        return np.diff(self.starts)

    @property
    def known(self) -> Self:
        """The lists without -1, which stands for an item that training does not have."""
        is_known = self.items >= 0
        return type(self)(np.concatenate([[0], np.cumsum(is_known)])[self.starts], self.items[is_known])

    def rows(self, rows_B: Array) -> Self:
        """Return the lists of these rows; an empty one for row -1."""
        # Not `lengths`, which computes those of all lists. Row -1 reads some number, which does not count.
        lengths_B = np.where(rows_B >= 0, self.starts[rows_B + 1] - self.starts[rows_B], 0)
        starts = np.concatenate([[0], np.cumsum(lengths_B)])
        first_N = np.repeat(self.starts[rows_B] - starts[:-1], lengths_B)
        return type(self)(starts, self.items[first_N + np.arange(starts[-1])])

    def __add__(self, other: Self) -> Self:
        """Return each list followed by the other's list."""
        if not len(other.items):
            return self
        number_B = np.arange(len(self))
        rows = np.concatenate([np.repeat(number_B, self.lengths), np.repeat(number_B, other.lengths)])
        items = np.concatenate([self.items, other.items])[np.argsort(rows, kind="stable")]
        return type(self)(self.starts + other.starts, items)

    def padded(self) -> torch.Tensor:
        """Return the lists as (B, longest), padded with -1."""
        return lists_of(self.starts, self.items, np.arange(len(self)), -1)


@dataclass(frozen=True)
class _People:
    """Users to recommend to: their names, their numbers in training (-1: unknown), and the items that they
    have met besides those that training knows."""

    names: pl.Series
    numbers_B: Array
    new: _Lists

    def rows(self, rows_B: Array) -> "_People":
        return _People(self.names[rows_B], self.numbers_B[rows_B], self.new.rows(rows_B))
