"""The gemma2 network."""
