"""The arcee network."""
