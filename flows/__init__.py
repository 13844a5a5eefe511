"""Prefect flows: thin combinations of the parts in `dphybrid`. Installed as `dphybrid.flows`."""
