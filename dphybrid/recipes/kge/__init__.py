"""Knowledge-graph embeddings."""
