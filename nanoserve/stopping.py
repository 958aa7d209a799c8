"""Stop strings in a stream of text: show nothing that might still turn out to be the start of one.

Knows text only; tokens and their decoding are somebody else's.
"""


class StopStrings:
    """Cuts a growing text at the first stop string. Used for one request and then thrown away."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.was_hit = False

    def push(self, text: str) -> str:
        """The part of the text that is now certain. After a hit: the text before the stop string, then nothing."""
        if self.was_hit:
            return ""
        self._held += text
        hits = [at for at in map(self._held.find, self._stop) if at >= 0]
        self.was_hit = bool(hits)
        certain = min(hits) if hits else len(self._held) - self._longest_start()
        shown, self._held = self._held[:certain], "" if hits else self._held[certain:]
        return shown

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that is a proper beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
