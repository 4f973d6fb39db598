"""`qarl-trl report`: what runs logged, side by side, as pictures and one page.

It reads files only; torch is not loaded.
"""
