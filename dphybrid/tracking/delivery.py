"""The end of a run's journal: everything is sent, the details go into a table, and what could not be sent is
counted and told."""

import csv
import io
import time

from dphybrid.tracking.journal import Journal, Losses
from dphybrid.tracking.sender import Sender
from dphybrid.util.masking import masked

DETAILS_FOLDER = "details"


def deliver(journal: Journal, sender: Sender, wait_s: float) -> tuple[bool, Losses]:
    """Send the rest of a journal and close `sender`, in at most about `wait_s` seconds; return whether all
    there is arrived, and what is lost.

    The journal is cleared when it did. What is lost stands on the run's page then, too.
    """
    end = time.monotonic() + wait_s
    arrived = sender.drain(wait_s)
    losses = journal.account()
    if arrived:
        if table := _details_table(journal):
            path, crc = journal.keep_content("metrics.csv", table)
            journal.append({"op": "file", "path": str(path), "folder": _details_folder(journal), "crc": crc})
        if losses:
            journal.append({"op": "losses", "text": masked(losses.text())})
    if sender.close(max(0.5, end - time.monotonic()) if arrived else 0.0):
        losses = journal.account()
        journal.clear()
        return True, losses
    return False, losses


def _details_table(journal: Journal) -> bytes:
    """Return the metrics that were kept as details as CSV: the milliseconds since the epoch, the step, the
    name, the value."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in journal.details():
        writer.writerow(row)
    text = stream.getvalue()
    return f"time_ms,step,metric,value\n{text}".encode() if text else b""


def _details_folder(journal: Journal) -> str:
    """Return where the table goes: each attempt of a run has its own, from its first step on."""
    # the steps of system/ are seconds
    steps = (step for _, step, name, _ in journal.details() if step > 0 and not name.startswith("system/"))
    first = min(steps, default=0)
    return f"{DETAILS_FOLDER}/from-step-{first:06d}"
