"""`qarl-trl serve`: the rollout engine of a run as a server of its own."""
