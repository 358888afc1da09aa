"""The minimax_m2 network."""
