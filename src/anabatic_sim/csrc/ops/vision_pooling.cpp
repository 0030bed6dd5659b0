// Pooling of regions and deformable convolution. ROI align: He et al., Mask R-CNN, arXiv:1703.06870, as torchvision has it, with
// roi_end_mode 0 for aligned=False and 3 for aligned=True (torch_npu, contrib/module/roi_align.py). Position sensitive
// pooling: Dai et al., R-FCN, arXiv:1605.06409, as torch_npu's test of it. Deformable convolution: Zhu et al., arXiv:1811.11168.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/grid_sampler.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "count.h"
#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

Tensor plain(const Tensor& x) { return x.to(at::kFloat).contiguous(); }

struct Region {
  int64_t image;
  float x1, y1, x2, y2;
};

Region region_of(const Tensor& rois, int64_t n, int64_t images) {
  const float* roi = rois.const_data_ptr<float>() + n * 5;
  const auto image = static_cast<int64_t>(roi[0]);
  TORCH_CHECK(image >= 0 && image < images, "regions: the first number of a region must be an image in [0, ", images, "), got ",
              roi[0]);
  return {image, roi[1], roi[2], roi[3], roi[4]};
}

// One point of the image as up to four pixels with their weights.
using Visit = std::function<void(int64_t pixel, float weight)>;

void bilinear(float y, float x, int64_t height, int64_t width, const Visit& visit) {
  if (y < -1 || y > static_cast<float>(height) || x < -1 || x > static_cast<float>(width))
    return;
  y = std::max(y, 0.0F);
  x = std::max(x, 0.0F);
  int64_t top = std::min(static_cast<int64_t>(y), height - 1), left = std::min(static_cast<int64_t>(x), width - 1);
  const int64_t bottom = std::min(top + 1, height - 1), right = std::min(left + 1, width - 1);
  const float dy = top == bottom ? 0 : y - static_cast<float>(top), dx = left == right ? 0 : x - static_cast<float>(left);
  visit(top * width + left, (1 - dy) * (1 - dx));
  visit(top * width + right, (1 - dy) * dx);
  visit(bottom * width + left, dy * (1 - dx));
  visit(bottom * width + right, dy * dx);
}

struct Align {
  int64_t height, width, rows, columns, samples;  // of the image, of the result; 0 samples: as many as the region needs
  double scale;
  bool aligned;

  // Calls visit(bin, pixel, weight) for each bin of a region; the weights of a bin sum to 1 inside of the image.
  void run(const Region& region, const std::function<void(int64_t, int64_t, float)>& visit) const {
    const float shift = aligned ? 0.5F : 0, factor = static_cast<float>(scale);
    const float x1 = region.x1 * factor - shift, y1 = region.y1 * factor - shift;
    float w = region.x2 * factor - shift - x1, h = region.y2 * factor - shift - y1;
    if (!aligned) {
      w = std::max(w, 1.0F);
      h = std::max(h, 1.0F);
    }
    const float bin_h = h / static_cast<float>(rows), bin_w = w / static_cast<float>(columns);
    const int64_t down = samples > 0 ? samples : static_cast<int64_t>(std::ceil(bin_h));
    const int64_t across = samples > 0 ? samples : static_cast<int64_t>(std::ceil(bin_w));
    const float share = 1 / static_cast<float>(std::max<int64_t>(down * across, 1));
    for (int64_t bin = 0; bin < rows * columns; bin++) {
      for (int64_t point = 0; point < down * across; point++) {
        const float y =
            y1 + (static_cast<float>(bin / columns) + (static_cast<float>(point / across) + 0.5F) / static_cast<float>(down)) *
                     bin_h;
        const float x = x1 + (static_cast<float>(bin % columns) +
                              (static_cast<float>(point % across) + 0.5F) / static_cast<float>(across)) *
                                 bin_w;
        bilinear(y, x, height, width, [&](int64_t pixel, float weight) { visit(bin, pixel, weight * share); });
      }
    }
  }
};

bool is_aligned(int64_t mode) {
  TORCH_CHECK_NOT_IMPLEMENTED(mode == 0 || mode == 3, "anabatic sim: npu_roi_align with roi_end_mode ", mode,
                              " is not simulated");
  return mode == 3;
}

