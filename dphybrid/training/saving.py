"""Writes checkpoints in the background and decides which are kept. Training waits only for copies of changed
rows and of dense parameters; a whole table is read while it goes on (`embedding.snapshot`).

A full checkpoint holds each table in one file. A checkpoint between two full ones holds a hard link to the
table file of the last full one, and the rows changed since (see `tensor_file`). Every checkpoint links the
file of a table that nothing has changed, such as a frozen one. Each folder is therefore complete by itself,
whichever other checkpoint is removed.

Letters: U changed rows of a table.
"""

import contextvars
import copy
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from torch import Tensor

from dphybrid.config import CheckpointConfig
from dphybrid.embedding import find_tables
from dphybrid.embedding.snapshot import Snapshot
from dphybrid.embedding.storage import available_memory_bytes, zero_rows
from dphybrid.embedding.weights import all_rows
from dphybrid.training.checkpoint import (
    VALIDATION,
    CheckpointState,
    Progress,
    Stateful,
    Trained,
    complete_checkpoints,
    dense_state,
    flatten_optimizer,
    generator_states,
    read_state,
    step_of,
)
from dphybrid.training.finite import Rows, check_finite
from dphybrid.training.metrics import Task
from dphybrid.training.optimizers import averaged
from dphybrid.training.results import SavingCost
from dphybrid.training.tensor_file import IDS, changed_file, changed_rows, rows_of, table_file, write_tensors
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError
from dphybrid.util.files import making, remove_folder

_MOST_CHANGED = 0.5
"""Largest share of changed bytes for which only changed rows are written. Above it, writing all rows costs
little more."""


@dataclass(frozen=True)
class _Copied:
    """What a checkpoint writes of a table.

    Attributes:
        ids_U: The changed rows, or None for all.
        by_row: Weight and states at these rows; empty for a table whose file is linked as it is.
        whole: States that do not have one entry for each row.
    """

    ids_U: Tensor | None
    by_row: dict[str, Any]
    whole: dict[str, Tensor]

    @property
    def is_linked(self) -> bool:
        """Whether the table's file in the checkpoint before is up to date."""
        return not self.by_row


