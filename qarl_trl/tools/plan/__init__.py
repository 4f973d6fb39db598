"""What a run needs of a GPU's memory, before it starts: formulas.py, the model they are of, and the command `qarl-trl plan`."""
