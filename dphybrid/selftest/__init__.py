"""`dphybrid selftest`: small runs on the user's own disk, broken by kills and disk faults, then resumed."""
