"""Parity of architectures with Hugging Face Transformers: checkpoints, situations, comparison, table of results.

Needs torch, transformers and the `quire` package, imported when used:

- `cases`: architecture -> the tiny configuration that it is verified with, as data.
- `oracle`: what Transformers says about a checkpoint.
- `situations`: one engine around a network, and the ways in which requests can be computed in it.
- `verify`: both together, one `Verdict` per architecture.
- `table`: docs/models.md.
"""
