"""The record of runs: the tracker's verbs, their MLflow adapter, figures and reports. The only package that
imports mlflow."""

from dphybrid.tracking.opening import open_tracker
from dphybrid.tracking.tracker import Status, Tracker

__all__ = ["Status", "Tracker", "open_tracker"]
