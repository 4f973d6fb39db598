"""The quickstart: a small model learns, by RL on 4-bit rollouts, to write its working out."""
