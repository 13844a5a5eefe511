"""Two towers: which items a user will want."""