class CheckpointWriter:
    """Writes the checkpoints of one training to `folder`. A context manager; leaving it waits until all are
    written.

    Args:
        full_every: Every n-th checkpoint is full, the others hold the rows changed since.
        encoder: Folder of the data's encoder, which each checkpoint gets a copy of, so that it can predict
            from raw rows.
        encoder_sums: Expected sha256 of its files, by `encoder/NAME`.
        in_place: Write all rows while training waits: for rows that other processes hold.
    """

    def __init__(
        self,
        folder: Path,
        trained: Trained,
        full_every: int = 1,
        encoder: Path | None = None,
        encoder_sums: Mapping[str, str] = MappingProxyType({}),
        in_place: bool = False,
    ) -> None:
        self._folder, self._trained, self._full_every = folder, trained, full_every
        self._encoder, self._encoder_sums = encoder, encoder_sums
        self._in_place = in_place
        self._changes = trained.rows.track_changes() if trained.rows is not None and not in_place else None
        self._by_hand: set[str] = set()
        self._latest: Path | None = None
        self._since_full = 0
        # A single thread: a checkpoint links files of the one before, which must be complete by then.
        self._thread = ThreadPoolExecutor(1, "dphybrid-checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None or error is failure:
                raise
            # The error of the training itself is raised; this one is only printed.
            print(f"Note: the newest checkpoint could not be written: {failure}", file=sys.stderr, flush=True)
        finally:
            self._thread.shutdown()

    def resumed(self, path: Path, page: CheckpointState) -> None:
        """Continue after the checkpoint `path` was loaded: its changed rows still count as changed since the
        last full one."""
        self._latest, self._since_full = path, page.since_full
        if self._changes is not None:
            changed = {name: changed_rows(path, name) for name in find_tables(self._trained.model)}
            self._changes.restore({name: ids_U for name, ids_U in changed.items() if ids_U is not None})

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises the error of its writing."""
        if self._writing is not None:
            self._writing.result()

    def check(self) -> None:
        """Raise the error of a failed writing, without waiting for one that still runs."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def save(
        self,
        config: Mapping[str, Any],
        facts: Mapping[str, Any],
        stateful: Mapping[str, Stateful] = MappingProxyType({}),
        then: Callable[[SavingCost], None] = lambda _: None,
        first: Callable[[], None] = lambda: None,
    ) -> Path:
        """Start writing a checkpoint of the current state and return its path; `wait` returns when it is
        complete.

        Raises UserError and writes nothing if a weight or a state is NaN or infinite. Also raises the error
        of the previous checkpoint's writing.

        Args:
            config: The experiment's values.
            facts: Further fields of state.json (digests of data, devices).
            stateful: Objects whose states are stored by name, besides progress and random generators.
            first: Called in the writing thread before the checkpoint is written.
            then: Called there with its costs afterwards.
        """
        start = time.perf_counter()
        # One checkpoint at a time: this one links files of the previous one.
        self.wait()
        step, base = self._trained.progress.step, self._latest
        final = self._folder / f"step-{step:06d}"
        copies = self._copies()
        check_finite(self._trained.model, self._trained.dense, _rows_by_name(copies), step, self._folder)
        files, optimizer_page = self._dense()
        # Copied, because state dicts refer to objects that training continues to change.
        states = {name: copy.deepcopy(one.state_dict()) for name, one in stateful.items()}
        written = [copied for copied in copies.values() if not copied.is_linked]
        partly = bool(written) and all(copied.ids_U is not None for copied in written)
        self._since_full = self._since_full + 1 if partly else 0
        page = CheckpointState(
            since_full=self._since_full,
            progress=copy.deepcopy(self._trained.progress),
            config=dict(config),
            optimizer=optimizer_page,
            generators=generator_states(),
            record=states,
            **facts,
        )
        snapshot = self._snapshot(copies)
        if not partly and self._changes is not None:
            self._changes.forget()
        # Before it is written: should that fail, `wait` raises before the next checkpoint links to it.
        self._latest = final
        stall_s = time.perf_counter() - start

        def work() -> None:
            began = time.perf_counter()
            try:
                first()
                written = self._write(final, base, copies, files, page, snapshot)
            finally:
                if snapshot is not None:
                    snapshot.close()
                    if self._trained.rows is not None:
                        self._trained.rows.snapshot = None
            now = time.perf_counter()
            stalled = now - start if self._in_place else stall_s
            then(SavingCost(written_bytes=written, stall_s=stalled, write_s=now - began))

        # In the caller's context, so that lines printed by the thread reach the log of the caller's flow run.
        self._writing = self._thread.submit(contextvars.copy_context().run, work)
        if self._in_place:
            self.wait()
        return final

    def _copies(self) -> dict[str, _Copied]:
        """Return for each table copies of its changed rows; or all rows, not copied, if the changed ones are
        unknown or too many."""
        rows, changes = self._trained.rows, self._changes
        linked, changed = set[str](), dict[str, Tensor | None]()
        # is_dir: a user may have removed the folder whose files would be linked.
        if changes is not None and self._latest is not None and self._latest.is_dir():
            linked = changes.untouched()
            changed = changes.rows() if self._since_full + 1 < self._full_every else {}
        parts: dict[str, _Copied] = {}
        everything, partly = 0, 0.0
        for name, table in find_tables(self._trained.model).items():
            if name in linked:
                parts[name] = _Copied(None, {}, {})
                continue
            by_row, states = {"weight": all_rows(table.weight)}, {}
            if rows is not None and name in rows.tables:
                by_row, states = by_row | rows.row_states(name), rows.states_of(name)
            whole = {key: state.clone() for key, state in states.items() if key not in by_row}
            parts[name] = _Copied(None, by_row, whole)
            everything += (size := sum(tensor.nbytes for tensor in by_row.values()))
            ids_U = changed.get(name)
            partly += math.inf if ids_U is None else size * len(ids_U) / len(by_row["weight"])
        # At most half of the free memory: training continues meanwhile, and its batches need room, too.
        if partly > min(_MOST_CHANGED * everything, available_memory_bytes() / 2):
            return parts
        for name, part in parts.items():
            if (ids_U := changed.get(name)) is not None and not part.is_linked:
                by_row = {key: tensor.index_select(0, ids_U) for key, tensor in part.by_row.items()}
                parts[name] = _Copied(ids_U, by_row, part.whole)
        return parts

    def _snapshot(self, copies: dict[str, _Copied]) -> Snapshot | None:
        """Replace whole tables by stand-ins that keep their present values, so that training can continue."""
        if self._in_place:
            return None
        if self._changes is not None:
            self._by_hand |= self._changes.unknown()
        whole = {name: part for name, part in copies.items() if part.ids_U is None and not part.is_linked}
        trained = {} if self._trained.rows is None else self._trained.rows.tables
        for name in (whole.keys() & self._by_hand) | (whole.keys() - trained.keys()):
            # A change that is no update puts nothing aside. Mapped memory returns to the system once it is
            # freed; ordinary memory would stay with this process, which keeps it for its next step.
            by_row = {
                key: zero_rows(tuple(tensor.shape), tensor.dtype).copy_(tensor)
                for key, tensor in whole.pop(name).by_row.items()
            }
            copies[name] = _Copied(None, by_row, copies[name].whole)
        if not whole:
            return None
        tables = {name: copied.by_row for name, copied in whole.items()}
        snapshot = Snapshot(tables, available_memory_bytes() / 2)
        for name, copied in whole.items():
            copies[name] = _Copied(None, dict(snapshot.tensors(name)), copied.whole)
        if self._trained.rows is not None:
            self._trained.rows.snapshot = snapshot
        return snapshot

    def _dense(self) -> tuple[dict[str, dict[str, Tensor]], Any]:
        """Return copies of the tensors outside the model's tables, by file, and the page of the blocks'
        optimizer."""
        trained = self._trained
        tables = find_tables(trained.model)
        files = {"blocks.safetensors": dense_state(trained.model)}
        page: dict[str, Any] = {}
        if trained.dense is not None:
            files["blocks_optimizer.safetensors"], page = flatten_optimizer(trained.dense.state_dict())
        if (rows := trained.rows) is not None:
            outside = {name: rows.states_of(name) for name in rows.tables if name not in tables}
            extra = {
                f"{name}.{key}": state for name, states in outside.items() for key, state in states.items()
            }
            files |= {"tables/_optimizer.safetensors": extra} if extra else {}
        # Swapped: the blocks' file gets the averaged weights, for prediction, the optimizer's the raw ones.
        with averaged(trained.dense):
            copies = {
                file: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
                for file, tensors in files.items()
            }
        return copies, copy.deepcopy(page)

    def _write(
        self,
        final: Path,
        base: Path | None,
        copies: Mapping[str, _Copied],
        files: Mapping[str, Mapping[str, Tensor]],
        page: CheckpointState,
        snapshot: Snapshot | None,
    ) -> int:
        """Write a checkpoint's folder; return its size in bytes, without linked files. base: the previous
        checkpoint, whose table files are linked."""
        with making(final, replace=True) as partial:
            (partial / "tables").mkdir()
            if page.since_full:
                (partial / "changed").mkdir()
            sums = {name: write_tensors(partial / name, tensors) for name, tensors in files.items()}
            for name, copied in copies.items():
                file = table_file(partial, name)
                key = file.relative_to(partial).as_posix()
                if copied.ids_U is None and not copied.is_linked:
                    sums[key] = write_tensors(file, {**copied.by_row, **copied.whole})
                    continue
                assert base is not None  # without an earlier checkpoint, `_copies` returns all rows
                _link(base / key, file)
                # The linked file is not read again: its checksum is that of the previous page.
                sums[key] = read_state(base).crc32[key]
                if copied.ids_U is None:
                    continue
                changed = {rows_of(part): rows for part, rows in copied.by_row.items()}
                file = changed_file(partial, name)
                key = file.relative_to(partial).as_posix()
                sums[key] = write_tensors(file, {**changed, **copied.whole, IDS: copied.ids_U})
            if snapshot is not None:
                snapshot.check()
            page = page.model_copy(update={"crc32": sums, "sha256": self._copy_encoder(partial / "encoder")})
            page.write(partial / "state.json")
            stats = [path.stat() for path in partial.rglob("*") if path.is_file()]
            return sum(stat.st_size for stat in stats if stat.st_nlink == 1)

    def _copy_encoder(self, target: Path) -> dict[str, str]:
        """Copy the encoder, if there is one; return the sha256 of its files."""
        if (encoder := self._encoder) is None:
            return {}
        target.mkdir()
        sums = dict[str, str]()
        for file in sorted(encoder.iterdir()):
            sums[f"encoder/{file.name}"] = file_digest(shutil.copyfile(file, target / file.name))
        for name, digest in sums.items():
            if self._encoder_sums.get(name, digest) != digest:
                raise UserError(
                    f"{encoder.parent / name}: is damaged (its sha256 differs), so no checkpoint was "
                    f"written; delete {encoder.parent} and prepare the data again"
                )
        return sums


