"""`math_reward`: right, wrong, unreadable, broken, endless."""

import logging
import os
import signal
import sys
import threading
import time
from unittest import mock

import math_verify
import pytest
from math_verify.errors import TimeoutException

from qarl_trl import grading, rewards
from qarl_trl.data import final_answer
from qarl_trl.rewards import math_reward


def die_or_grade(completion, reference):
    """In the grader's place: dies of the answer "die"."""
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return float(completion == rf"\boxed{{{reference}}}")


def fail(completion, reference):
    """In the grader's place: always fails."""
    return 1 / 0


def grade_slowly(completion, reference):
    """In the grader's place: takes a second for the answer "slow", which is right."""
    if completion == "slow":
        time.sleep(1)
    return 1.0


@pytest.fixture
def log(monkeypatch, caplog):
    """The log of this test, whose `records` are its warnings; none of them was said before."""
    monkeypatch.setattr(rewards, "_said", set())
    with caplog.at_level(logging.WARNING, logger="qarl_trl.rewards"):
        yield caplog


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"... so $x = \boxed{42}$.", "42", 1.0),
        (r"\boxed{41}", "42", 0.0),
        # Words are no products of their letters.
        (r"\boxed{BADC}", "ABCD", 0.0),
        (r"\boxed{BAC}", "ABC", 0.0),
        (r"\boxed{stop}", "post", 0.0),
        (r"\boxed{\text{not enough}}", "too little", 0.0),
        (r"\boxed{Alice and Bob}", "Bob and Alice", 1.0),
        (r"\boxed{abcd}", "ABCD", 1.0),
        # These may be.
        (r"\boxed{zyx}", "xyz", 1.0),
        (r"\boxed{bacd}", "abcd", 1.0),
        (r"\boxed{BA}", "AB", 1.0),
        # Signs in place of LaTeX's commands.
        (r"\boxed{90^\circ}", "90°", 1.0),
        (r"\boxed{90}", "90°", 1.0),
        (r"\boxed{80°}", "90°", 0.0),
        (r"\boxed{\frac12}", "½", 1.0),
        (r"\boxed{1 1/2}", "3/2", 1.0),
        (r"\boxed{\frac{11}{4}}", "2 3/4", 1.0),
        (r"\boxed{1 1/2}", "1", 0.0),
        (r"\boxed{-2 1/2}", "-5/2", 1.0),
        ("The answer is 2 1/2.", "5/2", 1.0),
        ("The answer is 2 1/2.", "1/2", 0.0),
        (r"\boxed{1,000 1/2}", "1000.5", 1.0),
        (r"\boxed{1000.5}", "1,000 1/2", 1.0),
        (r"\boxed{10{,}000 1/2}", "10000.5", 1.0),
        (r"\boxed{1,000 1/2}", "0.5", 0.0),
        # Not (2 + 1)/2, in a reference either.
        (r"\boxed{3/2}", "2 1/2", 0.0),
        (r"\boxed{1}", r"$1 1/2$", 0.0),
        (r"\boxed{2 1/2}", r"$2 1/2$", 1.0),
        # Nor does its bar belong to what is beside it.
        (r"\boxed{3 : 2 1/2}", "6/5", 1.0),
        (r"\boxed{6:5}", "3:2 1/2", 1.0),
        (r"\boxed{3/10}", "3:2 1/2", 0.0),
        (r"\boxed{4 \div 2 1/2}", "8/5", 1.0),
        (r"\boxed{4 \div 2 1/2}", "2/5", 0.0),
        (r"\boxed{\frac{5\pi}{2}}", r"2 1/2 \pi", 1.0),
        (r"\boxed{\frac{5}{2\pi}}", r"2 1/2 \pi", 0.0),
        (r"\boxed{2 1/2 x}", r"\frac{5}{2}x", 1.0),
        (r"\boxed{2 1/2 m}", "5/2", 1.0),
        ("The answer is 2 1/2 m.", "5/2", 1.0),
        ("The answer is 2 1/2 hours.", "5/2", 1.0),
        ("The answer is: 2 1/2.", "5/2", 1.0),
        # No division, in spite of what stands before the colon.
        (r"\textbf{The answer is}: 2 1/2.", "5/2", 1.0),
        ("Thus, the answer (in hours): 2 1/2.", "5/2", 1.0),
        ("The answer for part (2): 2 1/2.", "5/2", 1.0),
        (r"\boxed{(1 + 2) : 2 1/2}", "6/5", 1.0),
        (r"\boxed{(1 + 2):2 1/2}", "6/5", 1.0),
        (r"\boxed{3: 2 1/2}", "6/5", 1.0),
        (r"\boxed{(1 + 2): 2 1/2}", "6/5", 1.0),
        ("The final answer is: 2 1/2. I hope it is correct.", "5/2", 1.0),
        # The stop of a sentence is no decimal point.
        ("The answer is 14/3.", "14/3", 1.0),
        ("The answer is **-3/5**.", "-3/5", 1.0),
        ("The answer is 1/2.5", "2/5", 1.0),
        ("The answer is 1/2.5", "1/2", 0.0),
        (r"\boxed{\frac14}", "½", 0.0),
        (r"\boxed{\varnothing}", r"\emptyset", 1.0),
        (r"\boxed{\emptyset}", r"\varnothing", 1.0),
        (r"\boxed{0}", r"\varnothing", 0.0),
        (r"\boxed{3\sqrt{2}}", "3√2", 1.0),
        (r"\boxed{√(x+1)}", r"\sqrt{x+1}", 1.0),
        (r"\boxed{3\sqrt{3}}", "3√2", 0.0),
        # A date is no subtraction.
        (r"\boxed{2018}", "2024-01-05", 0.0),
        (r"\boxed{2024-01-06}", "2024-01-05", 0.0),
        (r"\boxed{2024-01-05}", "2024-01-05", 1.0),
        ("The answer is 2024-01-05.", "2024-01-05", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{0.5}", r"$\frac12$", 1.0),
        (r"\boxed{18}", "$18", 1.0),
        (r"\boxed{27}", 27.0, 1.0),
        (r"\boxed{1234}", "1,234", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        # As GSM8K's solutions end. Elsewhere, and beside a box, it is a heading.
        ("2 + 5 = 7\n#### 7", "7", 1.0),
        ("2 + 5 = 7\n#### 7", "8", 0.0),
        ("The sum is 1.\n#### -$1,234.50\n", "-1234.5", 1.0),
        ("The answer is 3.\n#### 7", "7", 1.0),
        ("x\n#### 5.", "5", 1.0),
        ("x\n#### $-7", "-7", 1.0),
        ("x\n#### \N{MINUS SIGN}7", "-7", 1.0),
        ("x\n#### **7**", "7", 1.0),
        ("x\n#### 1,200 miles", "1200", 1.0),
        ("x\n#### 3/4", "3/4", 1.0),
        ("x\n#### 3/4", "3", 0.0),
        ("x\n#### 2 Add", "2", 0.0),
        ("x\n#### 1 1/2", "3/2", 1.0),
        ("x\n#### 1 1/2", "1", 0.0),
        ("x\n#### 42 km/h", "42", 1.0),
        ("x\n#### 42 square meters", "42", 1.0),
        ("x\n#### 2 times as many", "2", 0.0),
        # Spaces between thousands are no product.
        (r"\boxed{12000}", "12 000", 1.0),
        (r"\boxed{0}", "12 000", 0.0),
        (r"\boxed{1 234 567.5}", "1234567.5", 1.0),
        ("\\boxed{12\N{NARROW NO-BREAK SPACE}000}", "12000", 1.0),
        (r"\boxed{12 000}", "0", 0.0),
        ("The answer is $12 000$.", "12 000", 1.0),
        (r"\boxed{-12000}", "-12 000", 1.0),
        (r"\boxed{12000}", "-12 000", 0.0),
        (r"\boxed{12 000 \text{ km}}", "12000", 1.0),
        (r"\boxed{x = 12 000}", "12000", 1.0),
        (r"\boxed{12000}", r"$12\,000\text{ km}$", 1.0),
        (r"\boxed{0}", r"12\,000", 0.0),
        (r"\boxed{5\,000}", r"12\,000", 0.0),
        (r"\boxed{0}", r"1\;000\;000", 0.0),
        # These are products, and a mixed number.
        (r"\boxed{x^2 100}", "100x^2", 1.0),
        (r"\boxed{2 100/3}", "106/3", 1.0),
        (r"\boxed{700}", "2 100/3", 0.0),
        ("x\n#### " + "1" * 3990 + "x", "1", 0.0),
        ("#### 7\nNext we add.", "7", 0.0),
        ("#### 7. Add", "7", 0.0),
        ("\\boxed{3}\n#### 7", "7", 0.0),
        ("\\boxed{3}\n#### 7", "3", 1.0),
        # What follows the thoughts counts, if it has an answer.
        (r"<think>maybe \boxed{3}</think> The answer is 7.", "7", 1.0),
        (r"<think>maybe \boxed{3}</think> The answer is 7.", "3", 0.0),
        ("<think>The answer is 3.</think>\n#### 7", "7", 1.0),
        (r"<think>\boxed{3}</think> $\boxed{7}$", "7", 1.0),
        # Zero is an answer, and an inequality has no truth value.
        (r"<think>maybe \boxed{3}</think> The answer is 0.", "0", 1.0),
        (r"<think>maybe \boxed{3}</think> The answer is $x < 5$.", "$x < 5$", 1.0),
        (r"<think>so \boxed{7}</think> I hope this answers it.", "7", 1.0),
        (r"<think>so \boxed{7}</think> I hope the answer is clear.", "7", 1.0),
        (r"<think>so \boxed{7}</think> The answer is: see above.", "7", 1.0),
        (r"<think>maybe \boxed{3}</think> **Final Answer**: $7$", "7", 1.0),
        (r"<think>maybe \boxed{3}</think> **Answer**: 7", "7", 1.0),
        (r"<think>maybe \boxed{3}</think> **Answer**: 7", "3", 0.0),
        ("<think>2024-01-05</think> The answer is above.", "2024-01-05", 1.0),
        ("<think>2024-01-05</think> The answer is 2024-01-06.", "2024-01-05", 0.0),
        (r"\boxed{2}" + " but" * 50 + r" \boxed{1}", "2", 0.0),
        (r"\boxed{1} or \boxed{2}", "2", 0.0),
        # Another sentence or line: a step, or an answer that is taken back.
        (r"\boxed{7}. I made an error; the correct value is \boxed{42}.", "42", 1.0),
        (r"\boxed{7}. I made an error; the correct value is \boxed{42}.", "7, 42", 0.0),
        (r"\boxed{7}. I made an error; the correct value is \boxed{42}.", "7", 0.0),
        ("Step 1: \\boxed{7}\nStep 2: \\boxed{42}", "42", 1.0),
        (r"x: \boxed{3}, i.e. the other y: \boxed{4}", "3, 4", 1.0),
        (r"\boxed{\text{Bo}}. No, it is \boxed{\text{Al}}", "Al", 1.0),
        (r"\boxed{1}. No, these are two: \boxed{2} and \boxed{3}", "2, 3", 1.0),
        (r"\boxed{1} or \boxed{2}", "1, 2", 1.0),
        # A list has the parts of one answer, as in a recipe: its last part alone is not the answer.
        (r"\boxed{2}", ["1", "2"], 0.0),
        (r"\boxed{1, 2}", ["1", "2"], 1.0),
        (r"\boxed{2, 1}", [1, 2.0], 1.0),
        (r"\boxed{2}", ["2"], 1.0),
        (r"\boxed{2}", [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}], 1.0),
        # Words in a formula, which a reference has as text or in a formula of its own.
        (r"\boxed{\text{not enough information}}", "Not enough information", 1.0),
        (r"$\boxed{\text{Alice and Bob}}$", "Alice and Bob", 1.0),
        (r"$\boxed{\text{Alice and Bob}}$", "Alice", 0.0),
        (r"\boxed{II}", r"\text{II}", 1.0),
        (r"\boxed{\text{II}}", "III", 0.0),
        (r"\boxed{10:30 \text{ AM}}", "10:30 AM", 1.0),
        (r"\boxed{\text{10:30 AM}}", r"$10:30\text{ AM}$", 1.0),
        (r"\boxed{11:30 \text{ AM}}", "10:30 AM", 0.0),
        (r"\boxed{\text{2 hours 30 minutes}}", r"The time is \boxed{2 \text{ hours } 30 \text{ minutes}}", 1.0),
        # Letter by letter, and no second guess.
        (r"\boxed{\text{ABC and D}}", "ACB and D", 0.0),
        (r"\boxed{\text{no one}} \boxed{\text{not one}}", "not one", 0.0),
        (r"\boxed{\text{no one}}" + " but" * 50 + r" \boxed{\text{not one}}", "not one", 1.0),
        (r"\boxed{\text{not one}}", r"\boxed{\text{no one}} or \boxed{\text{not one}}", 0.0),
        (r"\boxed{\text{no one}}. The final answer is $5$. I hope it is correct.", "no one", 0.0),
        ("The answer is 42.", "42", 1.0),
        # Emphasis of Markdown, and signs that look like it.
        ("The answer is **42**.", "42", 1.0),
        ("**The answer is 42.**", "42", 1.0),
        ("The final answer is: `42`", "42", 1.0),
        ("The answer is **41**.", "42", 0.0),
        (r"\boxed{2*3*7}", "42", 1.0),
        (r"\boxed{2^{2}*3*(5)}", "60", 1.0),
        (r"\boxed{2^{3}*3*\frac{5}{7}}", r"\frac{120}{7}", 1.0),
        ("Answer: $(7)*(3)*(2)$", "42", 1.0),
        (r"Answer: $\pi*(3)*(2)*(5)$", r"30\pi", 1.0),
        ("Answer: (1+2)*(3+4)*(5+6)", "231", 1.0),
        ("Answer: (2)**(3) + (3)**(2)", "17", 1.0),
        (r"\boxed{a_1 * a_2 * 3}", "a_1 a_2 3", 1.0),
        (r"\boxed{0.00001}", 1e-05, 1.0),
        # Minerva's notation of numbers, in which e is not Euler's.
        (r"\boxed{4.5 \times 10^{33} \text{ erg}}", "4.5e33", 1.0),
        (r"\boxed{8.7 \times 10^8}", "8.7e8", 1.0),
        (r"\boxed{870000000}", "8.7e8", 1.0),
        ("The answer is 4.5e33.", r"4.5 \times 10^{33}", 1.0),
        (r"\boxed{10^{-5}}", "1e-5", 1.0),
        (r"\boxed{2e3}", "2000", 1.0),
        (r"\boxed{4.6 \times 10^{33}}", "4.5e33", 0.0),
        (r"\boxed{4.5 \times 10^{32}}", "4.5e33", 0.0),
        (r"\boxed{-1+2e}", "2e-1", 1.0),
        (r"\boxed{3e^2}", "3e^{2}", 1.0),
        # Numbers near 0, which are all equal to six places.
        (r"\boxed{2 \times 10^{-7}}", "0.0000001", 0.0),
        (r"\boxed{1.4 \times 10^{-7}}", "0.0000001", 0.0),
        (r"\boxed{x = 2 \times 10^{-7}}", "0.0000001", 0.0),
        (r"\boxed{1 \times 10^{-7}}", "0.0000001", 1.0),
        (r"\boxed{1.6 \times 10^{-19}}", r"6.63 \times 10^{-34}", 0.0),
        (r"\boxed{x = 6.63 \times 10^{-34}}", r"6.63 \times 10^{-34}", 1.0),
        (r"\boxed{\frac{1}{3000}}", "1/3000", 1.0),
        (r"\boxed{0.000333}", "1/3000", 1.0),
        (r"\boxed{0.05\%}", "0.0005", 1.0),
        (r"It is 50\% less. \boxed{10^{-9}}", "0.0000001", 0.0),
        (r"\boxed{5.976 \times 10^{-24}}", "5.98e-24", 1.0),
        (r"\boxed{5.99 \times 10^{-24}}", "5.98e-24", 0.0),
        (r"\boxed{2.7779 \times 10^{-6}}", "2.7778e-6", 0.0),
        # What writers put around a number.
        (r"The answer is \$18.", "18", 1.0),
        (r"The answer is **\$18**.", "18", 1.0),
        (r"The answer is \$19.", "18", 0.0),
        (r"\boxed{18.}", "18", 1.0),
        (r"\boxed{5}", "5.", 1.0),
        (r"\boxed{\text{a.m.}}", r"\text{a.m.}", 1.0),
        (r"\boxed{\{1, 2\}.}", r"\{1,2\}", 1.0),
        (r"\boxed{x = 58,500}", "58,500", 1.0),
        (r"\boxed{58\,500}", "58500", 1.0),
        (r"\boxed{58\,500}", "58501", 0.0),
        (r"\boxed{\frac{58,500}{7}}", r"\frac{58500}{7}", 1.0),
        # In brackets a comma separates.
        (r"\boxed{(1,234)}", "(1,234)", 1.0),
        (r"\boxed{(1,234)}", "1234", 0.0),
        (r"\boxed{1234}", "(1,234)", 0.0),
        (r"\boxed{\{1234\}}", r"\{1,234\}", 0.0),
        (r"\boxed{(\sqrt{(2)}, 3,100)}", r"(\sqrt{2}, 3100)", 0.0),
        (r"\boxed{P(2) = 58,500}", "58500", 1.0),
        (r"The answer is \(x = 58,500\).", "58500", 1.0),
        (r"The answer is \((2,100)\).", "2100", 0.0),
        (r"\boxed{(0,100]}", "100", 0.0),
        (r"\boxed{100}", "0,100", 0.0),
        (r"\boxed{0.5100}", "0.5,100", 0.0),
        ("(Each pays 5 of it: The answer is $A = 58,500$.", "58500", 1.0),
        ("The answer is \N{MINUS SIGN}3.", "-3", 1.0),
        ("The answer is \N{MINUS SIGN}3.", "3", 0.0),
        # A number in another font, and a relation before it.
        (r"\boxed{\text{27}}", "27.0", 1.0),
        (r"\boxed{\mathbf{27.0}}", "27", 1.0),
        (r"\boxed{\text{28}}", "27.0", 0.0),
        (r"\boxed{\mathbf{\frac{1}{2}}}", "0.5", 1.0),
        (r"\boxed{\boldsymbol{\frac{1}{3}}}", "0.5", 0.0),
        (r"\boxed{\approx 42}", "42", 1.0),
        (r"\boxed{= 42}", "42", 1.0),
        (r"\boxed{\approx 43}", "42", 0.0),
        (r"\boxed{\approx 42} or \boxed{43}", "42", 0.0),
        # Signs in place of LaTeX's commands.
        (r"\boxed{x²}", "x^2", 1.0),
        (r"\boxed{\sim 5}", "5", 1.0),
        # A negation; a range; the argument of a root.
        (r"\boxed{\sim p}", "p", 0.0),
        (r"\boxed{5\text{-}12}", "-7", 0.0),
        (r"\boxed{\sqrt\mathbf{16}}", "6", 0.0),
        (r"\boxed{\sqrt \mathbf{16}}", "6", 0.0),
        (r"\boxed{\sqrt \mathbf{16}}", "4", 1.0),
        (r"\boxed{\frac{1}\mathbf{25}}", "2.5", 0.0),
        (r"\boxed{2\cdot\text{3}}", "6", 1.0),
        (r"\boxed{\displaystyle\mathbf{\frac{1}{2}}}", "0.5", 1.0),
        (r"\boxed{\sim \frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\sim\text{5}}", "5", 1.0),
        (r"\boxed{\text{= 5}}", "5", 1.0),
        (r"\boxed{\approx\text{42.0}}", "42", 1.0),
        (r"\boxed{3\text{,}000}", "3000", 1.0),
        (r"\boxed{x³}", "x^2", 0.0),
        (r"\boxed{x^{2}}", "x²", 1.0),
        ("\\boxed{2 \N{MULTIPLICATION SIGN} 10⁻³}", "0.002", 1.0),
        ("\\boxed{2 \N{MULTIPLICATION SIGN} 10³}", "0.002", 0.0),
        (r"\boxed{2·3}", "6", 1.0),
        (r"\boxed{2·3}", "23", 0.0),
        (r"\boxed{(-∞, 3)}", r"(-\infty,3)", 1.0),
        (r"\boxed{(-∞, 4)}", r"(-\infty,3)", 0.0),
        # A number that is not announced as the answer.
        ("I counted 42 apples on the way", "42", 0.0),
        # Parts of one message.
        ([{"type": "text", "text": r"\boxed{"}, {"type": "text", "text": "3}"}], "3", 1.0),
        ("", "42", 0.0),
    ],
)
def test_answer_is_judged(completion, answer, reward):
    message = [{"role": "assistant", "content": completion}]

    # As text and as a message: TRL gives one or the other, by the prompts.
    assert math_reward([completion], [answer]) == [reward]
    assert math_reward([message], [answer]) == [reward]


