"""Helpers that every package may import: errors, atomic files, locks, digests, stop requests."""
