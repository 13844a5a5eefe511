"""Use of trained models: loading, predictions, evaluation, the MLflow flavor."""
