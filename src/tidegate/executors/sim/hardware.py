"""Hardware as the cost model sees it: peaks, link, memory, and the constants of its formula.

Peaks are dense bfloat16 (what data sheets give "with sparsity" is halved), bandwidths decimal, for one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.errors import InputError

UNVALIDATED = "unvalidated"

# Kernel times of that model put together to whole steps; each fit stays within 1.4 to 4.1 % of those.
_FIT = "Llama-3.1-8B, one GPU: steps composed of measured kernel times"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    peak_flops:       dense bfloat16 FLOP/s
    memory_bandwidth: bytes/s of the accelerator's own memory
    link_bandwidth:   bytes/s between host and accelerator, one way (PCIe's nominal rate)
    memory_bytes:     of the accelerator
    e1, e2, e3, e4:   shares of the peaks that are reached, in (0, 1]: linear layers and attention (e1, e3) of
                      `peak_flops`, weights and KV (e2, e4) of `memory_bandwidth`
    t0:               seconds that a step takes even if it has nearly nothing to compute
    p:                how compute and weight reads overlap: 1 adds them, infinity hides the shorter one
    fitted_on:        what e1 to p were fitted on, or "unvalidated"
    """

    name: str
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    memory_bytes: float
    e1: float
    e2: float
    e3: float
    e4: float
    t0: float
    p: float
    fitted_on: str = UNVALIDATED

    @property
    def validated(self) -> bool:
        """Whether e1 to p were fitted to anything."""
        return self.fitted_on != UNVALIDATED


def _unfitted(
    name: str, peak_flops: float, memory_bandwidth: float, link_bandwidth: float, memory_bytes: float
) -> Hardware:
    """A data sheet with efficiencies in the middle of the fitted ones, near enough for an order of magnitude."""
    efficiencies = (0.70, 0.75, 0.65, 0.90)
    return Hardware(name, peak_flops, memory_bandwidth, link_bandwidth, memory_bytes, *efficiencies, t0=1e-3, p=1.6)


HARDWARE = {
    h.name: h
    for h in (
        # A100 SXM 80 GB, PCIe 4 x16
        Hardware("a100", 312e12, 2.04e12, 32e9, 80e9, 0.80, 0.98, 0.60, 0.80, 4.25e-3, 1.55, _FIT),
        # NVIDIA's data sheet of the A10G: 70 TFLOP/s (an A10 has 125), 600 GB/s, 24 GB, PCIe 4 x16
        _unfitted("a10g", 70e12, 0.6e12, 32e9, 24e9),
        # H100 and H200 SXM, PCIe 5 x16
        Hardware("h100", 989e12, 3.35e12, 64e9, 80e9, 0.70, 0.73, 0.76, 0.96, 0.43e-3, 1.78, _FIT),
        Hardware("h200", 989e12, 4.8e12, 64e9, 141e9, 0.71, 0.71, 0.81, 0.91, 0.66e-3, 1.72, _FIT),
        # B200 SXM, PCIe 6 x16
        Hardware("b200", 2250e12, 7.7e12, 128e9, 180e9, 0.62, 0.63, 0.58, 0.96, 0.36e-3, 1.44, _FIT),
        # NVIDIA's data sheet of the L40S: 362 TFLOP/s, 864 GB/s, 48 GB, PCIe 4 x16
        _unfitted("l40s", 362e12, 0.864e12, 32e9, 48e9),
        # Two cores with AVX512-BF16: guesses that come near single measurements of SmolLM2-135M on a shared machine.
        # The "link" is a copy within main memory.
        Hardware("cpu", 0.4e12, 20e9, 10e9, 16e9, e1=0.65, e2=0.75, e3=0.35, e4=0.45, t0=20e-3, p=1.6),
    )
}


def find_hardware(name: str) -> Hardware:
    """The preset of that name, in any case. Raises InputError that lists the known names."""
    known = HARDWARE.get(name.lower())
    if known is None:
        raise InputError(f"no hardware {name!r}: known are {', '.join(HARDWARE)}")
    return known
