"""Compares recurrent layers, packed sequences and torch_npu's own recurrent operators with torch on the CPU."""

import copy
import itertools
import warnings

import torch
import torch_npu
from comparison import Comparison
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

warnings.filterwarnings("ignore")
torch.manual_seed(0)
compare = Comparison()


def run_layer(layer, x, packed, batch_first):
    x = x.detach().requires_grad_()
    if packed:
        out, hidden = layer(pack_padded_sequence(x, [5, 3], batch_first=batch_first))
        out = pad_packed_sequence(out, batch_first=batch_first)[0]
    else:
        out, hidden = layer(x)
    hidden = hidden if isinstance(hidden, tuple) else (hidden,)
    (out.pow(2).sum() + sum(part.sin().sum() for part in hidden)).backward()
    return [out, list(hidden), x.grad, [parameter.grad for parameter in layer.parameters()]]


flags = list(itertools.product((False, True), (1, 2), (True, False), (False, True), (False, True)))
for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
    for both, layers, bias, batch_first, packed in flags:
        here = kind(4, 3, num_layers=layers, bidirectional=both, bias=bias, batch_first=batch_first)
        there = copy.deepcopy(here).npu()
        x = torch.randn(2, 5, 4) if batch_first else torch.randn(5, 2, 4)
        name = f"{kind.__name__} {both} {layers} {bias} {batch_first} {packed}"
        compare.same(name, run_layer(there, x.npu(), packed, batch_first), run_layer(here, x, packed, batch_first))

for kind in (torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell):
    here = kind(4, 3)
    there = copy.deepcopy(here).npu()
    results = []
    for cell, x in ((there, torch.ones(5, 4).npu()), (here, torch.ones(5, 4))):
        x = (x * 0.3).requires_grad_()
        out = cell(x)
        out = torch.cat(out) if isinstance(out, tuple) else out
        out.sin().sum().backward()
        results.append([out, x.grad, [parameter.grad for parameter in cell.parameters()]])
    compare.same(kind.__name__, *results)

# With proj_size, and outside of autograd; dropout keeps a part of the values between the layers.
here = torch.nn.LSTM(4, 6, 2, proj_size=3)
there = copy.deepcopy(here).npu()
x = torch.randn(5, 2, 4)
compare.same("projection", there(x.npu())[0], here(x)[0])
with torch.inference_mode():
    compare.same("inference", there(x.npu())[0], here(x)[0])
dropped = torch.nn.LSTM(4, 64, 2, dropout=0.5).npu()
first = dropped(x.npu())[0]
compare.same("dropout differs from call to call", (first == dropped(x.npu())[0]).all(), torch.tensor(False))
compare.same("half", there.half()(x.half().npu())[0], here(x)[0], tolerance=5e-3)
sizes = pack_padded_sequence(x.npu(), [5, 3]).batch_sizes
compare.same("the sizes of batches stay on the host", torch.tensor(sizes.device.type == "cpu"), torch.tensor(True))

# torch_npu's single layers, transposed weights: the gates in torch's order.
T, B, W, H = 5, 3, 4, 6  # steps, batch, width of the input, hidden size


def lstm(x, weight, bias, h, c):
    found = torch.lstm(
        x, (h, c), (weight[:W].t(), weight[W:].t(), bias, torch.zeros_like(bias)), True, 1, 0.0, True, False, False
    )
    return [found[0], found[1], found[2]]


def npu_lstm(x, weight, bias, h, c):
    empty = torch.empty(0, device="npu")
    found = torch_npu.npu_lstm(x, weight, bias, empty, h, c, True, 1, 0.0, True, False, False, False, False)
    return [found[0], found[1][-1:], found[2][-1:]]


state = (torch.randn(1, B, H), torch.randn(1, B, H))
compare.gradients(
    "npu_lstm", npu_lstm, lstm, [torch.randn(T, B, W), torch.randn(W + H, 4 * H), torch.randn(4 * H), *state]
)


def reversed_lstm(x, weight, bias, h, c):
    out, last, cell = lstm(x.flip(0), weight, bias, h, c)
    return [out.flip(0), last, cell]


def npu_lstm_reversed(x, weight, bias, h, c):
    empty, sizes = torch.empty(0, device="npu"), torch.tensor([B] * T)
    found = torch_npu.npu_lstm_data(
        x, sizes.npu(), weight, bias, empty, h, c, True, 1, 0.0, True, False, False, False, True
    )
    return [found[0], found[1][:1], found[2][:1]]


x, weight, bias = torch.randn(T, B, W), torch.randn(W + H, 4 * H), torch.randn(4 * H)
compare.same(
    "npu_lstm_data",
    npu_lstm_reversed(*(part.npu() for part in (x, weight, bias, *state))),
    reversed_lstm(x, weight, bias, *state),
)


def cell(x, w_ih, w_hh, h, c, b_ih, b_hh):
    return list(torch.lstm_cell(x, (h, c), w_ih.t(), w_hh.t(), b_ih, b_hh))


def npu_cell(x, w_ih, w_hh, h, c, b_ih, b_hh):
    found = torch_npu.npu_lstm_cell(x, w_ih, w_hh, h, c, b_ih, b_hh)
    return [found[1], found[2]]


parts = [(B, W), (W, 4 * H), (H, 4 * H), (B, H), (B, H), (4 * H,), (4 * H,)]
compare.gradients("npu_lstm_cell", npu_cell, cell, [torch.randn(part) for part in parts])


def gru(x, h, w_ih, w_hh, b_ih, b_hh):
    return list(torch.gru(x, h, (w_ih.t(), w_hh.t(), b_ih, b_hh), True, 1, 0.0, True, False, False))


def npu_gru(x, h, w_ih, w_hh, b_ih, b_hh):
    length = torch.tensor([T], dtype=torch.int32).npu()
    found = torch_npu.npu_gru(x, h, w_ih, w_hh, b_ih, b_hh, length, True, 1, 0.0, True, False, False)
    return [found[0], found[1][-1:]]


parts = [(T, B, W), (1, B, H), (W, 3 * H), (H, 3 * H), (3 * H,), (3 * H,)]
compare.gradients("npu_gru", npu_gru, gru, [torch.randn(part) for part in parts])

arguments = [part.npu() for part in (x, weight, bias)]
empty, hidden = torch.empty(0, device="npu"), [part.npu() for part in state]
rest = (True, 1, 0.0, True, False, False)
compare.refuse("flag_seq", lambda: torch_npu.npu_lstm(*arguments, empty, *hidden, *rest, True, False))
compare.refuse(
    "layers", lambda: torch_npu.npu_lstm(*arguments, empty, *hidden, True, 2, 0.0, True, False, False, False, False)
)
compare.refuse(
    "shape", lambda: torch_npu.npu_lstm(arguments[0][:, :, 1:], *arguments[1:], empty, *hidden, *rest, False, False)
)
compare.refuse("bf16", lambda: torch.nn.LSTM(4, 3).bfloat16().npu()(torch.ones(2, 1, 4).bfloat16().npu()))
compare.report()
