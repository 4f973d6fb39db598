"""`qarl-trl report`: what runs logged, side by side, as pictures and one page. Reads files only; torch is not loaded."""
