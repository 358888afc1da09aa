"""The bloom network."""
