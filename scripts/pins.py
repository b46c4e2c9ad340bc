"""Prints a short hash of the dependencies that pyproject.toml declares and of Python's minor version."""

import hashlib
import json
import sys
import tomllib
from pathlib import Path

document = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
project = document["project"]
declared = [project["dependencies"], project["optional-dependencies"], document["build-system"], sys.version_info[:2]]
print(hashlib.sha256(json.dumps(declared).encode()).hexdigest()[:12])
