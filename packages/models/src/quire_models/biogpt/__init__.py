"""The biogpt network."""
