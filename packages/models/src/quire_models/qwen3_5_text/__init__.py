"""Qwen3.5, text."""
