"""Compiled kernels for a CPU that multiplies bfloat16: `build.py` makes them, `native.py` calls them."""
