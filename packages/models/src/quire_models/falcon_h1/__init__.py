"""Falcon H1."""
