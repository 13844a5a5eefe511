"""Recommends items with a trained model: for each user the items with the highest scores, without those that
the user has met in the training or the validation split.

The search is exact, not approximate. It goes block by block over users and items, so memory holds only the
items' vectors and one block of scores. Letters: B users, S items that a user has met, K places of a list, V
items, E width of a vector, N users and places, flat.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.data.batches import Array, lists_of
from dphybrid.data.table.files import find_files, read_files
from dphybrid.data.table.frames import Written, as_frame, table_target, write_frames
from dphybrid.data.table.rows import Rejected
from dphybrid.embedding import rank_rows
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.retrieval import RetrievalDataConfig
from dphybrid.recipes.retrieval.model import RetrievalModel
from dphybrid.training.tensor_file import write_tensors
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.files import write_text

_COLUMNS = {"user": pl.String, "rank": pl.Int32, "item": pl.String, "score": pl.Float32}
"""Columns of recommendations. Ranks start at 1. score: null for an unknown user, who gets popular items."""

_EXPORTED = Path(__file__).parent / "exported" / "recommend.py"
_README = """# {model}

    python recommend.py USER [USER ...]

This needs torch, safetensors and polars. In Python:

    import sys; sys.path.append("this/folder")
    from recommend import Model
    model = Model()
    model.recommend(["USER", ...], k=10)

