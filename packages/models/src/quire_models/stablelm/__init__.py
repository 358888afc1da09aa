"""The stablelm network."""
