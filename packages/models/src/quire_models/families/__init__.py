"""The families of networks: a file each, whose `spec` describes the network of a config.json. Free of torch.

Layers that only one family has are classes in a file beside it, `NAME_layers.py`, imported when they are built.
"""
