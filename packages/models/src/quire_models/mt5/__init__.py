"""The mt5 network."""
