// Recurrent networks: the fused cells of torch.nn.LSTM and GRU, and the single layers that torch_npu has of its own. The order of
// the gates is torch's: input, forget, cell, output; reset, update, new (op-plugin's pages on npu_lstm, npu_gru and _lstm_npu;
// tests of torch_npu, test/custom_ops). The arithmetic is float32, results have the inputs' dtype.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "../sim.h"
#include "alias.h"
#include "count.h"
#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

Tensor plus(const Tensor& x, const Tensor& bias) { return bias.defined() ? x + bias : x; }

// torch.nn.LSTM and LSTMCell: gates of the input and of the hidden state, [B, 4 H].
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto dtype = input_gates.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf, "lstm_cell input_gates must be float or half, got ", dtype);
  TORCH_CHECK(hidden_gates.scalar_type() == dtype && cx.scalar_type() == dtype,
              "lstm_cell input_gates, hidden_gates and c must have the same dtype");
  const Tensor sum = plus(widened(input_gates) + widened(hidden_gates), widened(value_of(input_bias)));
  const auto parts = plus(sum, widened(value_of(hidden_bias))).chunk(4, 1);
  const Tensor i = at::sigmoid(parts[0]), f = at::sigmoid(parts[1]), g = at::tanh(parts[2]), o = at::sigmoid(parts[3]);
  const Tensor cy = f * widened(cx) + i * g;
  return {(o * at::tanh(cy)).to(dtype), cy.to(dtype), at::cat({i, f, g, o}, 1).to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  TORCH_CHECK(cx.dim() == 2 && cy.dim() == 2 && workspace.dim() == 2, "cx, cy and workspace must be a 2D Tensor");
  TORCH_CHECK(cx.sizes() == cy.sizes(), "cx and cy must be the same size");
  if (!value_of(grad_hy).defined() && !value_of(grad_cy).defined())
    return {Tensor(), Tensor(), Tensor()};
  const auto parts = widened(workspace).chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const Tensor bent = at::tanh(widened(cy));
  Tensor hidden = widened(value_of(grad_hy)), cell = widened(value_of(grad_cy));
  if (!hidden.defined())
    hidden = at::zeros_like(bent);
  if (!cell.defined())
    cell = at::zeros_like(bent);
  const Tensor total = cell + hidden * o * (1 - bent * bent);
  const Tensor gates = at::cat(
      {total * g * i * (1 - i), total * widened(cx) * f * (1 - f), total * i * (1 - g * g), hidden * bent * o * (1 - o)}, 1);
  const auto dtype = workspace.scalar_type();
  return {gates.to(dtype), (total * f).to(cx.scalar_type()), has_bias ? gates.sum(0).to(dtype) : Tensor()};
}

// torch.nn.GRU and GRUCell: the workspace is that of torch's _thnn_differentiable_gru_cell_backward, five parts of [B, H]
// (aten/src/ATen/native/cuda/RNN.cu): reset, update, new, the hidden state, the hidden part of new.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto in = plus(widened(input_gates), widened(value_of(input_bias))).chunk(3, 1);
  const auto hidden = plus(widened(hidden_gates), widened(value_of(hidden_bias))).chunk(3, 1);
  const Tensor before = widened(hx);
  const Tensor r = at::sigmoid(in[0] + hidden[0]), z = at::sigmoid(in[1] + hidden[1]), n = at::tanh(in[2] + r * hidden[2]);
  const auto dtype = input_gates.scalar_type();
  return {(n + z * (before - n)).to(dtype), at::cat({r, z, n, before, hidden[2]}, 1).to(dtype)};
}

// The gradients for both kinds of gates, the state and both biases. A real torch_npu has this one only inside of nn.GRU.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& above, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = widened(workspace).chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &before = parts[3], &hidden = parts[4];
  const Tensor grad = widened(above), grad_n = grad * (1 - z) * (1 - n * n);
  const Tensor grad_z = grad * (before - n) * z * (1 - z), grad_r = grad_n * hidden * r * (1 - r);
  const auto dtype = workspace.scalar_type();
  const Tensor input_gates = at::cat({grad_r, grad_z, grad_n}, 1), hidden_gates = at::cat({grad_r, grad_z, grad_n * r}, 1);
  return {input_gates.to(dtype), hidden_gates.to(dtype), (grad * z).to(dtype),
          has_bias ? input_gates.sum(0).to(dtype) : Tensor(), has_bias ? hidden_gates.sum(0).to(dtype) : Tensor()};
}

// One layer in one direction. x [T, B, I], weights [I, G H] and [H, G H], state [1, B, H].
struct Layer {
  Tensor x, input_weight, hidden_weight, input_bias, hidden_bias, h, c;
};

