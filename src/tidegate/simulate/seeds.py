"""Independent streams of random numbers, each named by what it decides.

Whatever decides one thing draws from its own stream, so that another rate does not change the lengths.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

SeedKey = tuple[int, ...]


class Decides(IntEnum):
    ARRIVALS = 0
    LENGTHS = 1
    TENANTS = 2
    THINKING = 3
    PHASES = 4
    SHARING = 5
    TURNS = 6
    THINNING = 7
    SPREADING = 8


def stream(key: SeedKey, decides: Decides) -> np.random.Generator:
    """The generator of one stream: the same for the same key."""
    return np.random.default_rng((*key, int(decides)))