def _link(base: Path, file: Path) -> None:
    try:
        os.link(base, file)
    except OSError:  # a file system without hard links
        shutil.copyfile(base, file)


def _rows_by_name(copies: Mapping[str, _Copied]) -> Iterator[Rows]:
    for table, copied in copies.items():
        for key, rows in copied.by_row.items():
            what = f"table {table}" if key == "weight" else f"row optimizer's {table}.{key}"
            yield what, rows, copied.ids_U


def best_steps(progress: Progress, task: Task, count: int) -> list[int]:
    """Return the steps of the `count` best evaluations, best first; of equal ones the earlier first."""
    metric = f"{VALIDATION}{task.chosen_by or task.metric}"
    rows = [row for row in progress.history if not math.isnan(row[metric])]
    # sort is stable, also with reverse=True: equal values keep their order of time.
    rows.sort(key=lambda row: row[metric], reverse=task.higher_is_better and not task.chosen_by)
    return [int(row["step"]) for row in rows[:count]]


def best_checkpoint(existing: Sequence[Path], progress: Progress, task: Task) -> Path | None:
    """Return the one of the existing checkpoints (oldest first) with the best evaluation, else the newest."""
    by_step = {step_of(path): path for path in existing}
    best = (by_step[step] for step in best_steps(progress, task, len(progress.history)) if step in by_step)
    return next(best, existing[-1] if existing else None)


