"""Layers of a checkpoint that predict further tokens (multi-token prediction)."""
