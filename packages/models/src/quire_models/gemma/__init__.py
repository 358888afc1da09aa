"""The gemma network."""
