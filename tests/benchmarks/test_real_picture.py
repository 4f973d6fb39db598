"""The picture of docs/results.md: a dot for each pair of the real model's cells."""

import real_picture
import real_table
from matplotlib.container import ErrorbarContainer


def test_each_pair_is_a_dot():
    """Also those of a regime that came later."""
    contrasts = real_table.CHOICES[: len(real_picture.COLUMNS)]
    pairs = [pair for _, first, second in contrasts for pair in real_table.pairs_of_choice(first, second)]

    (axis,) = real_picture.pairs_picture().axes

    # The other containers are the bars of means.
    dots = [container for container in axis.containers if isinstance(container, ErrorbarContainer)]
    heights = [dot.lines[0].get_ydata()[0] for dot in dots]
    assert sorted(heights) == sorted(pair.mean for pair in pairs)
