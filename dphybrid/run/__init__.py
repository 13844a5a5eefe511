"""One run: its folder, from building to its report."""
