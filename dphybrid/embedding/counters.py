"""Counts and times of a table's lookups and updates, which explain a slow run."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Running totals of a table in training; lookups without gradients do not count. Only the thread that
    trains adds to them.

    ids: looked up. unique: touched rows, counted by replica. prepared: of those, rows that a pipeline had
    made ready. repaired: of those, rows read again because an update had changed them. bytes_gathered: of
    rows read from the table for lookups.
    Milliseconds: dedup_ms of checking and sorting ids. gather_ms of reading rows. h2d_ms of copies to the
    devices. d2h_ms of waiting for row gradients from the devices. update_ms of the row optimizer, summing
    included. repair_ms of finding and reading changed rows again.
    """

    ids: float = 0.0
    unique: float = 0.0
    prepared: float = 0.0
    repaired: float = 0.0
    bytes_gathered: float = 0.0
    bytes_to_devices: float = 0.0
    bytes_from_devices: float = 0.0
    dedup_ms: float = 0.0
    gather_ms: float = 0.0
    h2d_ms: float = 0.0
    d2h_ms: float = 0.0
    update_ms: float = 0.0
    repair_ms: float = 0.0
