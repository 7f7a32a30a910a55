"""The runs of a module's jobs, all in one world."""

import pytest
from runs import Plan, names_asked

from tests.matrix.jobs import JOBS, add


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """Runs of a module: jobs of the matrix, those in ``NEEDS``, and those that ``MORE`` adds."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    for test in asked & getattr(request.module, "NEEDS", {}).keys():
        asked |= request.module.NEEDS[test]
    for name in filter(asked.__contains__, JOBS):
        add(plan, name)
    for test, add_runs in getattr(request.module, "MORE", {}).items():
        if test in asked:
            add_runs(plan)
    plan.run(600)
    return plan
