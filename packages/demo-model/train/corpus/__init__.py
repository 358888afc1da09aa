"""The synthetic corpus of the demo model: conversations as data, one module per skill.

Knows what the model is taught and how the held-out part is kept apart.
Knows nothing about tokens, tensors or training.
"""

from __future__ import annotations
