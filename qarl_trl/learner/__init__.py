"""Forward passes of the learner without padding."""