void check_rois(const Tensor& x, const Tensor& rois) {
  TORCH_CHECK(x.dim() == 4 && rois.dim() == 2 && rois.size(1) == 5,
              "npu_roi_align: features must be [N, C, H, W] and rois [n, 5], got ", x.sizes(), " and ", rois.sizes());
}

Tensor roi_align(const Tensor& x, const Tensor& rois, double scale, int64_t rows, int64_t columns, int64_t samples,
                 int64_t mode) {
  check_rois(x, rois);
  const Align align{x.size(2), x.size(3), rows, columns, samples, scale, is_aligned(mode)};
  const Tensor image = plain(x), regions = plain(rois);
  const int64_t channels = x.size(1), pixels = x.size(2) * x.size(3), bins = rows * columns;
  Tensor result = at::zeros({rois.size(0), channels, rows, columns}, at::kFloat);
  for (int64_t n = 0; n < rois.size(0); n++) {
    const Region region = region_of(regions, n, x.size(0));
    const float* from = image.const_data_ptr<float>() + region.image * channels * pixels;
    float* to = result.mutable_data_ptr<float>() + n * channels * bins;
    align.run(region, [&](int64_t bin, int64_t pixel, float weight) {
      for (int64_t c = 0; c < channels; c++) to[c * bins + bin] += weight * from[c * pixels + pixel];
    });
  }
  return result.to(x.scalar_type());
}

Tensor roi_align_backward(const Tensor& grad, const Tensor& rois, at::IntArrayRef shape, int64_t, int64_t, double scale,
                          int64_t samples, std::optional<int64_t> mode) {
  TORCH_CHECK(shape.size() == 4, "npu_roi_alignbk: xdiff_shape must have four numbers, got ", shape);
  check_rois(grad, rois);
  const Align align{shape[2], shape[3], grad.size(2), grad.size(3), samples, scale, is_aligned(mode.value_or(0))};
  const Tensor above = plain(grad), regions = plain(rois);
  const int64_t channels = shape[1], pixels = shape[2] * shape[3], bins = grad.size(2) * grad.size(3);
  Tensor result = at::zeros(shape, at::kFloat);
  for (int64_t n = 0; n < rois.size(0); n++) {
    const Region region = region_of(regions, n, shape[0]);
    const float* from = above.const_data_ptr<float>() + n * channels * bins;
    float* to = result.mutable_data_ptr<float>() + region.image * channels * pixels;
    align.run(region, [&](int64_t bin, int64_t pixel, float weight) {
      for (int64_t c = 0; c < channels; c++) to[c * pixels + pixel] += weight * from[c * bins + bin];
    });
  }
  return result.to(grad.scalar_type());
}

// Position sensitive pooling: each of the group x group bins of a region is the mean over a channel of its own.
struct Sensitive {
  int64_t images, height, width, group, out;
  double scale;

  // The region's bin as pixels [top, bottom) x [left, right).
  struct Bin {
    int64_t top, bottom, left, right;
    int64_t area() const { return std::max<int64_t>(bottom - top, 0) * std::max<int64_t>(right - left, 0); }
  };

  Bin bin(const Region& region, int64_t row, int64_t column) const {
    const auto factor = static_cast<float>(scale), parts = static_cast<float>(group);
    const float x1 = std::nearbyint(region.x1) * factor, y1 = std::nearbyint(region.y1) * factor;
    const float w = std::max(std::nearbyint(region.x2 + 1) * factor - x1, 0.1F) / parts;
    const float h = std::max(std::nearbyint(region.y2 + 1) * factor - y1, 0.1F) / parts;
    const auto edge = [](float at, int64_t most) { return std::clamp(static_cast<int64_t>(at), int64_t{0}, most); };
    return {edge(std::floor(static_cast<float>(row) * h + y1), height),
            edge(std::ceil(static_cast<float>(row + 1) * h + y1), height),
            edge(std::floor(static_cast<float>(column) * w + x1), width),
            edge(std::ceil(static_cast<float>(column + 1) * w + x1), width)};
  }

