"""The codegen network."""
