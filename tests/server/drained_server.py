"""A server process for the tests of signals: prints its URL, serves a scripted model, drains when told."""

from __future__ import annotations

import sys

from tests.server.scripted_model import ScriptedModel, goes_on
from tests.server.serving import assemble
from tidegate.api.listening import bind, url_of
from tidegate.server.run import run


def main(step_seconds: float, drain_seconds: float) -> None:
    model = ScriptedModel(goes_on, step_seconds=step_seconds)
    app, engine, _ = assemble(model, {"scheduler": {"max_num_seqs": model.max_num_seqs}})
    sock = bind("127.0.0.1", 0)
    engine.start()
    run(
        app, engine, sock, drain_seconds=drain_seconds, max_connections=4, ready=lambda: print(url_of(sock), flush=True)
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
