"""Checkpoints written in the background; training waits only while changed values are copied.

A full checkpoint holds each table's file whole. One in between holds a hard link to the file of the last full
one and the rows changed since (see `tensor_file`), so that a folder has all it needs, whatever is removed
beside it. A full one is made from the file of the full one before and the rows changed since, in the thread
that writes. One class: what was changed, linked and written last must agree whenever it is cut off.

Letters: U changed rows of a table.
"""

import contextvars
import copy
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from pydantic import BaseModel
from torch import Tensor

from dphybrid.embedding import find_tables
from dphybrid.embedding.storage import available_memory_bytes, zero_rows
from dphybrid.training.averaging import averaged
from dphybrid.training.checkpoint import (
    FORMAT,
    CheckpointState,
    Generators,
    Progress,
    Stateful,
    Trained,
    dense_state,
    flatten_optimizer,
    read_state,
)
from dphybrid.training.finite import Rows, check_finite
from dphybrid.training.tensor_file import (
    IDS,
    changed_file,
    changed_rows,
    patch_tensors,
    rows_of,
    table_file,
    tensor_sums,
    write_tensors,
)
from dphybrid.util.digests import copy_files
from dphybrid.util.errors import UserError
from dphybrid.util.files import making

_WORTH_IT = 0.5
"""Share of changed bytes up to which they alone are copied: beyond, copying all costs little more."""
_PART_BYTES = 2**28
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


class SavingCosts(BaseModel):
    """What a run's checkpoints have cost. stall_s: how long the training stood still for them; write_s: how
    long they were written beside it."""

    count: int = 0
    full: int = 0
    written_bytes: int = 0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True)
class Saved:
    """One checkpoint's share of the costs."""

    path: Path
    step: int
    full: bool
    written_bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True)
class _Copied:
    """A table's weight and states at rows ids_U, or all of them, in parts that are freed as they are written;
    whole: states without a row for each row."""

    ids_U: Tensor | None
    by_row: dict[str, list[Tensor]]
    whole: dict[str, Tensor]


