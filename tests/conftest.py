"""What every test shares."""

import torch
from hypothesis import HealthCheck, settings

# Models here are tiny: a second thread costs more than it brings, many times more on a busy machine.
torch.set_num_threads(1)

# No test may fail because the machine is busy.
settings.register_profile("treegraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treegraft")
