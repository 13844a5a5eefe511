"""What every room may use: errors, atomic files, locks, digests, watching, stopping."""
