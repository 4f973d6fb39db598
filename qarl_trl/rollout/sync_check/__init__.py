"""The sync check: does the engine answer with the weights of the last sync?

vLLM's reload can leave old values in a layer without an error, and rollouts would still look like text. So engine and
learner score one fixed prompt, and their log-probs must agree as well as two kernels can. Read the modules in this
order:

1. `prompt`: the prompt.
2. `learner_logps`: the learner's answer; `rounding_noise`: how far roundings alone move it, the noise floor.
3. `engine_logps`: the engine's answer.
4. `verdict`: what mismatch the noise floor explains; formulas alone.
5. `check`: when to check, and what happens then in all processes.
"""