@pytest.mark.parametrize(
    ("solution", "half"),
    [
        (r"Hence $x=\boxed{1}$ or $x=\boxed{2}$.", r"\boxed{2}"),
        (r"The points are \boxed{(1,2)} and \boxed{(3,4)}.", r"\boxed{(3,4)}"),
        (r"\[\boxed{1}\text{ or }\boxed{\frac{5}{2}}\]", r"\boxed{\frac{5}{2}}"),
        (r"The roots are $\boxed{2}, \boxed{3}$, and $\boxed{4}$", r"\boxed{3, 4}"),
    ],
)
def test_a_solution_with_several_boxes_is_right_by_its_own_reference_and_half_of_it_is_not(solution, half):
    reference = final_answer(solution)

    assert math_reward([solution, half], [reference] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "paid"),
    [
        # math-verify reads the last part alone.
        (r"$\boxed{2}$, and $\boxed{4}$", "2, 4"),
        (r"$\boxed{2}$, $\boxed{4}$", "2, 4"),
        (r"\boxed{2.} and \boxed{4.}", "2, 4"),
        (r"$\boxed{2}; \boxed{4}$", "2, 4"),
        # It joins boxes in other ways, too.
        (r"$\boxed{2} \boxed{4}$", "2, 4"),
        (r"\boxed{2} \boxed{3} and \boxed{4}", "2, 3, 4"),
        # It prefers what is announced with these words, and knows no \fbox.
        (r"\boxed{2}. The final answer is $4$. I hope it is correct.", "4"),
        (r"\boxed{2}, \boxed{3}. The final answer is $4$. I hope it is correct.", "2, 3"),
        (r"\fbox{2}, \fbox{3}. The answer is 4.", "2, 3"),
        (r"\fbox{2}. The answer is 4.", "4"),
        # An answer outside the box is no second guess, if math-verify cannot read the box as it is written, ...
        (r"The answer is 2. \boxed{4.}", "4"),
        (r"\boxed{4.} So the answer is 2.", "4"),
        (r"The answer is 2. \boxed{4^\circ.}", "4"),
        (r"The answer is 2. \boxed{4°.}", "4"),
        ("The answer is 2. \\boxed{≈ 4}", "4"),
        ("The answer is 2. \\boxed{√16}", "4"),
        ("The answer is 2. \\boxed{1·4}", "4"),
        (r"$\boxed{2}$, no: it is $\boxed{4.}$", "4"),
        # ... nor a first one, if it cannot read it at all.
        (r"The answer is 2. \boxed{4?}", None),
        (r"The answer is 2. \boxed{}", "2"),
    ],
)
def test_one_completion_is_right_by_one_reference(completion, paid):
    references = ["2", "3", "4", "2, 3", "2, 4", "3, 4", "2, 3, 4"]

    rewards_of_all = math_reward([completion] * len(references), references)

    assert rewards_of_all == [float(reference == paid) for reference in references]


