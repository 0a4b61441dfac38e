"""Large sets of keys, stored in 16 bytes per key."""

import hashlib

import numpy as np

SIZE = 16  # bytes; the probability that two of 10^9 keys collide is about 10^-20


def digest(key: object) -> bytes:
    """The digest of a key, whose `repr` must be unique."""
    return hashlib.blake2b(repr(key).encode(), digest_size=SIZE).digest()


class Digests:
    """A set of keys: keys are added, then the set is frozen, then it can be searched."""

    def __init__(self):
        self.added = bytearray()
        self.sorted = np.zeros(0, f"S{SIZE}")

    def add(self, key: object) -> None:
        self.added += digest(key)

    def freeze(self) -> set[bytes]:
        """End the additions; returns the digests that were added more than once."""
        # NumPy strips trailing zero bytes, from stored and searched digests alike.
        self.sorted = np.sort(np.frombuffer(bytes(self.added), self.sorted.dtype))
        self.added = bytearray()
        again = self.sorted[1:][self.sorted[1:] == self.sorted[:-1]]
        return {bytes(one).ljust(SIZE, b"\0") for one in again}

    def __len__(self) -> int:
        return len(self.sorted) or len(self.added) // SIZE

    def __contains__(self, key: object) -> bool:
        wanted = np.array(digest(key), self.sorted.dtype)
        at = np.searchsorted(self.sorted, wanted)
        return at < len(self.sorted) and self.sorted[at] == wanted
