"""The nemotron network."""
