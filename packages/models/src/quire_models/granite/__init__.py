"""The granite network."""
