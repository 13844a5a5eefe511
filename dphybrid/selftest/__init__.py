"""`dphybrid selftest`: small runs, killed and cut off from their disk, on the user's own data folder."""