// y and what the backward pass of the hardware reads, each [T, B, H]: h, c, i, j, f, o, tanh(c).
Tensors run_lstm(const Layer& layer) {
  const int64_t steps = layer.x.size(0);
  Tensor h = layer.h.reshape({layer.x.size(1), -1}), c = layer.c.reshape({layer.x.size(1), -1});
  std::vector<Tensors> traces(7);
  for (int64_t t = 0; t < steps; t++) {
    Tensor gates = at::matmul(layer.x[t], layer.input_weight) + at::matmul(h, layer.hidden_weight);
    const auto parts = plus(plus(gates, layer.input_bias), layer.hidden_bias).chunk(4, 1);
    const Tensor i = at::sigmoid(parts[0]), f = at::sigmoid(parts[1]), g = at::tanh(parts[2]), o = at::sigmoid(parts[3]);
    c = f * c + i * g;
    const Tensor bent = at::tanh(c);
    h = o * bent;
    const Tensor step[] = {h, c, i, g, f, o, bent};
    for (size_t k = 0; k < traces.size(); k++) traces[k].push_back(step[k]);
  }
  Tensors found{at::stack(traces[0])};
  for (const Tensors& trace : traces) found.push_back(at::stack(trace));
  return found;
}

// y, h, update, reset, new and the hidden part of new, each [T, B, H].
Tensors run_gru(const Layer& layer) {
  Tensor h = layer.h.reshape({layer.x.size(1), -1});
  std::vector<Tensors> traces(5);
  for (int64_t t = 0; t < layer.x.size(0); t++) {
    const auto in = plus(at::matmul(layer.x[t], layer.input_weight), layer.input_bias).chunk(3, 1);
    const auto hidden = plus(at::matmul(h, layer.hidden_weight), layer.hidden_bias).chunk(3, 1);
    const Tensor r = at::sigmoid(in[0] + hidden[0]), z = at::sigmoid(in[1] + hidden[1]), n = at::tanh(in[2] + r * hidden[2]);
    h = n + z * (h - n);
    const Tensor step[] = {h, z, r, n, hidden[2]};
    for (size_t k = 0; k < traces.size(); k++) traces[k].push_back(step[k]);
  }
  Tensors found{at::stack(traces[0])};
  for (const Tensors& trace : traces) found.push_back(at::stack(trace));
  return found;
}

void to_dtype(Tensors& tensors, at::ScalarType dtype) {
  for (Tensor& tensor : tensors) tensor = tensor.to(dtype);
}

// Only the last step of the gradients for h and c counts (op-plugin, LstmKernelNpu.cpp and GruKernelNpu.cpp).
Tensor last_step_only(const Tensor& above) {
  if (!above.defined())
    return above;
  Tensor last = at::zeros_like(above);
  last[-1].copy_(above[-1]);
  return last;
}

void single_layer(const char* name, int64_t layers, double dropout, bool bidirectional, bool batch_first) {
  TORCH_CHECK(layers == 1, name, ": num_layers must be 1, got ", layers);
  TORCH_CHECK(dropout == 0, name, ": dropout is not supported, got ", dropout);
  TORCH_CHECK(!bidirectional, name, ": bidirectional is not supported");
  TORCH_CHECK(!batch_first, name, ": batch_first is not supported");
}

using LstmResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

LstmResult lstm_result(Tensors found, at::ScalarType dtype) {
  to_dtype(found, dtype);
  return {found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7]};
}

// weight holds that of the input over that of the hidden state: [I + H, 4 H].
Layer stacked_layer(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& h, const Tensor& c) {
  const int64_t size = x.size(2);
  return {x, weight.slice(0, 0, size), weight.slice(0, size), bias, Tensor(), h, c};
}

void check_stacked(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& h) {
  TORCH_CHECK(x.dim() == 3 && weight.dim() == 2 && bias.dim() == 1 && bias.size(0) == weight.size(1) && bias.size(0) % 4 == 0 &&
                  weight.size(0) == x.size(2) + bias.size(0) / 4 && h.size(-1) == bias.size(0) / 4,
              "npu_lstm: x must be [T, B, I], weight [I + H, 4 H], bias [4 H] and h [1, B, H], got ", x.sizes(), ", ",
              weight.sizes(), ", ", bias.sizes(), " and ", h.sizes());
}

