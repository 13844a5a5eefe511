"""Images of handwritten digits."""
