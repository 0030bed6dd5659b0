"""Slow references in float64, and how the programs about inference print: "name True", or what differs."""

import math

import torch


def check(name, ours, expected, tolerance):
    """Compare the values of a simulated tensor with those of a reference."""
    here = ours.detach().cpu().double()
    expected = expected.double()
    if here.shape != expected.shape:
        print(name, "shape", tuple(here.shape), "expected", tuple(expected.shape))
        return
    same = (here == expected) | ((here - expected).abs() <= tolerance * (1 + expected.abs()))
    print(name, bool(same.all()), "" if same.all() else (here - expected).abs().max().item())


def refused(name, call):
    """Print the first line of the error that a call raises."""
    try:
        call()
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        print(name, type(error).__name__, str(error).splitlines()[0])
    else:
        print(name, "accepted")


def attend(q, k, v, scale, hidden=None, added=None, sink=None):
    """Return the output [N, S, V] and log-sum-exp [N, S, 1] of one sequence: q [N, S, D], k [M, K, D], v [M, K, V]."""
    q, k, v = q.double(), k.double(), v.double()
    outs, sums = [], []
    for head in range(q.shape[0]):
        group = head // (q.shape[0] // k.shape[0])
        scores = q[head] @ k[group].T * scale
        if added is not None:
            scores = scores + added[head].double()
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[head].double().expand(scores.shape[0], 1)], -1)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        weights = torch.nan_to_num((scores - lse).exp(), 0.0)
        outs.append(weights[:, : k.shape[1]] @ v[group])
        sums.append(torch.where(lse.isinf(), math.inf, lse))
    return torch.stack(outs), torch.stack(sums)


def causal(rows, columns, shift):
    """True where a key comes after query + shift."""
    return torch.arange(columns)[None] > torch.arange(rows)[:, None] + shift


def paginate(rows, lengths, block, pages, order):
    """Spread the rows of each sequence over pages: return pages [n, block, ...] and the table of each sequence."""
    cache = torch.randn(pages, block, *rows[0].shape[1:], dtype=torch.float64).to(rows[0].dtype)
    width = max(-(-length // block) for length in lengths)
    table = torch.full((len(rows), width), -1, dtype=torch.int32)
    free = iter(order)
    for i, (own, length) in enumerate(zip(rows, lengths, strict=True)):
        for start in range(0, length, block):
            page = next(free)
            table[i, start // block] = page
            part = own[start : min(start + block, length)]
            cache[page, : len(part)] = part
    return cache, table


def to_fractal(pages, width=16):
    """[n, block, N, D] as [n, N, D / 16, block, 16]."""
    n, block, heads, size = pages.shape
    return pages.view(n, block, heads, size // width, width).permute(0, 2, 3, 1, 4).contiguous()
