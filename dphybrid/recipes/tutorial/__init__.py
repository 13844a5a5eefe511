"""The data-parallel tutorials' models."""
