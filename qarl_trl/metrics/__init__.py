"""The metrics of every run, whatever its loss and learner; docs/metrics.md explains each."""
