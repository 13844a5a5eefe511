"""Metrics off the training thread: collected, sent in batches, kept on disk when they cannot be sent."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

SEND_EVERY_S = 2.0
_MAX_METRICS = 1000


class MetricSender:
    """Sends the metrics of one run from a thread of its own. Failing to send never reaches the caller."""

    def __init__(self, client: Any, run_id: str, spool: Path) -> None:
        self._client, self._run_id = client, run_id
        self._file = spool / f"{run_id}.jsonl"
        self._waiting: list[Metric] = []
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._unsent = 0
        self._thread: threading.Thread | None = None

    def put(self, metrics: list[Metric]) -> None:
        """Take metrics and return at once."""
        with self._lock:
            self._waiting += metrics
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dphybrid-metrics", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(SEND_EVERY_S)
            self._wake.clear()
            self.flush()

    def flush(self) -> None:
        """Send everything that waits, in order."""
        with self._sending:
            with self._lock:
                metrics, self._waiting = self._waiting, []
            for start in range(0, len(metrics), _MAX_METRICS):
                batch = metrics[start : start + _MAX_METRICS]
                try:
                    self._client.log_batch(self._run_id, metrics=batch)
                except (MlflowException, OSError) as error:
                    self._keep(batch, error)

    def _keep(self, batch: list[Metric], error: Exception) -> None:
        self._unsent += len(batch)
        with contextlib.suppress(OSError):  # a full disk must not end training either
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as lines:
                for m in batch:
                    lines.write(
                        json.dumps(
                            {"key": m.key, "value": m.value, "timestamp": m.timestamp, "step": m.step, "error": str(error)[:200]}
                        )
                        + "\n"
                    )

    def close(self) -> int:
        """Send the rest and end the thread; return how many points could not be sent."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.flush()
        return self._unsent
