"""The record of runs: the tracker's verbs, their MLflow adapter, figures and reports. The only package that
imports mlflow."""

from dphybrid.tracking.base import CHANGED_TAG, Status, Tracker
from dphybrid.tracking.opening import open_tracker
from dphybrid.tracking.outbox import waiting

__all__ = ["CHANGED_TAG", "Status", "Tracker", "open_tracker", "waiting"]
