"""Compares the quality of the models with other libraries; see `__main__`."""
