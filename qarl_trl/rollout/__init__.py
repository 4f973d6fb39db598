"""The rollout engine: start it in a scheme, sync the learner's low-bit tensors to it, and check it."""
