"""Use of trained models: loading, predictions, export, the MLflow flavor."""
