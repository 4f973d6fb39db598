"""What a run needs of a GPU's memory, before it starts: `qarl-trl plan`."""