class CheckpointWriter:
    """Writes the checkpoints of one training under `folder`; to be used as a context, which ends when all is
    written.

    full_every: each n-th checkpoint is full, those between hold the rows changed since. encoder: folder of
    what turns new rows into the model's input; a copy of it makes a checkpoint ready to predict;
    encoder_sums: the sha256 that its files must have, by `encoder/NAME`. in_place: rows are written where
    they are, all of them, while training stands still: they lie with other processes.
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
        self._latest: Path | None = None
        self._versions: list[int] | None = None
        self._since_full = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.costs = SavingCosts()

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
            print(f"Note: the newest checkpoint could not be written: {failure}", file=sys.stderr, flush=True)

    def resumed(self, path: Path, page: CheckpointState) -> None:
        """Go on from a checkpoint that was loaded: its rows count as changed since the last full one."""
        # tables of older checkpoints have no sums of blocks: the next one is written whole
        self._latest, self._since_full = path if page.block_sums else None, page.since_full
        if self._changes is not None:
            found = {name: changed_rows(path, name) for name in find_tables(self._trained.model)}
            self._changes.restore({name: ids_U for name, ids_U in found.items() if ids_U is not None})
            self._versions = self._changes.versions()

    def state_dict(self) -> dict[str, Any]:
        """Return what the checkpoints have cost."""
        return self.costs.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.costs = SavingCosts.model_validate(state)

    def wait(self) -> None:
        """Wait until the checkpoint in hand is written. Raises what its writing failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what the writing of a checkpoint has failed with."""
        if self._error is not None:
            raise self._error

    def save(
        self,
        config: Mapping[str, Any],
        facts: Mapping[str, Any],
        stateful: Mapping[str, Stateful] = MappingProxyType({}),
        then: Callable[[Saved], None] = lambda _: None,
        first: Callable[[], None] = lambda: None,
    ) -> Path:
        """Begin to write a checkpoint of this moment and return its path; it is there after `wait`. The same
        step again replaces the page alone where the tensors are the same.

        config: the experiment's values. facts: what else belongs into state.json (digests of data, devices).
        stateful: whose states are kept by name, beside the progress and the random generators. first, then:
        called before it is written and when it is there, in the thread that writes. Raises UserError, and
        writes nothing, when a weight or a state is no longer a number; and what the writing of the checkpoint
        before has failed with.
        """
        start = time.perf_counter()
        # One checkpoint at a time: the next one links or rewrites the files of this one.
        self.wait()
        step, before = self._trained.progress.step, self._latest
        final = self._folder / f"step-{step:06d}"
        copies, beside = self._copies()
        check_finite(self._trained.model, self._trained.dense, _named(copies), step, self._folder)
        files, optimizer_page = self._dense()
        own: dict[str, Stateful] = {"progress": self._trained.progress, "generators": Generators()}
        # State dicts refer to what training goes on changing.
        states = {name: copy.deepcopy(one.state_dict()) for name, one in {**own, **stateful}.items()}
        page = CheckpointState(
            progress=Progress(**states.pop("progress")),
            config=dict(config),
            optimizer=optimizer_page,
            generators=states.pop("generators"),
            sha256={},
            record=states,
            **facts,
        )
        partly = bool(copies) and all(copied.ids_U is not None for copied in copies.values())
        full = not partly or self._since_full + 1 >= self._full_every
        if same := self._same(final, files):
            page = page.model_copy(update={name: getattr(same, name) for name in _OF_TENSORS})
        else:
            self._since_full = 0 if full else self._since_full + 1
            page = page.model_copy(
                update={"since_full": self._since_full, "format": FORMAT if self._since_full else 1}
            )
            if full and self._changes is not None:
                self._changes.forget()
            # Where its writing fails, `wait` raises before anything is made from it.
            self._latest = final
            self._versions = self._changes.versions() if self._changes is not None else None
        stall_s = time.perf_counter() - start

        def work() -> None:
            began = time.perf_counter()
            try:
                first()
                if same:
                    page.write(final / "state.json")
                    written = (final / "state.json").stat().st_size
                else:
                    written = self._write(final, before, copies, files, page)
                now = time.perf_counter()
                saved = Saved(
                    final, step, not page.since_full, written, stall_s if beside else now - start, now - began
                )
                self._count(saved)
                then(saved)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the training must end with it
                self._error = error

        if beside:
            context = contextvars.copy_context()  # what is told there stands in the caller's log
            self._thread = threading.Thread(target=context.run, args=(work,), name="dphybrid-checkpoint")
            self._thread.start()
        else:
            work()
            self.check()
        return final

    def _copies(self) -> tuple[dict[str, _Copied], bool]:
        """Return each table's changed rows, or all where these are not known or too many; and whether they
        are copies, which training leaves alone. They are not where memory has no room for them."""
        rows = self._trained.rows
        changed = self._changes.rows() if self._changes is not None and self._latest is not None else {}
        parts: dict[str, _Copied] = {}
        for name, table in find_tables(self._trained.model).items():
            by_row, states = {"weight": table.settled()}, {}
            if rows is not None and name in rows.tables:
                by_row, states = by_row | rows.row_states(name), rows.states_of(name)
            whole = {key: state.clone() for key, state in states.items() if key not in by_row}
            parts[name] = _Copied(changed.get(name), {key: [each] for key, each in by_row.items()}, whole)
        everything, partly = 0, 0.0
        for part in parts.values():
            size = sum(tensor.nbytes for (tensor,) in part.by_row.values())
            everything += size
            partly += size if part.ids_U is None else size * len(part.ids_U) / len(part.by_row["weight"][0])
        if any(part.ids_U is None for part in parts.values()) or partly > _WORTH_IT * everything:
            changed, partly = {}, everything
        # Half of what is free: the training goes on beside the copies, and its batches need room, too.
        beside = not self._in_place and partly <= available_memory_bytes() / 2
        if not beside:
            changed = {}
        return {
            name: _Copied(
                ids_U := changed.get(name),
                {key: _copied(rows[0], ids_U) if beside else rows for key, rows in part.by_row.items()},
                part.whole,
            )
            for name, part in parts.items()
        }, beside

    def _dense(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return copies of what else a checkpoint holds, by file, and the page of the blocks' optimizer."""
        trained = self._trained
        tables = find_tables(trained.model)
        files = {"blocks.safetensors": dense_state(trained.model)}
        page: dict[str, Any] = {}
        if trained.dense is not None:
            files["blocks_optimizer.safetensors"], page = flatten_optimizer(trained.dense.state_dict())
        if (rows := trained.rows) is not None:
            others = {name: rows.states_of(name) for name in rows.tables if name not in tables}
            extra = {f"{name}.{key}": state for name, own in others.items() for key, state in own.items()}
            files |= {"tables/_optimizer.safetensors": extra} if extra else {}
        # The blocks' file has the averages, which are evaluated; the optimizer's has the weights.
        with averaged(trained.dense):
            copies = {
                file: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
                for file, tensors in files.items()
            }
        return copies, copy.deepcopy(page)

    def _same(self, final: Path, files: Mapping[str, Mapping[str, Tensor]]) -> CheckpointState | None:
        """Return the page of the newest checkpoint where it is of this step and has the same tensors: after a
        resume, say."""
        if final != self._latest or self._changes is None or self._changes.versions() != self._versions:
            return None
        page = read_state(final)
        sums = {name: tensor_sums(tensors) for name, tensors in files.items()}
        return page if sums.items() <= page.block_sums.items() else None

    def _write(
        self,
        final: Path,
        before: Path | None,
        copies: Mapping[str, _Copied],
        files: Mapping[str, Mapping[str, Tensor]],
        page: CheckpointState,
    ) -> int:
        """Write a checkpoint's folder; return its bytes, without those of linked files."""
        with making(final) as partial:
            (partial / "tables").mkdir()
            if page.since_full:
                (partial / "changed").mkdir()
            sums = {name: write_tensors(partial / name, tensors) for name, tensors in files.items()}
            for name, copied in copies.items():
                file, ids_U = table_file(partial, name), copied.ids_U
                key = file.relative_to(partial).as_posix()
                if ids_U is None:
                    sums[key] = write_tensors(file, {**copied.by_row, **copied.whole})
                    continue
                assert before is not None
                base, base_sums = before / key, read_state(before).block_sums[key]
                if page.since_full and self._linked(base, file):
                    sums[key] = base_sums
                    changed = {rows_of(part): rows for part, rows in copied.by_row.items()}
                    rows_file = changed_file(partial, name)
                    sums[rows_file.relative_to(partial).as_posix()] = write_tensors(
                        rows_file, {**changed, **copied.whole, IDS: ids_U}
                    )
                else:
                    sums[key] = _rewritten(file, base, base_sums, copied, ids_U)
            linked_bytes = sum(
                table_file(partial, name).stat().st_size
                for name in copies
                if changed_file(partial, name).is_file()
            )
            if self._encoder is not None:
                page = page.model_copy(update={"sha256": self._copied_encoder(self._encoder, partial)})
            page.model_copy(update={"block_sums": sums}).write(partial / "state.json")
            size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        return size - linked_bytes

    def _linked(self, base: Path, file: Path) -> bool:
        """Link a full checkpoint's file into another folder; return False where the disk knows no links."""
        try:
            os.link(base, file)
        except FileNotFoundError as error:
            raise UserError(_NOT_WHOLE.format(base, "gone")) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Each folder would hold the whole file anyway.
            self._full_every = 1
            return False
        return True

    def _copied_encoder(self, encoder: Path, partial: Path) -> dict[str, str]:
        copied = {
            f"encoder/{name}": digest for name, digest in copy_files(encoder, partial / "encoder").items()
        }
        for name, digest in copied.items():
            if self._encoder_sums.get(name, digest) != digest:
                raise UserError(
                    f"{encoder.parent / name}: is damaged (its sha256 differs); no checkpoint is made with it"
                )
        return copied

    def _count(self, saved: Saved) -> None:
        costs = self.costs
        # a new object: training may read the old one while this thread counts
        self.costs = SavingCosts(
            count=costs.count + 1,
            full=costs.full + saved.full,
            written_bytes=costs.written_bytes + saved.written_bytes,
            stall_s=costs.stall_s + saved.stall_s,
            longest_stall_s=max(costs.longest_stall_s, saved.stall_s),
            write_s=costs.write_s + saved.write_s,
        )


