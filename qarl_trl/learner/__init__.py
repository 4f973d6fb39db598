"""Passes through the learner that hold real tokens only."""
