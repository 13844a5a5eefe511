"""Click-through rate: tables with a label."""
