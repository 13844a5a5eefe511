"""Prefect flows: thin combinations of the parts in `dphybrid`, and the only code that imports prefect."""