| file | what it holds |
| --- | --- |
| recommend.py | the program: an exact search over all items, without those that the user has met |
| vectors.safetensors | `users` and `items`, one vector each; a score is their dot product |
| users.parquet | names of users in the order of the vectors, numbers of the items that each has met |
| items.parquet | names of items in the order of the vectors, the most popular first |
"""


@dataclass
class _Recommended(Written):
    """Result of `predict_file`. num_rows: users; unknown: how many of them training does not have."""

    top: int = 10
    unknown: int = 0


class Recommender:
    """A trained two-tower model, with the names of its users and items and the items that each user has
    met."""

    def __init__(
        self, checkpoint: Path, config: ExperimentConfig, build: Callable[[], nn.Module], batch_size: int
    ) -> None:
        """checkpoint: its folder. build: returns the model with the checkpoint's weights. Raises UserError
        for a model of another class."""
        model = build()
        if not isinstance(model, RetrievalModel):
            raise UserError(
                f"{checkpoint}: model.factory made {type_text(model)}, which cannot recommend; "
                "dphybrid.load_model gives the module"
            )
        users, items = (
            pl.read_parquet(checkpoint / "encoder" / f"{name}.parquet", glob=False)
            for name in ("users", "items")
        )
        self.checkpoint, self.batch_size = checkpoint, batch_size
        self.items = items["name"]
        """Names of the items in the order of their numbers, the most popular first."""
        assert isinstance(config.data, RetrievalDataConfig)
        self._config, self._model, self._user = config, model.eval(), config.data.user
        self._users, self._numbers = users, {name: number for number, name in enumerate(users["name"])}
        self._catalog_VF = _ids(items)

    def __repr__(self) -> str:
        return (
            f"<Recommender of {len(self.items):,} items to {len(self._users):,} users, "
            f"{self.checkpoint.parent.parent.name or '.'}/{self.checkpoint.name}>"
        )

    def recommend(self, users: Any = None, k: int = 10) -> pl.DataFrame:
        """Return user, rank (1 to k), item and score: for each user the k best of the items that the user has
        not met in the training or validation split, or fewer if fewer are left.

        users: one, or a list, array or Series of them; None: all users that have training rows. Unknown users
        get the most popular items, without a score. Raises UserError for a k below 1.
        """
        if k < 1:
            raise UserError(f"k={k}: give 1 or more items per user")
        if users is None:
            users = self._users["name"]
        elif isinstance(users, str) or not isinstance(users, Iterable):  # such as a number of numpy
            users = [users]
        # Names are texts in the encoder, also names that are numbers. The empty frame gives the columns when
        # there are no users.
        names = [self._name(user) for user in users]
        return pl.concat([pl.DataFrame(schema=_COLUMNS), *self._frames(names, k)])

    def predict(self, rows: object) -> pl.DataFrame:
        """Return recommendations for the users in a table. rows: a frame or a dict of columns; the column of
        users must have the same name as in training. Raises UserError if it is missing."""
        frame = as_frame(rows, "the rows").lazy().collect()
        if self._user not in frame.columns:
            raise UserError(f"the rows have no column {self._user!r} with users; add it")
        return self.recommend(frame[self._user].drop_nulls())

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
        names, rejected = self._users_of(str(path), files, values)
        done.num_rejected = len(rejected)
        done.num_rows, done.unknown = len(names), sum(name not in self._numbers for name in names)

        def frames() -> Iterator[pl.DataFrame]:
            for number, frame in enumerate(self._frames(names, top)):
                if on_progress:
                    on_progress("recommend items", min(len(names), number * self.batch_size), len(names))
                yield frame

        write_frames(frames(), _COLUMNS, target, rejected)
        return done

    @torch.inference_mode()
    def export(self, folder: Path) -> None:
        """Write vectors and names of all users and items, and recommend.py, which works without dphybrid."""
        blocks = _ids(self._users).split(self.batch_size)
        vectors = {"users": torch.cat([self._model.users(block).cpu() for block in blocks])}
        write_tensors(
            folder / "vectors.safetensors", {**vectors, "items": self._model.catalog(self._catalog_VF)}
        )
        self._users.select("name", "seen").write_parquet(folder / "users.parquet")
        self.items.to_frame().write_parquet(folder / "items.parquet")
        shutil.copyfile(_EXPORTED, folder / _EXPORTED.name)
        write_text(folder / "README.md", _README.format(model=self))

    def told(self, done: _Recommended) -> list[str]:
        """Return lines for the console: how many users got recommendations, and how many of them are
        unknown."""
        lines = [
            f"The {counted(done.top, 'best item')} for {counted(done.num_rows, 'user')}: {done.out}",
            "Hidden: the items that a user has in the training or the validation split",
        ]
        if done.unknown:
            users = counted(done.unknown, "user")
            lines.append(f"Without a training row: {users}, given the most popular items without a score")
        return lines + done.told()

    def _users_of(
        self, path: str, files: Sequence[Path], values: dict[str, object]
    ) -> tuple[list[str], list[Rejected]]:
        """Return the users in the files, each once, and the rows that cannot be read."""
        known = self._config.data.model_dump() | {"path": path}
        data = build_config({"recipe": self._config.recipe, "data": known | values}).data
        assert isinstance(data, RetrievalDataConfig)
        # A dict as a set that keeps the order of the files.
        found: dict[str, None] = {}
        rejected: list[Rejected] = []
        for rows in read_files(files, data.reading, rejected):
            if data.user not in rows.names:
                raise UserError(
                    f"{rows.file}: has no column {data.user!r} with users; columns: {', '.join(rows.names)}"
                )
            users = rows.cells[data.user].drop_nulls().unique(maintain_order=True)
            found |= dict.fromkeys(map(self._name, users.to_list()))
        return list(found), rejected

    def _name(self, user: object) -> str:
        """Return a user's name; 7.0, as pandas writes 7 beside a missing value, is the known user 7."""
        name = str(user)
        return name.removesuffix(".0") if isinstance(user, float) and name not in self._numbers else name

    @torch.inference_mode()
    def _frames(self, names: Sequence[str], k: int) -> Iterator[pl.DataFrame]:
        """Yield the recommendations of `batch_size` users at a time."""
        if not names:
            return
        num_items = len(self.items)
        catalog_VE = self._model.catalog(self._catalog_VF)
        for start in range(0, len(names), self.batch_size):
            part = names[start : start + self.batch_size]
            known_B = np.array([self._numbers.get(name, -1) for name in part])
            # The most popular items, for unknown users; those of known users are replaced below.
            items_BK = np.tile(np.arange(min(k, num_items)), (len(part), 1))
            scores_BK = np.full(items_BK.shape, np.nan, np.float32)
            if len(rows := np.flatnonzero(known_B >= 0)):
                users = self._users[known_B[rows]]
                users_BE = self._model.users(_ids(users))
                seen_BS = _padded(users["seen"], num_items)
                best = rank_rows(users_BE, catalog_VE, hidden_QS=seen_BS, k=items_BK.shape[1])
                items_BK[rows], scores_BK[rows] = best.rows_QK.cpu(), best.scores_QK.cpu()
            yield self._frame(part, items_BK, scores_BK)

    def _frame(self, names: Sequence[str], items_BK: Array, scores_BK: Array) -> pl.DataFrame:
        # -1 where a user has met so many items that fewer than k are left.
        is_item_N = items_BK.ravel() >= 0
        ranks_BK = np.broadcast_to(np.arange(1, items_BK.shape[1] + 1), items_BK.shape)
        columns = {
            "user": pl.Series(names, dtype=pl.String).gather(
                np.repeat(np.arange(len(names)), items_BK.shape[1])
            ),
            "rank": ranks_BK.ravel(),
            # clip: -1 is no place to gather from; the filter drops these rows.
            "item": self.items.gather(items_BK.ravel().clip(0)),
            "score": pl.Series(scores_BK.ravel()).fill_nan(None),
        }
        return pl.DataFrame(columns, schema=_COLUMNS).filter(pl.Series(is_item_N))


def _ids(rows: pl.DataFrame) -> torch.Tensor:
    return torch.from_numpy(rows["ids"].to_numpy().astype(np.int64))


def _padded(lists: pl.Series, none: int) -> torch.Tensor:
    """Return lists of item numbers as (B, longest), padded with `none`."""
    starts = np.concatenate([[0], np.cumsum(lists.list.len().to_numpy(), dtype=np.int64)])
    return lists_of(starts, lists.explode().to_numpy(), np.arange(len(lists)), none)
