"""The command `dphybrid`."""
