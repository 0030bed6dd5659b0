"""How much memory do the head and its cross-entropy take, beside logits for the whole batch?

    python benchmarks/loss.py [--vocab N] [--hidden N] [--tokens N] [--threads N]

Forward and backward pass of the output matrix and the summed cross-entropy in fp32, each way in its own process.
`naive` is what transformers' models do: logits of all tokens, widened, then `cross_entropy`. Memory: peak of the
process (VmHWM), and what of it came after weight, hidden states and labels were there. `head trained` makes the
gradient of the weight too, which is as large as the weight on both sides; under an adapter the head is frozen.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection

from option_types import positive_int
from paired import peak_memory

NAIVE, CHUNKED = "naive", "anabatic"


def measure(line: Connection, way: str, trained: bool, vocab: int, hidden: int, tokens: int, threads: int) -> None:
    """Send (bytes before, peak, CPU seconds, loss, norm of the hidden states' gradient)."""
    import torch
    import torch.nn.functional as F

    from anabatic.device.ops import linear_cross_entropy
    from anabatic.device.table import DEVICES
    from anabatic.models.forward import compute_chunk_bytes

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight = torch.empty(vocab, hidden).normal_(0.0, 0.02).requires_grad_(trained)
    states = torch.randn(tokens, hidden).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    before, start = peak_memory(), time.process_time()
    if way == NAIVE:
        loss = F.cross_entropy(F.linear(states, weight).float(), labels, reduction="sum")
    else:
        loss = linear_cross_entropy(states, weight, labels, compute_chunk_bytes(weight, DEVICES["cpu"].chunk_bytes))
    loss.backward()
    taken = time.process_time() - start
    assert states.grad is not None and trained == (weight.grad is not None)
    line.send((before, peak_memory(), taken, loss.item(), states.grad.norm().item()))


def alone(*arguments: object) -> tuple[float, ...]:
    """Measure in a new process."""
    context = multiprocessing.get_context("spawn")
    line, other = context.Pipe()
    process = context.Process(target=measure, args=(other, *arguments))
    process.start()
    other.close()
    try:
        found: tuple[float, ...] = line.recv()
    except EOFError:
        raise SystemExit(f"a side ended with exit code {process.exitcode}") from None
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=positive_int, default=151_936)
    parser.add_argument("--hidden", type=positive_int, default=896)
    parser.add_argument("--tokens", type=positive_int, default=2048)
    parser.add_argument("--threads", type=positive_int, default=1)
    options = parser.parse_args()
    shape = (options.vocab, options.hidden, options.tokens, options.threads)
    print(
        f"vocabulary {options.vocab:,}, width {options.hidden}, {options.tokens:,} targets, {options.threads} threads"
    )
    for trained in (False, True):
        sides = {way: alone(way, trained, *shape) for way in (NAIVE, CHUNKED)}
        print(f"head {'trained' if trained else 'frozen'}")
        print(f"  {'':10} {'peak MiB':>9} {'ratio':>6} {'of the loss':>12} {'ratio':>6} {'CPU s':>7} {'loss':>14}")
        _, least, *_ = sides[NAIVE]
        for way, (before, peak, taken, loss, norm) in sides.items():
            own, peers = peak - before, sides[NAIVE][1] - sides[NAIVE][0]
            print(
                f"  {way:10} {peak / 2**20:9,.0f} {peak / least:6.2f} {own / 2**20:12,.0f} {own / peers:6.2f} "
                f"{taken:7.1f} {loss:14.3f}, gradient {norm:.4f}"
            )


if __name__ == "__main__":
    main()
