"""The instrument: clock, event log, metrics, statistics, pytest fixtures, the bridge to asv and the report.

It measures whatever streams tokens. Everything it knows about nanoserve stands in `sources/nanoserve.py`.
"""

INSTRUMENT_VERSION = "4"
"""Raised by hand whenever a change here can move a number; results of two versions are not comparable."""
