"""Embeddings, classes and scores: inputs as pooled requests, and their outputs."""
