"""What `dphybrid selftest` breaks on the user's own disk; tests use it, too."""
