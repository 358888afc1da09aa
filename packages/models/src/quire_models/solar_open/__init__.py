"""The solar_open network."""
