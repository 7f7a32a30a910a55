"""The runs of a module's jobs, all in one world."""

import pytest
from runs import Plan, names_asked

from tests.matrix.jobs import EVERY, add


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of a module that need no launcher of their own.

    Those of the matrix that it is asked for, and what it has in ``MORE``, by the test's name; or,
    in ``NEEDS``, jobs of the matrix.
    """
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    for test in asked & getattr(request.module, "NEEDS", {}).keys():
        asked |= request.module.NEEDS[test]
    for name in filter(asked.__contains__, EVERY):
        add(plan, name)
    for test, add_runs in request.module.MORE.items():
        if test in asked:
            add_runs(plan)
    plan.run(600)
    return plan
