"""What an engine takes from a package: a logits processor, a KV connector, a kernel."""
