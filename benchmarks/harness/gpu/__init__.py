"""GPUs: one interface to the driver (`driver.py`), the real one behind it (`nvidia.py`), and what is decided by it."""
