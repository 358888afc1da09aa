"""The modernbert network."""
