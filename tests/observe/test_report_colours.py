"""The colours of runs are told apart, also by those who do not see all of them."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

CSS = (files("tidegate.observe") / "assets" / "report.css").read_text("utf-8")
LIGHT, DARK = CSS.split("@media (prefers-color-scheme: dark)")[:2]
SCHEMES = {"light": LIGHT, "dark": DARK}

Array = npt.NDArray[np.float64]

# Severity 1.0 of Machado, Oliveira, Fernandes, IEEE TVCG 15(6), 2009, on linear RGB.
SIGHT: dict[str, Array] = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colour: str) -> Array:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: Array) -> Array:
    """CIE L*a*b* of linear RGB."""
    raw = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    fx, fy, fz = np.where(raw > 0.008856, np.cbrt(raw), 7.787 * raw + 16 / 116)
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


def of(scheme: str, name: str) -> str:
    found = re.search(rf"--{name}: (#[0-9a-f]{{3,6}})", SCHEMES[scheme])
    assert found is not None
    return found[1] if len(found[1]) == 7 else "#" + "".join(2 * c for c in found[1][1:])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sight", SIGHT)
def test_no_two_runs_look_alike(scheme: str, sight: str) -> None:
    seen = [lab(SIGHT[sight] @ linear(of(scheme, f"c{n}"))) for n in range(8)]
    for (i, a), (j, b) in combinations(enumerate(seen), 2):
        assert np.linalg.norm(a - b) > (30 if j < 4 else 15), f"c{i} and c{j}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lines_stand_out_from_the_page(scheme: str) -> None:
    luminance = np.array([0.2126, 0.7152, 0.0722])
    page = linear(of(scheme, "card")) @ luminance
    for n in range(8):
        line = linear(of(scheme, f"c{n}")) @ luminance
        assert (max(page, line) + 0.05) / (min(page, line) + 0.05) > 3, f"c{n}"
