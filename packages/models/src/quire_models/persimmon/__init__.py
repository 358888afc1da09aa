"""The persimmon network."""
