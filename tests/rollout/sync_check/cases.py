"""Log-probs of an engine and a learner, made up, for the tests of the sync check."""

import torch

from qarl_trl.rollout.sync_check.learner_logps import LearnerLogps
from qarl_trl.rollout.sync_check.prompt import LENGTH


TOKENS = LENGTH - 1  # the first one has no log-prob
NOISE = 0.01  # the noise floor, in nats per token


def noise(size=1.0):
    """Log-prob errors whose mean absolute size is exactly so many noise floors."""
    # Signs alone are random, so that a limit can be tested from both sides without luck.
    signs = 2.0 * torch.randint(2, (TOKENS,)) - 1
    return size * NOISE * signs


class Case:
    """An engine that answers uniformly before the first sync (`before`), and a learner that does not (`plain`)."""

    def __init__(self):
        torch.manual_seed(0)
        # About as far from the learner as random weights in a vocabulary of 64 are: 1 / 64 has a log of -4.2.
        self.before = torch.full((TOKENS,), -4.0)
        self.plain = self.before + torch.randn(TOKENS)
        self.learner = LearnerLogps(self.plain, self.plain + noise())