_OF_TENSORS = ("sha256", "block_sums", "since_full", "format")
_NOT_WHOLE = (
    "{}: is {}, and the next checkpoint was to be made from it; go on with --resume, which takes the newest "
    "whole one"
)


def _rewritten(file: Path, base: Path, base_sums: str, copied: _Copied, ids_U: Tensor) -> str:
    """Write a table's file from that of the full checkpoint before; return its sums."""
    changes = {part: (ids_U, rows[0]) for part, rows in copied.by_row.items()}
    for part, whole in copied.whole.items():
        rows = whole.reshape(-1, *whole.shape[1:])
        changes[part] = torch.arange(len(rows)), rows
    try:
        return patch_tensors(file, base, base_sums, changes)
    except FileNotFoundError as error:
        raise UserError(_NOT_WHOLE.format(base, "gone")) from error
    except UserError as error:
        raise UserError(_NOT_WHOLE.format(base, "damaged")) from error


def _copied(tensor: Tensor, ids_U: Tensor | None) -> list[Tensor]:
    if ids_U is not None:
        return [tensor.index_select(0, ids_U)]
    parts = tensor.split(max(1, _PART_BYTES // max(1, tensor[:1].nbytes)))
    return [zero_rows(tuple(part.shape), part.dtype).copy_(part) for part in parts]


def _named(copies: Mapping[str, _Copied]) -> Iterator[Rows]:
    for table, copied in copies.items():
        for key, parts in copied.by_row.items():
            what, first = f"table {table}" if key == "weight" else f"row optimizer's {table}.{key}", 0
            for rows in parts:
                yield what, rows, range(first, first + len(rows)) if copied.ids_U is None else copied.ids_U
                first += len(rows)
