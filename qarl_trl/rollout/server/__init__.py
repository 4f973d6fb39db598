"""An engine in another process: `qarl-trl serve` starts it, a trainer syncs to it and samples from it."""
