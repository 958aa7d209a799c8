"""What a process that a test starts may know of this one."""

import os


def inherited():
    """Our environment, less what this pytest or asv has set for itself: that it is a worker of xdist, for one."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ASV"))}
