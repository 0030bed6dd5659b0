// The runtime's handle of a device's current stream, with every torch that has a torch_npu.
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace sim {

void* stream_of(c10::Device device);  // for alias.cpp and count.cpp

namespace {

template <typename Stream>
concept HasNativeHandle = requires(const Stream& stream) { stream.native_handle(); };

template <typename Stream>
void* handle_of(const Stream& stream) {
  if constexpr (HasNativeHandle<Stream>) {
    return stream.native_handle();
  } else {
    // Before c10::Stream had it, torch_npu's own class does: c10_npu::NPUStream holds nothing but a c10::Stream
    // (include/torch_npu/csrc/core/npu/NPUStream.h of the wheel), and NPUStream::stream() const is exported.
    using Getter = void* (*)(const Stream*);
    static const auto getter = [] {
      void* library = dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
      TORCH_CHECK(library != nullptr, "the simulated NPU does not find libtorch_npu.so in this process");
      void* symbol = dlsym(library, "_ZNK7c10_npu9NPUStream6streamEv");
      TORCH_CHECK(symbol != nullptr, "the simulated NPU does not find c10_npu::NPUStream::stream() in this torch_npu");
      return reinterpret_cast<Getter>(symbol);
    }();
    return getter(&stream);
  }
}

}  // namespace

void* stream_of(c10::Device device) {
  static const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  return handle_of(guard.getStream(device));
}

}  // namespace sim
