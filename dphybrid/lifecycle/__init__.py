"""From one run to the next: retraining, sweeps."""
