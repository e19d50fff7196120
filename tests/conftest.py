"""What every test shares."""

import torch

# Models here are tiny: a second thread costs more than it brings, many times more on a busy machine.
torch.set_num_threads(1)
