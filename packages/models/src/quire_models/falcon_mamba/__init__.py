"""Falcon Mamba."""
