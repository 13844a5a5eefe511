"""The record of runs: a handful of verbs, their MLflow adapter, figures and reports. The only place that
imports mlflow."""

from dphybrid.tracking.base import CHANGED_TAG, Status, Tracker
from dphybrid.tracking.opening import open_tracker
from dphybrid.tracking.outbox import waiting

__all__ = ["CHANGED_TAG", "Status", "Tracker", "open_tracker", "waiting"]
