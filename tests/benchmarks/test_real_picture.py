"""The picture of docs/results.md: a dot for each pair of the real model's cells."""

import pytest
import real_picture
import real_table
from matplotlib.container import ErrorbarContainer


@pytest.mark.parametrize(
    ("column", "first", "second"),
    [
        ("both\nrounded", ("rollout-only", "low_bit"), ("QaRL", "low_bit")),
        ("both by\nGPTQ", ("rollout-only", "gptq"), ("QaRL", "gptq")),
        ("both in\nbfloat16", ("rollout-only", "masters"), ("QaRL", "masters")),
        ("QaRL rounded,\nrollout-only\nby GPTQ", ("rollout-only", "gptq"), ("QaRL", "low_bit")),
    ],
)
def test_each_pair_is_a_dot_above_the_name_of_its_contrast(column, first, second):
    """Also those of a regime that came later."""
    pairs = real_table.pairs_of_choice(first, second)
    assert len(pairs) > 10

    (axis,) = real_picture.pairs_picture().axes

    places = dict(zip([label.get_text() for label in axis.get_xticklabels()], axis.get_xticks(), strict=True))
    assert len(places) == 4
    # The other containers are the bars of means.
    dots = [container.lines[0] for container in axis.containers if isinstance(container, ErrorbarContainer)]
    heights = [dot.get_ydata()[0] for dot in dots if abs(dot.get_xdata()[0] - places[column]) < 0.5]
    assert sorted(heights) == sorted(pair.mean for pair in pairs)
