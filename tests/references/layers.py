"""Gradients of layers, log-probs of a model, and a step of Muon."""

import torch


def straight_through(x, low_bit_weight, grad):
    """
    Gradients of `sum(grad * (x @ Q^T))` by `x` and, as if Q were the master, by the master; in float64.

    Args: x `(tokens, in)`, low_bit_weight Q `(out, in)`, grad `(tokens, out)`.
    """
    x = x.double()
    low_bit_weight = low_bit_weight.double()
    grad = grad.double()

    grad_x = torch.zeros_like(x)
    grad_master = torch.zeros_like(low_bit_weight)
    # Sums of outer products, written out.
    for token in range(len(x)):
        for out in range(len(low_bit_weight)):
            grad_x[token] += grad[token, out] * low_bit_weight[out]
            grad_master[out] += grad[token, out] * x[token]
    return grad_x, grad_master


def experts(x, gate, up, down, chosen, routing, grad, quantize_input=lambda row: row):
    """
    Output and straight-through gradients of a layer of experts, one token and one choice at a time, in float64.

    `y[t] = sum_k routing[t, k] * down[e] @ (silu(gate[e] @ q(x[t])) * (up[e] @ q(x[t])))` with `e = chosen[t, k]`; the
    gradients are those of `sum(grad * y)`, with every low-bit matrix differentiated as if it were its master.

    Args: x `(tokens, hidden)`; low-bit gate and up `(experts, intermediate, hidden)`, down `(experts, hidden,
    intermediate)`; chosen and routing `(tokens, top_k)`; grad like x; quantize_input: what the layer does to an input
    row. Returns: y and the gradients by x, gate, up, down and routing.
    """
    x, gate, up, down, routing, grad = map(torch.Tensor.double, (x, gate, up, down, routing, grad))

    y = torch.zeros_like(x)
    grad_x = torch.zeros_like(x)
    grad_gate = torch.zeros_like(gate)
    grad_up = torch.zeros_like(up)
    grad_down = torch.zeros_like(down)
    grad_routing = torch.zeros_like(routing)

    for t in range(len(x)):
        for k in range(chosen.shape[1]):
            e = int(chosen[t, k])

            # Forward.
            row = quantize_input(x[t])
            g = gate[e] @ row
            u = up[e] @ row
            sigmoid = 1 / (1 + torch.exp(-g))
            hidden = quantize_input(g * sigmoid * u)
            out = down[e] @ hidden
            y[t] += routing[t, k] * out

            # Backward, from the output to the input.
            grad_routing[t, k] = grad[t] @ out
            grad_out = routing[t, k] * grad[t]
            grad_down[e] += torch.outer(grad_out, hidden)
            grad_hidden = down[e].t() @ grad_out
            grad_g = grad_hidden * u * sigmoid * (1 + g * (1 - sigmoid))
            grad_u = grad_hidden * g * sigmoid
            grad_gate[e] += torch.outer(grad_g, row)
            grad_up[e] += torch.outer(grad_u, row)
            grad_x[t] += gate[e].t() @ grad_g + up[e].t() @ grad_u

    return y, grad_x, grad_gate, grad_up, grad_down, grad_routing


@torch.no_grad()
def logps_of_each_alone(model, input_ids, attention_mask, logits_to_keep):
    """Log-probs `(B, logits_to_keep)`: each sequence through the model by itself, zero where padded."""
    rows, length = input_ids.shape
    # The columns of prompts are not scored.
    first_kept = length - logits_to_keep

    logps = torch.zeros(rows, logits_to_keep)
    for row in range(rows):
        columns = attention_mask[row].nonzero().flatten().tolist()
        tokens = input_ids[row, columns]
        # Without a mask and without positions: by itself a sequence needs neither.
        logits = model(input_ids=tokens[None]).logits[0].float()

        # The first token has no prediction.
        for i in range(1, len(columns)):
            if columns[i] >= first_kept:
                logps[row, columns[i] - first_kept] = logits[i - 1].log_softmax(-1)[tokens[i]]
    return logps


def muon(weight, grads, *, lr, momentum, weight_decay, adjust_lr_fn, nesterov=True, ns_steps=5):
    """Muon as its author writes it, one matrix, float64: momentum, Newton-Schulz, decoupled decay, scaled step."""
    weight = weight.double()
    average = torch.zeros_like(weight)
    rows, cols = weight.shape

    scale = max(1, rows / cols) ** 0.5
    if adjust_lr_fn == "match_rms_adamw":
        scale = 0.2 * max(rows, cols) ** 0.5

    for grad in grads:
        average = momentum * average + (1 - momentum) * grad.double()
        direction = average
        if nesterov:
            direction = momentum * average + (1 - momentum) * grad.double()

        # Newton-Schulz: by these coefficients singular values come near 1 fast, and not exactly there.
        x = direction / direction.norm()
        for _ in range(ns_steps):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x

        weight = weight * (1 - lr * weight_decay) - lr * scale * x
    return weight
