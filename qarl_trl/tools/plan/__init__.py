"""
`qarl-trl plan`: estimate the GPU memory and the seconds of a run before it starts.

Nothing is loaded or run: a recipe becomes numbers, and formulas read them. Read in this order:

1. `run.py`: `Run`, the numbers that all formulas read, and `gpus.py`, what data sheets say.
2. `settings.py`: how the settings of a recipe become a `Run`, and `model.py`: how its model, without weights, becomes
   `Parameter`s. `recipe.py` reads a recipe with further options.
3. `memory/`: bytes on each GPU, and which settings save some.
4. `seconds/`: how long a rollout batch takes, in bfloat16 and in low bits.
5. `command.py`: the command line, which prints a table of each.

A *plan* is what this command prints. How a model is quantized is called its *quantization*.
"""