  // Calls visit(value of the result, first pixel of the channel's image, bin).
  void run(const Tensor& rois, const std::function<void(int64_t, int64_t, const Bin&)>& visit) const {
    const Tensor regions = rois.to(at::kFloat).transpose(1, 2).reshape({-1, 5}).contiguous();
    const int64_t bins = group * group, channels = out * bins;
    for (int64_t n = 0; n < regions.size(0); n++) {
      const Region region = region_of(regions, n, images);
      for (int64_t place = 0; place < bins; place++) {
        const Bin found = bin(region, place / group, place % group);
        if (found.area() == 0)
          continue;
        for (int64_t c = 0; c < out; c++)
          visit((n * out + c) * bins + place, (region.image * channels + c * bins + place) * height * width, found);
      }
    }
  }
};

Tensor ps_roi_pooling(const Tensor& x, const Tensor& rois, double scale, int64_t group, int64_t out) {
  TORCH_CHECK(x.dim() == 4 && rois.dim() == 3 && rois.size(1) == 5 && x.size(1) == out * group * group,
              "npu_ps_roi_pooling: x must be [N, output_dim group_size^2, H, W] and rois [batch, 5, rois], got ", x.sizes(),
              " and ", rois.sizes());
  const Tensor image = plain(x);
  const int64_t width = x.size(3);
  Tensor result = at::zeros({rois.size(0) * rois.size(2), out, group, group}, at::kFloat);
  float* to = result.mutable_data_ptr<float>();
  const float* from = image.const_data_ptr<float>();
  Sensitive{x.size(0), x.size(2), width, group, out, scale}.run(
      rois, [&](int64_t value, int64_t first, const Sensitive::Bin& bin) {
        double sum = 0;
        for (int64_t y = bin.top; y < bin.bottom; y++)
          for (int64_t z = bin.left; z < bin.right; z++) sum += from[first + y * width + z];
        to[value] = static_cast<float>(sum / static_cast<double>(bin.area()));
      });
  return result.to(x.scalar_type());
}

Tensor ps_roi_pooling_backward(const Tensor& grad, const Tensor& rois, double scale, int64_t group, int64_t out,
                               c10::SymIntArrayRef symbolic) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  const Tensor above = plain(grad);
  Tensor result = at::zeros({rois.size(0), out * group * group, size[0], size[1]}, at::kFloat);
  float* to = result.mutable_data_ptr<float>();
  const float* from = above.const_data_ptr<float>();
  Sensitive{rois.size(0), size[0], size[1], group, out, scale}.run(
      rois, [&](int64_t value, int64_t first, const Sensitive::Bin& bin) {
        const float share = from[value] / static_cast<float>(bin.area());
        for (int64_t y = bin.top; y < bin.bottom; y++)
          for (int64_t z = bin.left; z < bin.right; z++) to[first + y * size[1] + z] += share;
      });
  return result.to(grad.scalar_type());
}

// Arguments of the deformable convolution: four numbers each for N, C, H, W, the padding for top, bottom, left, right.
struct Deform {
  at::IntArrayRef kernel, stride, padding, dilation;
  int64_t groups, deformable;

  void check(const Tensor& x, const Tensor& offset, bool modulated) const {
    TORCH_CHECK_NOT_IMPLEMENTED(modulated, "anabatic sim: npu_deformable_conv2d with modulated=False is not simulated");
    TORCH_CHECK(
        x.dim() == 4 && offset.dim() == 4 && kernel.size() == 2 && stride.size() == 4 && padding.size() == 4 &&
            dilation.size() == 4,
        "npu_deformable_conv2d: input and offset must be 4-D, kernel_size two numbers, stride, padding and dilation four");
    TORCH_CHECK(offset.size(1) == 3 * deformable * kernel[0] * kernel[1] && x.size(1) % deformable == 0,
                "npu_deformable_conv2d: offset needs ", 3 * deformable * kernel[0] * kernel[1], " channels, got ",
                offset.size(1));
  }

