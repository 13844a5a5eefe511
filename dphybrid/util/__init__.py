"""Helpers without a package of their own: errors, atomic files, locks, digests, stop requests."""
