"""The olmoe network."""
