"""The measured quantities of nanoserve (`bench_*.py`) and the instrument that measures them (`harness`)."""
