"""The Python door: train from a frame, look at runs, and a scikit-learn estimator. It calls the same job as
the command line and the flow."""
