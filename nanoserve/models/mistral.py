"""Mistral: Llama, and a window of positions that attention sees.

A position sees itself and the `sliding_window - 1` before it. In a context that fits into the window this is full
attention, so `max_context_tokens` ends with the window (`hf_config.py`) and nothing is left to compute differently.

Reference: "Mistral 7B" (arXiv:2310.06825).
"""

from nanoserve.models.llama import Llama


class Mistral(Llama):
    """See `Llama`."""
