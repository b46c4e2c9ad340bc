"""`tidegate cost` and `tidegate hardware` as a user meets them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.executors.sim.hardware import HARDWARE
from tidegate.executors.sim.models import MODELS

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PAGE = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
QUOTED_CASE = ("cost", "--model", "llama-13b", "--tokens", "512", "--link-gbps", "32", "--hardware", "a100")

KEYS = {
    *("model", "hardware", "tp", "link_bytes_per_s", "queue_s", "cached_share", "chunk", "tokens", "kv_bytes"),
    *("swap_one_way_s", "swap_round_trip_s", "recompute_s", "host_bytes", "token_id_bytes", "break_even_tokens"),
    *("validated", "fitted_on"),
}

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def tidegate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SRC)},
    )


def document(*arguments: str) -> dict[str, object]:
    done = tidegate(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    parsed = json.loads(done.stdout)
    assert isinstance(parsed, dict)
    return parsed


def test_json_has_stable_keys_and_plain_units() -> None:
    one = document(*QUOTED_CASE)
    assert set(one) == KEYS
    assert (one["model"], one["hardware"], one["tokens"], one["tp"]) == ("llama-13b", "a100", 512, 1)
    assert (one["kv_bytes"], one["token_id_bytes"]) == (419_430_400, 2048)
    assert one["swap_one_way_s"] == pytest.approx(0.0131, rel=0.01)
    assert (one["validated"], one["break_even_tokens"]) == (True, 1)


def test_several_tokens_make_a_list_and_the_link_is_the_hardware_s() -> None:
    done = tidegate(
        "cost", "--model", "llama-13b", "--tokens", "512", "--tokens", "4096", "--hardware", "a10g", "--json"
    )
    rows = json.loads(done.stdout)
    assert [row["tokens"] for row in rows] == [512, 4096]
    assert all(set(row) == KEYS and row["validated"] is False for row in rows)
    assert rows[0]["link_bytes_per_s"] == HARDWARE["a10g"].link_bandwidth


def test_the_quoted_figures_stand_beside_ours() -> None:
    done = tidegate(*QUOTED_CASE)
    ours, quoted = (line for line in done.stdout.splitlines() if line.strip().startswith("512"))
    assert all(figure in ours for figure in ("419 MB", "13.1 ms", "60.7 ms", "computed"))
    assert all(figure in quoted for figure in ("about 400 MB", "12.5 ms", "15-30 ms", "about 2 KB", "often quoted"))
    assert "break-even: 1 token" in done.stdout
    assert "unvalidated" not in done.stdout


def test_what_was_not_fitted_or_does_not_fit_says_so() -> None:
    shown = tidegate("cost", "--model", "llama-70b", "--tokens", "131072", "--hardware", "l40s", "--tp", "2").stdout
    assert "computed, unvalidated" in shown
    assert "l40s: unvalidated" in shown
    assert "communication between GPUs is not counted" in shown
    assert "does not fit" in shown


def test_a_shape_of_numbers_is_the_preset_of_these_numbers() -> None:
    shape = MODELS["llama-3.1-8b"]
    numbers = {
        name: getattr(shape, name) for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab")
    }
    options = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    named = document("cost", "--model", shape.name, "--tokens", "100")
    assert document("cost", *options, "--tokens", "100") == named | {"model": "custom"}
    fewer = document("cost", "--model", shape.name, "--kv-heads", "4", "--tokens", "100")
    assert fewer["kv_bytes"] == shape.kv_bytes_per_token * 100 // 2


def test_a_model_is_read_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    for path in (tmp_path, tmp_path / "config.json"):
        one = document("cost", "--model", str(path), "--tokens", "10")
        assert (one["model"], one["kv_bytes"]) == (tmp_path.name, 10 * 2 * 4 * 4 * 16 * 2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "gpt-9", "--tokens", "1"), "no model shape 'gpt-9': known are llama-3.1-8b, "),
        (("--model", "llama-13b", "--tokens", "1", "--hardware", "abacus"), "no hardware 'abacus': known are a100, "),
        (("--model", "llama-13b"), "name the tokens of the request by --tokens N"),
        (("--tokens", "1", "--layers", "4"), "name a model by --model (llama-3.1-8b, "),
        (("--model", "llama-13b", "--tokens", "0"), "Invalid value for '--tokens'"),
        (("--model", "llama-13b", "--tokens", "1", "--link-gbps", "0"), "a link must carry more than 0 GB/s, not 0"),
        (("--model", "llama-13b", "--tokens", "1", "--link-gbps", "nan"), "a link must carry more than 0 GB/s"),
        (("--model", "llama-13b", "--tokens", "1", "--tp", "3"), "llama-13b with 40 heads"),
        (("--model", "llama-13b", "--tokens", "1", "--chunk", "0"), "a chunk must be at least 1 token, not 0"),
        (("--model", "llama-13b", "--tokens", "1", "--heads", "0"), "llama-13b (changed): heads must be at least 1"),
        (("--model", "./none", "--tokens", "1"), "cannot read none: No such file or directory"),
        (("--list", "--tokens", "5"), "--tokens does nothing with --list, which only --json goes with"),
        (("--list", "--tp", "1"), "--tp does nothing with --list, which only --json goes with"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], complaint: str) -> None:
    done = tidegate("cost", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tidegate: {complaint}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "is not JSON"), ("[]", "holds no object"), ("{}", "no hidden_size")]
)
def test_a_broken_config_is_one_line_and_exit_code_2(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    done = tidegate("cost", "--model", str(tmp_path), "--tokens", "1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert complaint in done.stderr


def test_hardware_and_shapes_are_listed() -> None:
    table = tidegate("hardware").stdout
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(HARDWARE)
    assert table.count("unvalidated") == 3
    rows = json.loads(tidegate("hardware", "--json").stdout)
    assert rows[0]["memory_bandwidth"] == HARDWARE["a100"].memory_bandwidth
    assert [line.split()[0] for line in tidegate("cost", "--list").stdout.splitlines()[1:]] == list(MODELS)
    shapes = json.loads(tidegate("cost", "--list", "--json").stdout)
    assert {row["name"]: row["kv_bytes_per_token"] for row in shapes} == {
        name: shape.kv_bytes_per_token for name, shape in MODELS.items()
    }


@pytest.mark.parametrize(
    ("command", "shown"), re.findall(r"^```\n\$ tidegate (.+)\n((?:.*\n)+?)```$", PAGE, re.MULTILINE)
)
def test_the_page_shows_what_the_command_prints(command: str, shown: str) -> None:
    printed = tidegate(*command.split()).stdout
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_the_page_names_every_key_and_has_examples() -> None:
    assert all(f"`{key}`" in PAGE for key in KEYS)
    assert PAGE.count("$ tidegate cost") == 5
