"""Log-probs of one fixed prompt: by the engine, by the learner, and by learners with a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..quant.linear import LowBitLayer


LENGTH = 128
SEED = 20260408
# bfloat16 keeps 8 significant bits: two kernels that round one sum differently are this far apart, relatively.
ROUNDING = 2.0**-8


@dataclass(frozen=True)
class Scores:
    """Log-probs `(T - 1,)`, float32, of the prompt by the learner's low-bit model."""

    plain: Tensor  # as it is
    noisy: Tensor  # with [`rounding_noise`]; its mean distance from `plain` is the noise floor
    wrong: dict[str, Tensor] = field(default_factory=dict)  # with a fault of an engine, by what the fault leaves out


def sync_check_tokens(tokenizer: Any, vocab_size: int, length: int = LENGTH) -> list[int]:
    """A fixed prompt: tokens drawn by a fixed seed, without special and added ones, since an engine may act on them."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(min(vocab_size, len(tokenizer))) if token not in special]
    generator = torch.Generator().manual_seed(SEED)
    return [ordinary[i] for i in torch.randint(len(ordinary), (length,), generator=generator).tolist()]


def engine_logps(llm: Any, token_ids: Sequence[int]) -> Tensor:
    """Log-probs `(T - 1,)`, float32, of a prompt's tokens after the first, by the engine at temperature 1."""
    if hasattr(llm, "prompt_logps"):  # a server
        return llm.prompt_logps(token_ids)
    from vllm import SamplingParams

    # A prompt whose log-probs are asked for is computed anew, never read from the prefix cache.
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)
    steps = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([step[token].logprob for step, token in steps])


@torch.no_grad()
def learner_logps(model: nn.Module, token_ids: Sequence[int], with_wrong: bool = False) -> Scores:
    """
    Score the prompt by the learner's low-bit model, also where training does not use it. Call inside the learner's autocast.

    With `with_wrong` also without quantization, and without each attention, MLP and decoder block and without all blocks: what an
    engine computes whose layers there hold tiny random weights.
    """
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    training, wrong = model.training, {}
    model.eval()
    try:
        with low_bit_forward(model):
            plain = _forward(model, ids)[0]
            with rounding_noise(model):
                noisy = _forward(model, ids)[0]
            if with_wrong:
                wrong = _without_branches(model, ids)
        if with_wrong:
            with low_bit_forward(model, False):
                wrong["without quantization"] = _forward(model, ids)[0]
    finally:
        model.train(training)
    return Scores(plain, noisy, wrong)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs `(B, T - 1)` of `ids`, `(B, T)`."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def _without_branches(model: nn.Module, ids: Tensor, rows: int = 8) -> dict[str, Tensor]:
    """Log-probs `(T - 1,)` with the output of one branch of a decoder block silenced, or of all; `rows` at a time."""
    depth = model.config.get_text_config().num_hidden_layers
    blocks = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth), ())
    names = {module: name for name, module in model.named_modules()}
    silent: dict[str, list[nn.Module]] = {}
    for block in blocks:
        # Attention and MLP have parts, norms have none.
        branches = [child for child in block.children() if next(child.children(), None) is not None]
        silent |= {f"without {names[branch]}": [branch] for branch in branches}
        silent[f"without {names[block]}"] = branches
    silent["without its decoder blocks"] = [branch for branches in silent.values() for branch in branches]
    found: dict[str, Tensor] = {}
    for start in range(0, len(silent), rows):
        batch = list(silent)[start : start + rows]
        hooks = [(branch, _silence(row)) for row, name in enumerate(batch) for branch in silent[name]]
        with _forward_hooks(hooks):
            found |= dict(zip(batch, _forward(model, ids.expand(len(batch), -1)), strict=True))
    return found


def _silence(row: int) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        stream, *rest = output if isinstance(output, tuple) else (output,)
        stream = stream.clone()
        stream[row] = 0
        return (stream, *rest) if isinstance(output, tuple) else stream

    return hook


@contextmanager
def low_bit_forward(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Run quantized layers in low bits, or not, whatever training does (`quantize_learner`)."""
    changed = [m for m in model.modules() if isinstance(m, LowBitLayer) and m.quantized_forward != on]
    for module in changed:
        module.quantized_forward = on
    try:
        yield
    finally:
        for module in changed:
            module.quantized_forward = not on


def rounding_noise(model: nn.Module) -> Any:
    """Scale each output of each linear layer by `1 + u`, `u` uniform in one bfloat16 rounding; the same on every call."""
    generator = torch.Generator().manual_seed(SEED)

    def disturb(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        u = torch.rand(output.shape, generator=generator) * (2 * ROUNDING) - ROUNDING
        return (output.float() * (1 + u).to(output.device)).to(output.dtype)

    return _forward_hooks((m, disturb) for m in model.modules() if isinstance(m, (nn.Linear, LowBitLayer)))


@contextmanager
def _forward_hooks(hooks: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
