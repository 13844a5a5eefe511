"""Trained models in use: loading, predictions, the MLflow flavor."""
