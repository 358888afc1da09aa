"""For development: conformance suites of the Protocols, fakes without weights, and random checkpoints made offline.

Nothing is imported here, since the modules need different packages:

- `quire_testkit.conformance.*`: one suite per Protocol, as tests to inherit.
- `quire_testkit.fake_runner`, `quire_testkit.fake_engine`, `quire_testkit.plain_blocks`: strict stand-ins.
- `quire_testkit.recorded_graph`: captures what torch does on the CPU, and does it again on the same tensors.
- `quire_testkit.checkpoints`, `quire_testkit.tokenizers`: checkpoints in the Hugging Face format, without torch.
- `quire_testkit.hf_checkpoints`: the same through the Transformers classes, as parity oracles.
"""

__version__ = "0.1.0"

__all__: list[str] = []
