"""Zamba2."""
