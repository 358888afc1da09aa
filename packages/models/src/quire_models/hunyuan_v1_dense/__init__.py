"""The hunyuan_v1_dense network."""
