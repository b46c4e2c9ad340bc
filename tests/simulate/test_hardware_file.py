"""Hardware in a TOML file: what is written is read again, and a bad file is told by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import InputError
from tidegate.executors.sim.hardware import HARDWARE, find_hardware
from tidegate.simulate.hardware_file import named_hardware, read_hardware, write_hardware


@pytest.mark.parametrize("name", HARDWARE)
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / "h.toml"
    write_hardware(find_hardware(name), path)
    assert read_hardware(path) == find_hardware(name)
    assert named_hardware(str(path)) == named_hardware(name)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("e1 =", "e_1 =", r"unknown key 'e_1'; did you mean 'e1'\?"),
        ("e4 = 0.96\n", "", "missing e4"),
        ("e4 = 0.96", "e4 = 1.5", "e4 must be above 0 and at most 1, not 1.5"),
        ("e4 = 0.96", "e4 = nan", "e4 must be above 0 and at most 1, not nan"),
        ("e4 = 0.96", "e4 = true", "e4 must be above 0 and at most 1, not True"),
        ("p = 1.78", "p = 0.5", "p must be a number of at least 1, not 0.5"),
        ("t0 = 0.00043", "t0 = -1", "t0 must be 0 or more seconds, not -1"),
        ("peak_flops", "peak_flops = inf\n#", "peak_flops must be a number above 0, not inf"),
        ('name = "h100"', "name = 7", "name must be a text, not 7"),
        ("name", "= name", "is not TOML"),
    ],
)
def test_a_bad_file_is_told_by_its_key(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "h.toml"
    write_hardware(find_hardware("h100"), path)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=complaint):
        read_hardware(path)


def test_paths_that_cannot_be_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no hardware 'abacus': known are a100"):
        named_hardware("abacus")
    with pytest.raises(InputError, match=r"cannot read .*none\.toml: No such file"):
        named_hardware(str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match=r"hardware is written as \.toml"):
        write_hardware(find_hardware("h100"), tmp_path / "h.json")
    with pytest.raises(InputError, match="cannot write"):
        write_hardware(find_hardware("h100"), tmp_path / "no" / "h.toml")
