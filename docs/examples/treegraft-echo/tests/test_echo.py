import numpy as np

import treegraft
from treegraft.testing import MarkovTarget


def test_the_echo_is_heard_and_changes_nothing():
    target = MarkovTarget(np.roll(np.eye(3), 1, axis=1))  # says 0, 1, 2, 0, 1, 2, ...
    echo, plain = (
        treegraft.load(name, "costs={use: fixed}", models={"target": target}, registry="registry.yaml")
        for name in ("echo", "plain")
    )
    heard = echo.generate([0, 1, 2], max_new_tokens=30)
    assert heard.token_ids == plain.generate([0, 1, 2], max_new_tokens=30).token_ids == [0, 1, 2] * 10
    assert heard.accepted_per_round > 1