LstmResult npu_lstm(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor&, const Tensor& h, const Tensor& c,
                    bool, int64_t layers, double dropout, bool, bool bidirectional, bool batch_first, bool flag_seq,
                    bool direction) {
  single_layer("npu_lstm", layers, dropout, bidirectional, batch_first);
  TORCH_CHECK_NOT_IMPLEMENTED(!flag_seq, "anabatic sim: npu_lstm with flag_seq is not simulated");
  check_stacked(x, weight, bias, h);
  Layer layer = stacked_layer(widened(x), widened(weight), widened(bias), widened(h), widened(c));
  if (direction)
    layer.x = layer.x.flip(0);
  Tensors found = run_lstm(layer);
  if (direction)
    for (Tensor& trace : found) trace = trace.flip(0);
  return lstm_result(found, x.scalar_type());
}

LstmResult npu_lstm_data(const Tensor& x, const Tensor&, const Tensor& weight, const Tensor& bias, const Tensor& mask,
                         const Tensor& h, const Tensor& c, bool biases, int64_t layers, double dropout, bool train,
                         bool bidirectional, bool batch_first, bool flag_seq, bool direction) {
  TORCH_CHECK_NOT_IMPLEMENTED(!flag_seq, "anabatic sim: npu_lstm_data with flag_seq is not simulated");
  return npu_lstm(x, weight, bias, mask, h, c, biases, layers, dropout, train, bidirectional, batch_first, flag_seq, direction);
}

using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

FiveTensors lstm_gradients(const OptionalTensor& grad_y, const OptionalTensor& grad_h, const OptionalTensor& grad_c,
                           const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& h, const Tensor& c,
                           bool reversed) {
  const auto found = gradients_of(
      [&](const Tensors& in) {
        Layer layer = stacked_layer(in[0], in[1], in[2], in[3], in[4]);
        if (reversed)
          layer.x = layer.x.flip(0);
        Tensors traces = run_lstm(layer);
        if (reversed)
          for (Tensor& trace : traces) trace = trace.flip(0);
        return Tensors{traces[0], traces[1], traces[2]};
      },
      {x, weight, bias, h, c}, {value_of(grad_y), last_step_only(value_of(grad_h)), last_step_only(value_of(grad_c))});
  return {found[0], found[1], found[2], found[3], found[4]};
}

FiveTensors npu_lstm_backward(const OptionalTensor& grad_y, const OptionalTensor& grad_h, const OptionalTensor& grad_c,
                              const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& h, const Tensor& c,
                              const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, const Tensor&) {
  return lstm_gradients(grad_y, grad_h, grad_c, x, weight, bias, h, c, false);
}

FiveTensors npu_lstm_data_backward(const OptionalTensor& grad_y, const OptionalTensor& grad_h, const OptionalTensor& grad_c,
                                   const Tensor& x, const Tensor&, const Tensor& weight, const Tensor& bias, const Tensor& h,
                                   const Tensor& c, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor&, const Tensor&, const Tensor&, bool direction) {
  return lstm_gradients(grad_y, grad_h, grad_c, x, weight, bias, h, c, direction);
}

// One step: x [B, I], weights [I, 4 H] and [H, 4 H]. y and the traces are [1, B, H], h and c [B, H].
LstmResult npu_lstm_cell(const Tensor& x, const Tensor& input_weight, const Tensor& hidden_weight, const Tensor& h,
                         const Tensor& c, const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  TORCH_CHECK(x.dim() == 2 && input_weight.dim() == 2 && input_weight.size(0) == x.size(1) &&
                  hidden_weight.sizes() == at::IntArrayRef({h.size(1), 4 * h.size(1)}),
              "npu_lstm_cell: x must be [B, I], w_ih [I, 4 H] and w_hh [H, 4 H], got ", x.sizes(), ", ", input_weight.sizes(),
              " and ", hidden_weight.sizes());
  Tensors found = run_lstm({widened(x).unsqueeze(0), widened(input_weight), widened(hidden_weight),
                            widened(value_of(input_bias)), widened(value_of(hidden_bias)), widened(h), widened(c)});
  found[1] = found[1][0];
  found[2] = found[2][0];
  return lstm_result(found, x.scalar_type());
}

// The gradients for x, w_ih, w_hh, b_ih, b_hh, h, c. The biases do not come here: their gradient is that of the gates.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> npu_lstm_cell_backward(
    const OptionalTensor& grad_y, const OptionalTensor& grad_h, const OptionalTensor& grad_c, const Tensor& x,
    const Tensor& input_weight, const Tensor& hidden_weight, const Tensor& h, const Tensor& c, const Tensor&, const Tensor&,
    const Tensor& c_output, const Tensor& i, const Tensor& j, const Tensor& f, const Tensor& o, const Tensor&) {
  const Tensor workspace = at::cat({i[0], f[0], j[0], o[0]}, 1);
  Tensor hidden = value_of(grad_h);
  if (value_of(grad_y).defined())
    hidden = hidden.defined() ? hidden + (*grad_y)[0] : (*grad_y)[0];
  if (!hidden.defined())
    hidden = at::zeros_like(c);
  const auto [gates, grad_cx, bias] =
      lstm_cell_backward(widened(hidden), widened(value_of(grad_c)), widened(c), widened(c_output), widened(workspace), true);
  const auto dtype = x.scalar_type();
  return {at::matmul(gates, widened(input_weight).t()).to(dtype),
          at::matmul(widened(x).t(), gates).to(dtype),
          at::matmul(widened(h).t(), gates).to(dtype),
          bias.to(dtype),
          bias.to(dtype),
          at::matmul(gates, widened(hidden_weight).t()).to(dtype),
          grad_cx.to(dtype)};
}

