"""`qarl_trl.quant.digest`: models that differ in low bits alone have different digests."""

from conftest import make_model

from qarl_trl.quant import apply_quantization
from qarl_trl.quant.digest import with_low_bits


def test_schemes_have_digests_of_their_own_and_high_precision_keeps_the_given_one():
    def digest(**changes):
        return with_low_bits("digest", apply_quantization(make_model(), **changes))

    digests = {
        digest(scheme="W4A16", group_size=128),
        digest(scheme="W4A16", group_size=32),
        digest(scheme="FP8_DYNAMIC"),
    }
    assert len(digests) == 3
    assert digest(scheme="FP8_DYNAMIC") in digests  # control: it is no number of the object
    assert with_low_bits("digest", make_model()) == "digest"
