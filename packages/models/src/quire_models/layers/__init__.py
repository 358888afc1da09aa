"""Layers that the networks are made of."""
