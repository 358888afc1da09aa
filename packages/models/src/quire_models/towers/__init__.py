"""Towers of Quire's own: what turns images and sounds into embeddings, all items of a step packed without padding."""
