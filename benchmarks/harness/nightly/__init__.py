"""The nightly run of one machine, and the results of many: what a runner does, what it leaves, what a fleet shows."""
