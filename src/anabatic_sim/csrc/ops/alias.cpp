#include "alias.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch_npu/csrc/core/NPUStorageImpl.h>

#include <cstring>

#include "../sim.h"
#include "count.h"

namespace sim {

void* stream_of(c10::Device device);  // stream_handle.cpp

namespace {

constexpr size_t kLinearSearch = 12;

c10::Storage npu_storage(c10::DataPtr data, size_t bytes, const at::Tensor& like) {
  static const auto create = c10::GetStorageImplCreate(c10::DeviceType::PrivateUse1);
  static c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  auto impl = create(c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(bytes)), std::move(data), allocator,
                     true);
  // torch_npu keeps the layout of the tensor that made a storage beside it: formats, serialisation and its own copies read it.
  auto& layout = static_cast<torch_npu::NPUStorageImpl*>(impl.get())->npu_desc_;
  layout.base_sizes_.assign(like.sizes().begin(), like.sizes().end());
  layout.base_strides_.assign(like.strides().begin(), like.strides().end());
  layout.storage_sizes_.assign(like.sizes().begin(), like.sizes().end());
  layout.origin_format_ = ACL_FORMAT_ND;
  layout.npu_format_ = ACL_FORMAT_ND;
  layout.data_type_ = like.dtype();
  return c10::Storage(std::move(impl));
}

// A conjugated or negated view keeps its values as they were and a bit beside them.
void copy_bits(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}

at::Tensor npu_tensor(c10::Storage storage, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                   like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  at::Tensor made(std::move(impl));
  copy_bits(like, made);
  return made;
}

}  // namespace

int Call::find(const c10::TensorImpl* impl) const {
  if (originals_.size() <= kLinearSearch) {
    for (size_t i = 0; i < originals_.size(); i++)
      if (originals_[i].unsafeGetTensorImpl() == impl) return static_cast<int>(i);
    return -1;
  }
  auto found = index_.find(impl);
  return found == index_.end() ? -1 : found->second;
}

c10::Storage Call::alias_storage(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (originals_.size() <= kLinearSearch) {
    for (size_t i = 0; i < originals_.size(); i++)
      if (originals_[i].storage().unsafeGetStorageImpl() == storage) return aliases_[i].cpu.storage();
  } else if (auto found = index_.find(storage); found != index_.end()) {
    return aliases_[found->second].cpu.storage();
  }
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
                                               c10::DataPtr(storage->mutable_data(), c10::Device(c10::DeviceType::CPU)),
                                               c10::GetCPUAllocator(), /*resizable=*/true);
}

namespace {

// Collectives run beside the host: an operator waits for those that its stream waits for.
void settle_stream(c10::Device device) {
  sim_settle(stream_of(device));
}

}  // namespace

void Call::set_device(c10::Device device) {
  device_ = device;
  if (sim_busy()) settle_stream(device_);
}

at::Tensor Call::in(const at::Tensor& tensor, bool written) {
  TORCH_CHECK(tensor.layout() == c10::kStrided && !tensor.is_quantized(),
              "the simulated NPU knows dense tensors only, got layout ", tensor.layout());
  if (!has_device()) {
    set_device(tensor.device());
  } else {
    TORCH_CHECK(tensor.device() == device_ || tensor.dim() == 0,
                "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                    tensor.device(), "!");
  }
  int known = find(tensor.unsafeGetTensorImpl());
  if (known >= 0) {
    aliases_[known].written |= written;
    return aliases_[known].cpu;
  }
  c10::Storage storage = alias_storage(tensor);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  at::Tensor cpu(std::move(impl));
  copy_bits(tensor, cpu);
  if (originals_.size() == kLinearSearch) {
    for (size_t i = 0; i < originals_.size(); i++) {
      index_.emplace(originals_[i].unsafeGetTensorImpl(), static_cast<int>(i));
      index_.emplace(originals_[i].storage().unsafeGetStorageImpl(), static_cast<int>(i));
    }
  }
  if (originals_.size() >= kLinearSearch) {
    index_.emplace(tensor.unsafeGetTensorImpl(), static_cast<int>(originals_.size()));
    index_.emplace(tensor.storage().unsafeGetStorageImpl(), static_cast<int>(originals_.size()));
  }
  originals_.push_back(tensor);
  aliases_.push_back({cpu, cpu.storage().mutable_data(), written});
  return cpu;
}

at::Tensor Call::out(const at::Tensor& cpu) {
  if (!cpu.defined() || !cpu.device().is_cpu()) return cpu;
  const c10::StorageImpl* storage = cpu.storage().unsafeGetStorageImpl();
  for (size_t i = 0; i < aliases_.size(); i++) {
    if (aliases_[i].cpu.unsafeGetTensorImpl() == cpu.unsafeGetTensorImpl()) return originals_[i];
    if (aliases_[i].cpu.storage().unsafeGetStorageImpl() == storage) return npu_tensor(originals_[i].storage(), cpu);
  }
  for (const auto& [source, target] : adopted_)
    if (source == storage) return npu_tensor(target, cpu);

  auto* owner = cpu.storage().unsafeGetStorageImpl();
  c10::DataPtr data;
  if (is_device_memory(owner->data_ptr())) {
    data = owner->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
    data.unsafe_set_device(device_);
  } else {  // made by a helper thread or a library of its own
    data = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(owner->nbytes());
    if (void* graph = capture_on(device_.index())) sim_capture_save(graph, data.get(), owner->nbytes());
    std::memcpy(data.get(), owner->data(), owner->nbytes());
  }
  c10::Storage made = npu_storage(std::move(data), owner->nbytes(), cpu);
  adopted_.emplace_back(storage, made);
  at::Tensor result = npu_tensor(std::move(made), cpu);
  made_.push_back(result);
  return result;
}

bool Call::read_all(bool (*test)(const at::Tensor&)) const {
  for (const Alias& alias : aliases_)
    if (!alias.written && !test(alias.cpu)) return false;
  return true;
}

c10::SmallVector<at::Tensor, 3> Call::written() const {
  c10::SmallVector<at::Tensor, 3> found;
  for (const Alias& alias : aliases_)
    if (alias.written) found.push_back(alias.cpu);
  return found;
}

c10::SmallVector<c10::Storage, 3> Call::written_storages() const {
  c10::SmallVector<c10::Storage, 3> found;
  for (size_t i = 0; i < aliases_.size(); i++)
    if (aliases_[i].written) found.push_back(originals_[i].storage());
  return found;
}

void Call::settle() {
  for (size_t i = 0; i < aliases_.size(); i++) {
    if (!aliases_[i].written) continue;
    const at::Tensor& cpu = aliases_[i].cpu;
    at::Tensor& original = originals_[i];
    auto* memory = cpu.storage().unsafeGetStorageImpl();
    auto* target = original.storage().unsafeGetStorageImpl();
    if (memory->data() != target->data() || memory->nbytes() != target->nbytes()) {
      const size_t bytes = memory->nbytes();
      c10::DataPtr data = memory->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
      TORCH_INTERNAL_ASSERT(is_device_memory(data), "a resized result lies outside the simulated device");
      data.unsafe_set_device(original.device());
      target->set_data_ptr_noswap(std::move(data));
      target->set_nbytes(bytes);
    }
    if (cpu.sizes() != original.sizes() || cpu.strides() != original.strides()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
}

}  // namespace sim