def prune_checkpoints(
    folder: Path, config: CheckpointConfig, best: Sequence[int], named: Collection[int] = ()
) -> list[Path]:
    """Remove all checkpoints except the `keep_last` newest and those of the steps `best` and `named`; return
    the kept ones, oldest first.

    If several are kept and all of them link the same table file, the newest checkpoint with another file is
    kept, too: damage to one file must not destroy every checkpoint.
    """
    existing = complete_checkpoints(folder)
    wanted = {*existing[-config.keep_last :], *(path for path in existing if step_of(path) in best)}
    # Inodes of the table files: equal for checkpoints that link the same ones.
    files = {
        path: tuple(file.stat().st_ino for file in sorted((path / "tables").glob("*.safetensors"))) or path
        for path in existing
    }
    if len(wanted) > 1 and len({files[path] for path in wanted}) == 1:
        wanted |= set([path for path in existing if files[path] != files[existing[-1]]][-1:])
    # Only now: what is named for a while must not decide what else stays.
    wanted |= {path for path in existing if step_of(path) in named}
    for damaged in folder.glob("step-*.damaged"):
        # with_suffix("") takes `.damaged` off the name.
        if existing and step_of(damaged.with_suffix("")) <= step_of(existing[-1]):
            remove_folder(damaged)
    for path in existing:
        if path not in wanted:
            remove_folder(path)
    return [path for path in existing if path in wanted]


def checkpoint_cards(kept: Sequence[Path], recipe: str, best_step: int | None) -> list[dict[str, Any]]:
    """Return the entries of the kept checkpoints (oldest first) for the tracker's `log_checkpoints`."""
    cards = []
    for path in kept:
        progress = read_state(path).progress
        roles = {"best": step_of(path) == best_step, "latest": path == kept[-1]}
        cards.append(
            {
                "uid": checkpoint_uid(path),
                "name": f"{recipe}-{path.name}",
                "step": progress.step,
                "folder": path,
                "role": "+".join(role for role, has in roles.items() if has) or "kept",
                "metrics": {f"valid/{name}": value for name, value in progress.metrics.items()},
            }
        )
    return cards


def checkpoint_uid(path: Path) -> str:
    """Return a name that changes with the checkpoint's content."""
    # state.json holds the checksums of all other files.
    return f"{path.name}-{file_digest(path / 'state.json')[:12]}"
