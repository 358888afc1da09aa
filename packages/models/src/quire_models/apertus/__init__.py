"""The apertus network."""
