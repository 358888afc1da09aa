"""The smollm3 network."""
