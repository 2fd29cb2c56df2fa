"""Processes of their own, which can be killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import Server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server