using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

SixTensors npu_gru(const Tensor& x, const Tensor& h, const Tensor& input_weight, const Tensor& hidden_weight,
                   const Tensor& input_bias, const Tensor& hidden_bias, const Tensor&, bool, int64_t layers, double dropout,
                   bool, bool bidirectional, bool batch_first) {
  single_layer("npu_gru", layers, dropout, bidirectional, batch_first);
  const int64_t size = h.size(-1);
  TORCH_CHECK(x.dim() == 3 && input_weight.sizes() == at::IntArrayRef({x.size(2), 3 * size}) &&
                  hidden_weight.sizes() == at::IntArrayRef({size, 3 * size}) &&
                  input_bias.sizes() == at::IntArrayRef({3 * size}),
              "npu_gru: input must be [T, B, I], weight_input [I, 3 H], weight_hidden [H, 3 H] and bias_input [3 H], got ",
              x.sizes(), ", ", input_weight.sizes(), ", ", hidden_weight.sizes(), " and ", input_bias.sizes());
  Tensors found = run_gru({widened(x), widened(input_weight), widened(hidden_weight), widened(input_bias), widened(hidden_bias),
                           widened(h), Tensor()});
  to_dtype(found, input_bias.scalar_type());
  return {found[0], found[1], found[2], found[3], found[4], found[5]};
}

// The gradients for both weights, the input, both biases and the first state.
SixTensors npu_gru_backward(const OptionalTensor& grad_y, const OptionalTensor& grad_h, const Tensor& x,
                            const Tensor& input_weight, const Tensor& hidden_weight, const Tensor& input_bias,
                            const Tensor& hidden_bias, const Tensor&, const Tensor& h, const Tensor&, const Tensor&,
                            const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  const auto found = gradients_of(
      [](const Tensors& in) {
        const Tensors traces = run_gru({in[2], in[0], in[1], in[3], in[4], in[5], Tensor()});
        return Tensors{traces[0], traces[1]};
      },
      {input_weight, hidden_weight, x, input_bias, hidden_bias, h}, {value_of(grad_y), last_step_only(value_of(grad_h))});
  return {found[0], found[1], found[2], found[3], found[4], found[5]};
}

// Packs on the device; the lengths and the sizes of the batches stay on the host, where torch's recurrent layers read them.
std::tuple<Tensor, Tensor> pack_padded_sequence(const Tensor& x, const Tensor& lengths, bool batch_first) {
  static const c10::OperatorName name("aten::_pack_padded_sequence", "");
  const uint64_t started = sim_clock_ns();
  Call call;
  const Tensor alias = call.in(x, false);
  const c10::DeviceGuard guard(call.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto [data, sizes] = at::_pack_padded_sequence(alias, lengths, batch_first);
  const Tensor packed = call.out(data);
  sim_count_op({name, call.inputs(), call.outputs(), call.device().index(), sim_clock_ns() - started});
  return {packed, sizes};
}

}  // namespace

void register_packing(torch::Library& aten) { aten.impl("_pack_padded_sequence", TORCH_FN(pack_padded_sequence)); }

void register_recurrent(torch::Library& npu, torch::Library& aten) {
  aten.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  aten.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  aten.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  aten.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  npu.impl("npu_lstm", TORCH_FN(npu_lstm));
  npu.impl("npu_lstm_backward", TORCH_FN(npu_lstm_backward));
  npu.impl("npu_lstm_data", TORCH_FN(npu_lstm_data));
  npu.impl("npu_lstm_data_backward", TORCH_FN(npu_lstm_data_backward));
  npu.impl("npu_lstm_cell", TORCH_FN(npu_lstm_cell));
  npu.impl("npu_lstm_cell_backward", TORCH_FN(npu_lstm_cell_backward));
  npu.impl("npu_gru", TORCH_FN(npu_gru));
  npu.impl("npu_gru_backward", TORCH_FN(npu_gru_backward));
}

}  // namespace sim
