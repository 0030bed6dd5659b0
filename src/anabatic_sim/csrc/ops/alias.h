// Simulated tensors as CPU tensors and back, without copying: device memory is host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <unordered_map>

namespace sim {

inline bool on_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// The tensors of one operator call.
class Call {
 public:
  // The device of the first simulated tensor; set_device for factories.
  c10::Device device() const { return device_; }
  bool has_device() const { return device_.type() == c10::DeviceType::PrivateUse1; }
  void set_device(c10::Device device);

  // A CPU tensor over the memory of `tensor`; the same tensor, or storage, gives the same alias, so that checks for overlap
  // see what they would see on one device.
  at::Tensor in(const at::Tensor& tensor, bool written);
  // A simulated tensor for what the CPU kernel returned: the argument itself, a view of it, or the new memory adopted.
  at::Tensor out(const at::Tensor& cpu);
  // After the kernel: arguments that were resized get their new memory and shape.
  void settle();

  c10::ArrayRef<at::Tensor> inputs() const { return originals_; }
  c10::ArrayRef<at::Tensor> outputs() const { return made_; }
  // True when `test` holds for the alias of every argument that is only read.
  bool read_all(bool (*test)(const at::Tensor&)) const;
  // The storages of the arguments that are written.
  c10::SmallVector<c10::Storage, 3> written_storages() const;
  // The aliases of the arguments that were written.
  c10::SmallVector<at::Tensor, 3> written() const;

 private:
  struct Alias {
    at::Tensor cpu;
    void* data;
    bool written;
  };
  c10::Storage alias_storage(const at::Tensor& tensor);
  int find(const c10::TensorImpl* impl) const;

  c10::Device device_{c10::DeviceType::CPU};
  c10::SmallVector<at::Tensor, 6> originals_;
  c10::SmallVector<Alias, 6> aliases_;
  std::unordered_map<const void*, int> index_;  // only used for long lists
  c10::SmallVector<at::Tensor, 3> made_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 3> adopted_;
};

// While it lives, CPU memory that this thread allocates is memory of the current simulated device.
class DeviceMemory {
 public:
  explicit DeviceMemory(bool on = true);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

 private:
  bool before_;
};

void install_allocator();
// True when the memory behind a CPU tensor came from a simulated device.
bool is_device_memory(const c10::DataPtr& data);

}  // namespace sim
