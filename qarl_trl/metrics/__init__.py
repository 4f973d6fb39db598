"""What is logged, whatever the loss and the learner; the names are in docs/metrics.md."""
