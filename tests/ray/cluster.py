"""Ray on this machine, small and on loopback, with two engine replicas of the default model behind one front."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

KEY = "a-key"
CONFIG = f"""
[scheduler]
max_num_seqs = 4
max_model_len = 768
kv_memory = "96MiB"

[server]
max_body_bytes = "64KiB"
drain_seconds = 60
api_keys = ["{KEY}"]

[model]
threads = 1
"""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one machine: Ray listens on loopback alone
    "RAY_AUTH_MODE": "disabled",  # otherwise it writes a token into the home
}


@dataclass(frozen=True)
class Cluster:
    """`http` reaches the front; `replicas` are the engines that were started."""

    http: httpx.Client
    replicas: tuple[str, ...]

    def kill(self, replica: str) -> None:
        """End a replica's process, as a machine that fails would."""
        import ray

        actor = ray.get_actor(f"SERVE_REPLICA::default#engines#{replica}", namespace="serve")
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)

    def metric(self, replica: str, line: str) -> float:
        """The sum of a replica's metrics whose line begins so."""
        answer = self.http.get("/metrics", headers={"x-tidegate-replica": replica})
        assert answer.status_code == 200, answer.text
        return sum(float(text.rsplit(" ", 1)[1]) for text in answer.text.splitlines() if text.startswith(line))


@contextmanager
def running() -> Iterator[Cluster]:
    """The cluster, up until the block ends."""
    os.environ.update(QUIET)
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import ReplicaState

    from tidegate.integrations.ray import build
    from tidegate.integrations.ray.application import Arguments

    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
    try:
        config = folder / "tidegate.toml"
        config.write_text(CONFIG, encoding="utf-8")
        ray.init(
            num_cpus=2,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(folder),
        )
        port = _free_port()
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(build(Arguments(config=config, replicas=2)))
        engines = serve.status().applications["default"].deployments["engines"]
        assert engines.replica_states == {ReplicaState.RUNNING: 2}
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, headers=headers) as http:
            yield Cluster(http, _names())
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _names() -> tuple[str, ...]:
    """The engine replicas, as Serve's actors are called."""
    from ray.util import list_named_actors

    named = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
    return tuple(sorted(name.rsplit("#", 1)[1] for name in named if "#engines#" in name))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
