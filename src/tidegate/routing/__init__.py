"""Which of several engines serves a request: pure, so that a gateway and a simulation share it."""
