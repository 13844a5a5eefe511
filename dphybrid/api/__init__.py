"""The Python interface: train from a frame, inspect runs, and scikit-learn estimators. It runs the same code
as the command line and the flow."""
