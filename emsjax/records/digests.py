"""Large sets of keys in 16 bytes each."""

import hashlib

import numpy as np

SIZE = 16  # bytes: among 10^9 keys two have the same digest once in 10^20 times


def digest(key: object) -> bytes:
    """Of a key with a `repr` that no other key has."""
    return hashlib.blake2b(repr(key).encode(), digest_size=SIZE).digest()


class Digests:
    """A set of keys: first all are added, then it is frozen and can be asked."""

    def __init__(self):
        self.added = bytearray()
        self.sorted = np.zeros(0, f"S{SIZE}")

    def add(self, key: object) -> None:
        self.added += digest(key)

    def freeze(self) -> set[bytes]:
        """The digests that were added more than once."""
        # NumPy cuts off zero bytes at the end, of all alike.
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
