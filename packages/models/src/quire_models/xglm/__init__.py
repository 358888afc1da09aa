"""The xglm network."""
