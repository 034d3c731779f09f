"""One pool of templates for each test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("clients"))
    yield pool
    pool.close()