def test_what_a_tool_returns_is_not_the_answer():
    call = {"role": "assistant", "content": r"I ask: \boxed{7}?", "tool_calls": [{}]}
    result = {"role": "tool", "name": "solver", "content": r"\boxed{42}"}
    answer = {"role": "assistant", "content": r"So \boxed{42}."}

    assert math_reward([[call, result], [call, result, answer]], ["42", "42"]) == [0.0, 1.0]


def test_one_answer_in_two_forms_is_right_in_each():
    # As in MATH: a mixed number, and the same as a fraction.
    reference = final_answer(r"so $d = \boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$ inches.")

    completions = [r"\boxed{15\frac{39}{40}}", r"\boxed{\frac{639}{40}}", r"\boxed{\frac{640}{40}}"]
    assert math_reward(completions, [reference] * 3) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "garbage",
    [None, [], [{"role": "assistant"}], r"\boxed{" * 2000, "$" * 4001, "\ud800", 7],
)
def test_broken_completion_gets_zero_and_no_exception(garbage):
    # The second shows that the first did not cost the others their rewards.
    assert math_reward([garbage, r"\boxed{3}"], ["3", "3"]) == [0.0, 1.0]


@pytest.mark.parametrize("reference", ["", "   ", None, []])
def test_unreadable_reference_is_not_scored_and_is_said_once(reference, log):
    assert math_reward([r"\boxed{3}", r"\boxed{3}"], [reference, "3"]) == [None, 1.0]
    assert math_reward([r"\boxed{3}"], [reference]) == [None]

    assert len(log.records) == 1


