"""The rollout engine: started in a scheme, fed with the learner's low-bit tensors, and checked."""
