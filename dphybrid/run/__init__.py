"""One training run and its folder, from building the model to the report."""