def test_a_reference_that_a_busy_machine_did_not_read_in_time_is_tried_again(monkeypatch):
    attempts = []
    parse = math_verify.parse

    def slow_at_first(text, **kwargs):
        attempts.append(kwargs["parsing_timeout"])
        if len(attempts) == 1:
            raise TimeoutException
        return parse(text, **kwargs)

    monkeypatch.setattr(math_verify, "parse", slow_at_first)
    assert grading.grade(r"\boxed{17}", "17") == 1.0
    assert attempts[1] > attempts[0]

    # What never ends is not readable, and costs its time once. This has two readings.
    monkeypatch.setattr(math_verify, "parse", mock.Mock(side_effect=TimeoutException))
    for _ in range(2):
        assert grading.grade(r"\boxed{18}", "18°") is None
    taken = [call.kwargs["parsing_timeout"] for call in math_verify.parse.call_args_list]
    assert len(taken) == 3
    # A grader that is killed forgets it, and scores 0.
    assert sum(taken) + grading._ALARM_S < rewards._LIMIT_S


def test_endless_comparison_ends_with_zero_in_any_thread(monkeypatch, log):
    monkeypatch.setattr(rewards, "_LIMIT_S", 1)
    assert math_reward([r"\boxed{3}"], ["3"]) == [1.0]
    graded = []
    thread = threading.Thread(target=lambda: graded.extend(math_reward([r"\boxed{9^{9^{9^{9}}}}"] * 2, ["3"] * 2)))

    start = time.monotonic()
    thread.start()
    thread.join()

    assert graded == [0.0, 0.0]
    assert time.monotonic() - start < 15
    # Said of the first of the two alone.
    said = "\n".join(record.message for record in log.records)
    assert said.count("no result within 1 s") == 1
    assert "no result within 1 s" in log.records[0].message
    # A fresh process goes on.
    assert math_reward([r"\boxed{3}"], ["3"]) == [1.0]


