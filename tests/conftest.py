import os

import pytest

from titan_loom.tools.logging import logger

# Models are tiny and several processes run at a time: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def restored_logger():
    """What a verb or a run in this process does to the logger ends with the test."""
    state = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = state[:2]
    logger.setLevel(state[2])


@pytest.fixture
def hub(monkeypatch):
    """A Hub of this process's own, which clients meet in place of the real one; waiting times are short."""
    from huggingface_hub import constants

    from tests.hub_server import HubServer
    from titan_loom.data import retry

    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setenv("HF_TOKEN", "")
        monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
        monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.01)
        yield server
