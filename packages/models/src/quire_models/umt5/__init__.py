"""The umt5 network."""
