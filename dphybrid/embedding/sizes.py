"""Numbers that kernels and those who call them agree on."""

AHEAD = 24
"""Occurrences, or rows to gather, whose memory is asked for ahead."""
DIGIT_BITS = 11
"""Of the radix sort: its counts stay in a core's first cache."""
DRAWN = 32
"""Values drawn at once."""
