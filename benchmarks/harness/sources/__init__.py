"""Streamed sources: each turns one engine, nanoserve or somebody else's, into an iterator of `timing.Emission`.

Knows nothing itself. Each file below knows one engine's language, and loads that engine's library only when it is used.
"""
