"""`qarl-trl doctor`: what can be known of a run before it costs anything, section by section."""
