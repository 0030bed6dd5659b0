"""Compares results of the device with references: what the programs of operators share."""

import json

import torch


def flat(values):
    """Return the tensors of nested sequences in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in flat(value)] if isinstance(values, (list, tuple)) else []


class Comparison:
    """Collects what differs and what is refused, to be printed as one JSON object."""

    def __init__(self):
        self.wrong, self.refused, self.checked = {}, {}, 0

    def same(self, name, found, expected, tolerance=1e-5):
        """Compare tensors, in order, with their shapes; absolute and relative to the largest value."""
        self.checked += 1
        found, expected = flat(found), flat(expected)
        if len(found) != len(expected):
            self.wrong[name] = f"{len(found)} tensors instead of {len(expected)}"
            return
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            a, b = a.detach().cpu(), b.detach().cpu()
            if a.shape != b.shape:
                self.wrong[name] = f"{i}: shape {list(a.shape)} instead of {list(b.shape)}"
                return
            if a.numel() == 0:
                continue
            a, b = a.double(), b.double()
            equal = (a == b) | (a.isnan() & b.isnan())
            error = (a - b).abs().masked_fill(equal, 0).max().item()
            limit = tolerance * max(1.0, b.masked_fill(~b.isfinite(), 0).abs().max().item())
            if not error <= limit:
                self.wrong[name] = f"{i}: off by {error}"
                return

    def gradients(self, name, ours, reference, inputs, tolerance=1e-5):
        """Compare a function of the device in float32 with a reference in float64, forward and backward."""
        here = [x.detach().double().requires_grad_() for x in inputs]
        there = [x.detach().float().npu().requires_grad_() for x in inputs]
        try:
            found, expected = flat(ours(*there)), flat(reference(*here))
            weights = [torch.randn_like(x) for x in expected]
            expected_grads = torch.autograd.grad(expected, here, weights)
            found_grads = torch.autograd.grad(found, there, [w.float().npu() for w in weights])
        except Exception as error:
            self.wrong[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            self.checked += 1
            return
        self.same(name, [found, found_grads], [expected, expected_grads], tolerance)

    def refuse(self, name, call):
        """Keep the first line of the error that a call must raise."""
        try:
            call()
            self.refused[name] = "accepted"
        except Exception as error:
            self.refused[name] = f"{type(error).__name__} {str(error).splitlines()[0][:200]}"

    def report(self):
        """Print all of it."""
        print(json.dumps({"checked": self.checked, "wrong": self.wrong, "refused": self.refused}))
