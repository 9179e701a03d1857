"""A GPT of one device, written plainly, from a state dict of whole weights."""

from blockshock_lib.studies.gpt.truth import attention, hidden, norm


def plain(state, tokens, schedule, heads, _):
    """The logits of a GPT of one device, which knows of no ranks and no steps."""
    x = state["tokens.weight"][tokens] + state["positions.weight"][: tokens.shape[1]]
    for name in (f"blocks.{layer}" for layer in range(schedule.layers)):
        y = attention(norm(x, state, f"{name}.attention.norm"), state, f"{name}.attention", heads)
        x = x + y @ state[f"{name}.attention.out.weight"].T + state[f"{name}.attention.out.bias"]
        y = hidden(norm(x, state, f"{name}.mlp.norm"), state, f"{name}.mlp")
        x = x + y @ state[f"{name}.mlp.out.weight"].T + state[f"{name}.mlp.out.bias"]
    return norm(x, state, "norm") @ state["tokens.weight"].T
