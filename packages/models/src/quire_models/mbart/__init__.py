"""The mbart network."""