  // The values under the moved kernels, [N, C, rows * kernel rows, columns * kernel columns]. The channels of the offsets are all
  // for x, all for y, all weights (torch_npu, contrib/module/deform_conv.py).
  Tensor sampled(const Tensor& x, const Tensor& offset) const {
    const int64_t batch = x.size(0), h = offset.size(2), w = offset.size(3), kh = kernel[0], kw = kernel[1];
    const Tensor parts = offset.reshape({batch, 3, deformable, kh, kw, h, w});
    const auto axis = [](int64_t n, int64_t step, int64_t start) { return at::arange(n, at::kFloat) * step + start; };
    const Tensor rows = axis(h, stride[2], -padding[0]).view({1, 1, h, 1}) + axis(kh, dilation[2], 0).view({kh, 1, 1, 1});
    const Tensor columns = axis(w, stride[3], -padding[2]).view({1, 1, 1, w}) + axis(kw, dilation[3], 0).view({1, kw, 1, 1});
    const auto flat = [&](const Tensor& t) {  // [batch, groups, kh, kw, h, w] -> [batch groups, h kh, w kw]
      return t.permute({0, 1, 4, 2, 5, 3}).reshape({batch * deformable, h * kh, w * kw});
    };
    const auto relative = [](const Tensor& t, int64_t size) { return (t * 2 + 1) / static_cast<double>(size) - 1; };
    const Tensor gx = relative(flat(parts.select(1, 0) + columns), x.size(3)),
                 gy = relative(flat(parts.select(1, 1) + rows), x.size(2));
    const Tensor image = x.reshape({batch * deformable, x.size(1) / deformable, x.size(2), x.size(3)});
    const Tensor found = at::grid_sampler(image, at::stack({gx, gy}, -1), 0, 0, false);  // bilinear, zeros outside
    return (found * flat(parts.select(1, 2)).unsqueeze(1)).reshape({batch, x.size(1), h * kh, w * kw});
  }

  Tensor convolved(const Tensor& values, const Tensor& weight, const Tensor& bias) const {
    return at::convolution(values, weight, bias, kernel, {0, 0}, {1, 1}, false, {0, 0}, groups);
  }
};

std::tuple<Tensor, Tensor> deformable_conv(const Tensor& x, const Tensor& weight, const Tensor& offset,
                                           const OptionalTensor& bias, at::IntArrayRef kernel, at::IntArrayRef stride,
                                           at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                                           int64_t deformable, bool modulated) {
  const Deform deform{kernel, stride, padding, dilation, groups, deformable};
  deform.check(x, offset, modulated);
  const Tensor values = deform.sampled(widened(x), widened(offset));
  const Tensor y = deform.convolved(values, widened(weight), widened(value_of(bias)));
  add_flops(2.0 * y.numel() * weight.numel() / weight.size(0));
  return {y.to(x.scalar_type()), values.to(x.scalar_type())};
}

// The gradients for input, weight, offset and bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> deformable_conv_backward(const Tensor& x, const Tensor& grad, const Tensor&,
                                                                    const Tensor& weight, const Tensor& offset,
                                                                    at::IntArrayRef kernel, at::IntArrayRef stride,
                                                                    at::IntArrayRef padding, at::IntArrayRef dilation,
                                                                    int64_t groups, int64_t deformable, bool modulated) {
  const Deform deform{kernel, stride, padding, dilation, groups, deformable};
  deform.check(x, offset, modulated);
  const auto found =
      gradients_of([&](const Tensors& in) { return Tensors{deform.convolved(deform.sampled(in[0], in[2]), in[1], Tensor())}; },
                   {x, weight, offset}, {grad});
  add_flops(4.0 * grad.numel() * weight.numel() / weight.size(0));
  return {found[0], found[1], found[2], widened(grad).sum({0, 2, 3}).to(grad.scalar_type())};
}

}  // namespace

void register_vision_pooling(torch::Library& npu) {
  npu.impl("npu_roi_align", TORCH_FN(roi_align));
  npu.impl("npu_roi_alignbk", TORCH_FN(roi_align_backward));
  npu.impl("npu_ps_roi_pooling", TORCH_FN(ps_roi_pooling));
  npu.impl("npu_ps_roi_pooling_backward", TORCH_FN(ps_roi_pooling_backward));
  npu.impl("npu_deformable_conv2d", TORCH_FN(deformable_conv));
  npu.impl("npu_deformable_conv2dbk", TORCH_FN(deformable_conv_backward));
}

}  // namespace sim
