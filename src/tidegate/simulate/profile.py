"""What a workload is like: rates, burstiness, lengths, who asks, and how much an ideal cache would save.

Times are seconds, lengths tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from tidegate.simulate.workload import Workload, WorkloadRequest

QUANTILES = (50, 90, 99)
MINUTE_S = 60.0
MOST_WINDOWS = 10_000_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Tokens of prompts or of outputs. p50, p90, p99 are nearest-rank percentiles."""

    total: int
    mean: float
    min: int
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What an unbounded cache would hold already, as a share of all prompt tokens and of all blocks of prompts.

    Of a block of which earlier prompts had only the beginning, that much counts in tokens and nothing in blocks.
    """

    tokens: float
    blocks: float


@dataclass(frozen=True, slots=True)
class GroupProfile:
    """The requests of one class or of one tenant. `share` is that of requests."""

    requests: int
    share: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Profile:
    """One workload.

    rate_s:        mean requests a second from first arrival to last; None where all arrive at once
    peak_minute_rate_s: requests a second in the busiest of the minutes 0-60 s, 60-120 s, …
    gap_cv:        coefficient of variation of the times between arrivals; 1 for a Poisson process
    dispersion:    variance over mean of arrivals in windows of `window_s`; 1 for a Poisson process,
                   more in bursts that outlast a gap. None below two windows
    window_s:      1 s, or longer where that would be under one arrival a window
    prefix_hit:    what an unbounded cache of prompts would save; None where no request says what it shares
    arrivals_per_bin, bin_s: arrivals over time in equal bins from 0 s on, of all and by class
    prompt_histogram, output_histogram: requests by length, up to powers of two: {512: 90} is 90 of 257 to 512 tokens
    """

    name: str
    requests: int
    duration_s: float
    first_arrival_s: float
    rate_s: float | None
    peak_minute_rate_s: float
    gap_cv: float | None
    dispersion: float | None
    window_s: float
    prompt_tokens: LengthProfile
    output_tokens: LengthProfile
    prefix_hit: PrefixHit | None
    classes: dict[str, GroupProfile]
    tenants: dict[str, GroupProfile]
    bin_s: float
    arrivals_per_bin: tuple[int, ...]
    class_arrivals_per_bin: dict[str, tuple[int, ...]]
    prompt_histogram: dict[int, int]
    output_histogram: dict[int, int]


def profile(workload: Workload, bins: int = 60) -> Profile:
    """Measure a workload that has at least one request; `bins` is the number of bins of the picture."""
    arrivals = np.array([r.arrival_s for r in workload])
    gaps = np.diff(arrivals)
    window_s = max(1.0, float(ceil(workload.duration_s / max(1, len(workload) - 1))))
    bin_s = (float(arrivals[-1]) or 1.0) / bins
    by_class = _over_time(workload, np.minimum((arrivals / bin_s).astype(np.int64), bins - 1), bins)
    return Profile(
        name=workload.name,
        requests=len(workload),
        duration_s=workload.duration_s,
        first_arrival_s=float(arrivals[0]),
        rate_s=workload.rate or None,
        peak_minute_rate_s=_peak(arrivals, MINUTE_S),
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None,
        dispersion=_dispersion(arrivals, window_s),
        window_s=window_s,
        prompt_tokens=_lengths([r.prompt_tokens for r in workload]),
        output_tokens=_lengths([r.output_tokens for r in workload]),
        prefix_hit=prefix_hit(workload),
        classes=_groups(workload, "slo_class"),
        tenants=_groups(workload, "tenant"),
        bin_s=bin_s,
        arrivals_per_bin=tuple(map(sum, zip(*by_class.values(), strict=True))),
        class_arrivals_per_bin=by_class,
        prompt_histogram=_histogram(r.prompt_tokens for r in workload),
        output_histogram=_histogram(r.output_tokens for r in workload),
    )


def prefix_hit(requests: Iterable[WorkloadRequest]) -> PrefixHit | None:
    """What earlier prompts began with too, block by block from the start; None without any hash ids.

    The cache is without bounds and filled by prompts as they arrive, not by answers.
    """
    seen: dict[tuple[int, int], int] = {}
    hit_tokens = hit_blocks = tokens = blocks = 0
    for request in requests:
        tokens += request.prompt_tokens
        blocks += -(-request.prompt_tokens // request.hash_block_tokens)
        more_tokens, more_blocks = _hit(request, seen)
        hit_tokens += more_tokens
        hit_blocks += more_blocks
    return PrefixHit(hit_tokens / tokens, hit_blocks / blocks) if seen else None


def _hit(request: WorkloadRequest, seen: dict[tuple[int, int], int]) -> tuple[int, int]:
    """Tokens and whole blocks of a prompt that `seen` (known tokens by block) holds; then `seen` learns the prompt."""
    block = request.hash_block_tokens
    hit_tokens, hit_blocks, unbroken = 0, 0, True
    for index, identity in enumerate(request.hash_ids):
        tokens = min(block, request.prompt_tokens - index * block)
        held = seen.get((block, identity), 0)
        if unbroken:
            hit_tokens += min(held, tokens)
            unbroken = held >= tokens
            hit_blocks += unbroken
        seen[block, identity] = max(held, tokens)
    return hit_tokens, hit_blocks


def _peak(arrivals: Floats, window_s: float) -> float:
    """The largest number of arrivals in a window, a second."""
    _, counts = np.unique(np.floor(arrivals / window_s), return_counts=True)
    return float(counts.max()) / window_s


def _dispersion(arrivals: Floats, window_s: float) -> float | None:
    """Index of dispersion over the whole windows from the first arrival on."""
    windows = int((arrivals[-1] - arrivals[0]) / window_s)
    if not 2 <= windows <= MOST_WINDOWS:
        return None
    inside = arrivals[arrivals < arrivals[0] + windows * window_s] - arrivals[0]
    counts = np.bincount((inside / window_s).astype(np.int64), minlength=windows)[:windows]
    return float(counts.var() / counts.mean())


def _lengths(tokens: list[int]) -> LengthProfile:
    ordered = np.sort(np.array(tokens, np.int64))
    p50, p90, p99 = (int(ordered[ceil(q * len(ordered) / 100) - 1]) for q in QUANTILES)
    return LengthProfile(int(ordered.sum()), float(ordered.mean()), int(ordered[0]), p50, p90, p99, int(ordered[-1]))


def _over_time(workload: Workload, bin_of: npt.NDArray[np.int64], bins: int) -> dict[str, tuple[int, ...]]:
    """Arrivals by bin for each class, the classes by name."""
    counts: dict[str, list[int]] = {name: [0] * bins for name in sorted({r.slo_class for r in workload})}
    for request, place in zip(workload, bin_of.tolist(), strict=True):
        counts[request.slo_class][place] += 1
    return {name: tuple(values) for name, values in counts.items()}


def _histogram(lengths: Iterable[int]) -> dict[int, int]:
    """Requests by the power of two that their length does not exceed; between the ends no power is left out."""
    counts = Counter((length - 1).bit_length() for length in lengths)
    return {1 << power: counts[power] for power in range(min(counts), max(counts) + 1)}


def _groups(workload: Workload, field: str) -> dict[str, GroupProfile]:
    """By class or tenant, the largest first."""
    sums: dict[str, list[int]] = {}
    for request in workload:
        group = sums.setdefault(getattr(request, field), [0, 0, 0])
        group[0] += 1
        group[1] += request.prompt_tokens
        group[2] += request.output_tokens
    largest_first = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    return {name: GroupProfile(n, n / len(workload), prompt, output) for name, (n, prompt, output) in largest_first}
