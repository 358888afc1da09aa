"""The bart network."""
