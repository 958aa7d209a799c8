"""The regression gate: two builds of an engine side by side, and a verdict that is never given by accident."""
