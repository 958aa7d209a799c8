"""The server against its own description: what it says it takes, it takes or refuses properly."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from server_here import scripted_engine, serving

OPERATIONS = {
    "/v1/completions": "post",
    "/v1/chat/completions": "post",
    "/v1/models": "get",
    "/v1/models/{name}": "get",
    "/health": "get",
    "/metrics": "get",
}
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
QUIET = {"suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def running():
    with serving(scripted_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def described(running):
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


def test_the_description_is_one_and_whole(described):
    described.validate()
    found = [operation.ok() for operation in described.get_all_operations()]
    assert {each.path: each.method for each in found} == OPERATIONS


def check(described, path, mode, data):
    """A case that schemathesis made: 2xx or 4xx, each in its format, within the time."""
    operation = described[path][OPERATIONS[path]]
    case = data.draw(operation.as_strategy(generation_mode=mode))
    answer = case.call(timeout=20)
    case.validate_response(answer, checks=[not_a_server_error])
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] in ("invalid_request_error", "not_found_error")
        assert error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=6, **QUIET)
@given(data=st.data())
def test_calls_keep_to_the_format(described, path, mode, data):
    check(described, path, mode, data)


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("path", OPERATIONS)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=400, **QUIET)
@given(data=st.data())
def test_every_path_keeps_to_the_format_at_length(described, path, mode, data):
    if mode is GenerationMode.NEGATIVE and OPERATIONS[path] == "get":
        pytest.skip("it takes nothing that could be wrong")
    check(described, path, mode, data)
