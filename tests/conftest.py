"""What every test shares."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Models here are tiny: a second thread costs more than it brings, many times more on a busy machine.
torch.set_num_threads(1)

# No test may fail because the machine is busy.
settings.register_profile("treegraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A change is judged by the same examples each time; a developer's runs go on looking for new ones.
settings.register_profile("ci", settings.get_profile("treegraft"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "treegraft")


@pytest.fixture(autouse=True, scope="session")
def measurements_of_their_own(tmp_path_factory):
    """Cost measurements of a test run stay in it: neither read from nor left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEGRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
