"""The jobs of the package: train, retrain, sweep, predict, load; and the pages of a run."""
