"""The roberta network."""
