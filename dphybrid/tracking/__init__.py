"""The record of runs: a small protocol, its MLflow adapter, figures and reports. The only place that imports mlflow."""

from dphybrid.tracking.base import NullTracker, Status, Tracker
from dphybrid.tracking.opening import open_tracker

__all__ = ["NullTracker", "Status", "Tracker", "open_tracker"]
