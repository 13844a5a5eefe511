"""How good the models are; `__main__` says how to run it."""
