"""The mpt network."""
