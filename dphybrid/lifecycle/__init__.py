"""What spans several runs: retraining and sweeps."""
