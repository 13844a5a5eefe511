"""Prepared data read once more, whole, beside the training that uses it.

Opening a folder reads only files that were touched since they were last found whole. What a disk changes by
itself, and what somebody changes meanwhile, shows here.
"""

import hashlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from dphybrid.data.store import ANEW, Prepared
from dphybrid.util.digests import check_file, forget_verified

_PIECE_BYTES = 2**22
_REST = 4.0
"""How long the thread rests after a piece, in times that it took: a fifth of a core and of the disk is the
most that it has. A lower priority of the system would not do: such a thread, waiting for its turn with
Python's lock, holds up all others."""
_QUIET_S = 5.0
"""What is waited for longer than this is told."""
_END_S = 10.0
"""How long a training that ends waits for a disk that does not answer."""


class Rereading:
    """Compares the files of prepared data with their sums in a thread, while the block runs. data: None for
    nothing at all."""

    def __init__(self, data: Prepared | None) -> None:
        self._data = data
        self._thread = threading.Thread(target=self._work, name="dphybrid-reread", daemon=True)
        self._hurried, self._ended = threading.Event(), False
        self._error: BaseException | None = None
        self._piece = memoryview(bytearray(_PIECE_BYTES if data is not None else 0))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._hurried.set()
        self._thread.join(_END_S)

    def check(self, whole: bool = False) -> None:
        """Raise UserError with the file in which damage was found by now. whole: once the rest is read, too,
        without a pause."""
        if whole:
            self._hurried.set()
            self._thread.join(_QUIET_S)
            if self._thread.is_alive():
                print("Reading the rest of the prepared data once more, for damage", flush=True)
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        if self._data is None:
            return
        try:
            for name, wanted in self._data.manifest.sums.items():
                check_file(self._data.path / name, wanted, _REMEDY, self._digest)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the training must end with it
            if not self._ended:
                self._error = error
                forget_verified(self._data.path)

    def _digest(self, file: Path) -> str:
        found = hashlib.sha256()
        with file.open("rb", buffering=0) as stream:
            began = time.monotonic()
            while not self._ended and (count := stream.readinto(self._piece)):
                found.update(self._piece[:count])
                self._hurried.wait(_REST * (time.monotonic() - began))
                began = time.monotonic()
        return found.hexdigest()


_REMEDY = f"{ANEW}, and start a new run: this one may have learned from the damage"
