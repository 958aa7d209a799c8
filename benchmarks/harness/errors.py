"""Every error that the instrument raises on purpose, in one tree.

InstrumentError
├── UndeclaredMetricError  a name that the metric registry does not hold, or one that a test did not declare
├── WrongOutputError       the measured run did not do the work that the workload asks for
├── ForeignPackageError    the imported nanoserve is not the one whose commit is being measured
├── MissingFeatureError    the measured build is too old, or the benchmark asks for something that never was
├── BuildError             a revision that git does not know, or one that cannot be installed in a folder of its own
├── DeviceError            the GPU that was asked for is not there, or others have it
├── GitHubError            GitHub is not reachable as the environment says, or refuses
├── SourceError            a streamed source broke off, or spoke another language than it should
├── PeerError              another engine was not installed, died, hung, or did not do what it was asked
└── ArchiveError           a results file that cannot be read, or that holds something else
"""


class InstrumentError(Exception):
    """Root of the tree. A benchmark that raises it is red, never a number."""


class UndeclaredMetricError(InstrumentError):
    """A metric name that is not in the registry, or not in the test's own declaration."""


class WrongOutputError(InstrumentError):
    """A run with the wrong length, the wrong tokens or the wrong ending: a short answer is not a fast one."""


class ForeignPackageError(InstrumentError):
    """The imported package is not the installed one that the result would be filed under."""


class MissingFeatureError(InstrumentError):
    """The measured build lacks what a benchmark asks for.

    `probe` is a Python expression that fails in every build that lacks it: so another build can be asked. An older
    commit that lacks what the checkout has is no failure; a misspelt option, which nobody has, is one.
    """

    def __init__(self, message: str, probe: str) -> None:
        super().__init__(message)
        self.probe = probe


class BuildError(InstrumentError):
    """A revision that is not here, or that does not become an installed package; the message says what mends it."""


class DeviceError(InstrumentError):
    """A GPU that is not there, that others have, or that cannot be locked; the message says what to type."""


class GitHubError(InstrumentError):
    """An environment without access, or an answer that is none. It never holds the token.

    `wait_s` is set when asking again after so many seconds may help.
    """

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class SourceError(InstrumentError):
    """A stream that ended before its end, an endpoint that answered with an error or with something else."""


class PeerError(InstrumentError):
    """Another engine that is compared with could not be installed or run; the others go on without it."""


class ArchiveError(InstrumentError):
    """A results file that is unreadable, cut off, of another tool or of another version; the message names it."""
