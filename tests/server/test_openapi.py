"""What the server says of itself in its OpenAPI schema holds for whatever is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.scripted_model import ScriptedModel, says
from tests.server.serving import Served, serving

OPERATIONS = [
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "GET /v1/scheduler/explain/{request_id}",
    "GET /v1/models",
    "GET /v1/models/{model_id}",
    "GET /health",
    "GET /metrics",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedModel(says("fine"))) as server:
        yield server


@pytest.fixture(scope="module")
def operations(served: Served) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    return {operation.label: operation for operation in found}


def test_every_endpoint_is_described(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted(OPERATIONS)


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_one_that_the_schema_names(served: Served, operations: dict[str, Any], label: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operations[label].as_strategy())
    def answers(case: schemathesis.Case) -> None:
        response = case.call()
        # A body may fit the schema and still be too long for the model: then it is a 400. A request that may wait for
        # no time at all has waited too long: that 504 is its own doing.
        unfit = [positive_data_acceptance]
        if response.status_code == 504 and response.json()["error"]["code"] == "timeout":
            unfit.append(not_a_server_error)
        case.validate_response(response, excluded_checks=unfit)

    answers()
    assert served.http.get("/health").json() == {"status": "ok"}
