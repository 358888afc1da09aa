"""The t5 network."""
