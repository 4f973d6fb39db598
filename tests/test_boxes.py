"""`qarl_trl.boxes`: which boxes are found, and which are parts of one answer."""

import pytest

from qarl_trl.boxes import last_boxes


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"$x_1=\boxed{1}, x_2 = \boxed{2}$", ["1", "2"]),
        (r"\boxed{1}, \boxed{2}, and \boxed{\boxed{3}}", ["3"]),
        (r"\(\boxed{1}\) and \(\boxed{2}\)", ["1", "2"]),
        (r"$\boxed{1}$; $\boxed{2}$", ["1", "2"]),
        # Another solution, another sentence, a guess that is taken back, a part of the way.
        (r"$ = \boxed{\frac{2}{3}}.$$OR" + "\n\n" + r"Note $\boxed{\frac23}$", [r"\frac23"]),
        (r"It is $\boxed{2}$. And then $\boxed{3}$", ["3"]),
        (r"$\boxed{5}$, not $\boxed{6}$", ["6"]),
        ("\\boxed{2}\n\n\\boxed{3}", ["3"]),
        (r"the width is $\boxed{3}$ and so the height is $\boxed{4}$.", ["4"]),
        (r"\boxed{1} or \boxed{2", []),
        ("no box", []),
    ],
)
def test_last_boxes_are_those_of_one_answer(text, contents):
    assert last_boxes(text) == contents


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"a \boxed{1} b \boxed{ \frac{1}{2} } c", [r"\frac{1}{2}"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{\left\{x\right.}", [r"\left\{x\right."]),
        (r"\fbox{7}", ["7"]),
        (r"\boxed{1", []),
    ],
)
def test_a_box_ends_where_its_braces_do(text, contents):
    assert last_boxes(text) == contents
