"""Fold a transform into a model before RL, one that keeps its function and may help its quantization.

    python examples/llmcompressor/precondition.py --model Qwen/Qwen2.5-Math-1.5B --method smoothquant --scheme W4A16 \
        --dataset Elliott/Openr1-Math-46k-8192 --columns prompt --output runs/smoothed

SmoothQuant, AWQ's scaling, or SpinQuant's rotations R1 and R2, by llm-compressor. The plain model is saved only if its
log-probs are those of the model that came in. What the scheme costs before and after is printed: without outlier
channels often no less. Then train with `model_name_or_path: runs/smoothed`.
"""

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.transform import SmoothQuantModifier, SpinQuantModifier
from ptq import calibration_set, make_parser, make_recipe, parse
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from qarl_trl.export import check_target
from qarl_trl.quant import apply_quantization, low_bit_store, remove_quantization


# Largest change of a log-prob in float32, nats. Measured on toys: at most 3.2e-5 for transforms that are folded
# exactly, 0.1 and more for one that is not.
TOLERANCE = 1e-3
# Texts that log-probs are compared on.
PROBES = 16

# SpinQuant centers the embeddings, which only a layer norm takes off again: with an RMS norm it makes another model.
# Without centering the rotations are exact for both.
SpinQuantModifier._center_embeddings = lambda *_: None


def transforms(method: str, scheme: str, group_size: int | None = None) -> list:
    """llm-compressor's modifiers; AWQ searches its scales for `scheme`."""
    if method == "awq":
        return make_recipe("awq", scheme, group_size)
    if method == "rotation":
        return [SpinQuantModifier(rotations=["R1", "R2"], transform_type="random-hadamard")]
    return [SmoothQuantModifier(smoothing_strength=0.5)]


@torch.no_grad()
def log_probs(model: PreTrainedModel, texts: list[list[int]]) -> torch.Tensor:
    """Log-prob of each token after the first of all texts, in one row, float32."""
    rows = []
    for text in texts:
        ids = torch.tensor([text], device=model.device)
        # The last position predicts a token that the text does not have.
        logits = model(input_ids=ids).logits[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        rows.append(chosen.flatten())

    return torch.cat(rows)


def quantization_cost(
    model: PreTrainedModel, scheme: str, texts: list[list[int]], group_size: int | None = None
) -> float:
    """Mean absolute difference of log-probs, nats per token, between the quantized model and the model."""
    plain = log_probs(model, texts)

    apply_quantization(model, scheme, group_size=group_size)
    # Nothing is trained, so weights are quantized once, not in each forward.
    low_bit_store(model).will_be_told()
    quantized = log_probs(model, texts)
    remove_quantization(model)

    return (quantized - plain).abs().mean().item()


def fold(model: PreTrainedModel, recipe: list, **data: object) -> PreTrainedModel:
    """A plain model with the weights that `recipe` leaves; without what it hung on the model, and unquantized."""
    # The output layer is always kept: rotations untie it from the embeddings.
    names = set(model.state_dict()) | {"lm_head.weight"}
    transformed = oneshot(model=model, recipe=recipe, **data)

    state = {}
    left = []
    for name, tensor in transformed.state_dict().items():
        if name in names:
            state[name] = tensor.float()
        # AWQ's recipe quantizes, too: its weight_scale of each layer is no part of a plain model.
        elif "weight_" not in name:
            left.append(name)
    if left:
        raise SystemExit(f"The transform must fold into the weights, got {left[:3]}, which run in the forward.")

    # With it, the new model would be made as a quantized one.
    config = transformed.config
    config.__dict__.pop("quantization_config", None)

    folded = type(model).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return folded.eval()


def main(argv: list[str] | None = None) -> None:
    """Read the options, fold, compare the log-probs, and save."""
    args = parse(make_parser(__doc__, ("smoothquant", "awq", "rotation")), argv)
    check_target(args.output)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = calibration_set(args, tokenizer)
    texts = rows["input_ids"][:PROBES]

    # Rotations need no texts: there they serve only the comparison.
    data = {}
    if args.method != "rotation":
        data = {"dataset": rows, "num_calibration_samples": len(rows), "max_seq_length": args.max_length}

    # In float32, where a transform that keeps the function moves no log-prob by more than rounding.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    before = log_probs(model, texts)
    cost = quantization_cost(model, args.scheme, texts, args.group_size)

    recipe = transforms(args.method, args.scheme, args.group_size)
    model = fold(model, recipe, **data)

    # Not `change > TOLERANCE`, which lets a NaN pass.
    change = (log_probs(model, texts) - before).abs().max().item()
    if not change <= TOLERANCE:
        raise SystemExit(f"No log-prob may move by more than {TOLERANCE} nats, got {change:.1e}. Nothing was saved.")

    after = quantization_cost(model, args.scheme, texts, args.group_size)
    print(f"{args.scheme} costs {cost:.5f} nats per token before, {after:.5f} after")

    dtype = AutoConfig.from_pretrained(args.model).dtype or torch.bfloat16
    model.to(dtype).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"transformed model, not quantized, written to {args.output}")


if __name__ == "__main__":
    main()
