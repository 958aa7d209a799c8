"""nanoserve beside the engines that a user would pick instead: one interleaved run, one table."""