def test_answers_that_are_not_graded_within_the_time_of_their_batch_count_as_wrong(monkeypatch, log):
    monkeypatch.setattr(rewards, "grade", grade_slowly)
    # Imports take longer than the batch may.
    math_reward(["starts the process"], ["3"])

    start = time.monotonic()
    graded = math_reward(["quick", *["slow"] * 20], ["3"] * 21, reward_timeout=2.5)

    assert time.monotonic() - start < 6
    right = graded.count(1.0)
    # Two of the slow ones, or fewer on a busy machine.
    assert graded == [1.0] * right + [0.0] * (21 - right)
    assert 1 <= right <= 3
    (warning,) = log.records
    assert warning.message.startswith(f"{21 - right} of 21 answers were not graded within reward_timeout=2.5 s")


def test_the_time_of_a_batch_starts_anew_with_each_and_each_says_how_many(monkeypatch, log):
    monkeypatch.setattr(rewards, "grade", grade_slowly)
    (reward,) = rewards.load_rewards(["math_reward"], reward_timeout=0.5)

    assert reward(["slow", "quick"], answer=["3", "3"]) == [0.0, 0.0]
    assert reward(["quick", "slow"], answer=["3", "3"]) == [1.0, 0.0]

    assert [record.message.split(" were")[0] for record in log.records] == ["2 of 2 answers", "1 of 2 answers"]


