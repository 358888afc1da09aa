"""The helium network."""
