"""`qarl_trl.quant.digest`: models that differ in low bits alone have different digests."""

import torch
from conftest import make_model

from qarl_trl.quant import apply_quantization
from qarl_trl.quant.digest import with_low_bits
from qarl_trl.quant.layers.layer import quantized_modules
from qarl_trl.quant.scheme import resolve_scheme, single_group
from qarl_trl.quant.start import load_frozen_base


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
    # The learner of rollout-only training.
    assert digest(scheme="W4A16", quantize_forward=False) == "digest"


def test_frozen_bases_of_one_scheme_have_the_digests_of_their_bytes(tmp_path):
    make_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], ["lm_head"])
    base = load_frozen_base(str(tmp_path), plan)
    first = with_low_bits("digest", base)
    assert with_low_bits("digest", base) == first  # control

    _, layer = next(quantized_modules(base))
    layer.frozen_weight.data["weight_packed"][0, 0] += 1
    assert with_low_bits("digest", base) != first