def test_killed_grader_scores_zero_says_so_once_and_goes_on(monkeypatch, log):
    monkeypatch.setattr(rewards, "grade", die_or_grade)

    assert math_reward(["die", r"\boxed{3}", "die"], ["3"] * 3) == [0.0, 1.0, 0.0]

    (warning,) = log.records
    assert warning.message.count("died of SIGKILL") == 1


def test_grader_that_always_fails_is_an_error_at_the_start_and_said_once_later(monkeypatch, log):
    monkeypatch.setattr(rewards, "grade", fail)
    # Other tests have started it, and it is tried only when it is new.
    rewards._WORKER.close()

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        math_reward(["1"], ["1"])
    assert math_reward(["1", "2"], ["1", "2"]) == [0.0, 0.0]

    (warning,) = log.records
    assert warning.message.count("ZeroDivisionError") == 1


def test_fork_grades_for_itself():
    assert math_reward([r"\boxed{3}"], ["3"]) == [1.0]

    # Both would read answers from one pipe, and get those of the other.
    child = os.fork()
    if child == 0:
        graded = math_reward([r"\boxed{3}", r"\boxed{4}"], ["3", "3"])
        os._exit(int(graded != [1.0, 0.0]))

    _, status = os.waitpid(child, 0)
    assert status == 0
    assert math_reward([r"\boxed{3}"], ["3"]) == [1.0]


def test_missing_math_verify_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)

    with pytest.raises(ImportError, match=r"pip install qarl_trl\[math\]"):
        math_reward(["1"], ["1"])
