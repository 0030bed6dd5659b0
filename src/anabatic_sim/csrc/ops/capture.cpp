#include "capture.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <memory>
#include <utility>

#include "../sim.h"
#include "count.h"
#include "products.h"

// libascendcl.so (graph.cpp): sim_capture_task with a name for aclmdlRIDebugJsonPrint.
extern "C" void sim_capture_named_task(void* graph, const char* name, int (*run)(void* argument), void (*drop)(void* argument),
                                       void* argument);

namespace sim {

namespace {

constexpr int kAicoreError = 507015;
constexpr int kDeviceToDevice = 3;  // aclrtMemcpyKind

// CPU tensors over the addresses of simulated ones. They own nothing, as a graph on hardware: its pool and the caller do.
class Addresses {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!on_npu(tensor)) return tensor;
    auto impl = c10::make_intrusive<c10::TensorImpl>(storage_of(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    at::Tensor alias(std::move(impl));
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    return alias;
  }
  c10::IValue of(Kind kind, const c10::IValue& value) {
    if (value.isNone()) return value;
    switch (kind) {
      case Kind::Tensor: return of(value.toTensor());
      case Kind::TensorList: {
        std::vector<at::Tensor> aliases;
        for (at::Tensor tensor : value.toTensorList()) aliases.push_back(of(tensor));
        return aliases;
      }
      case Kind::OptionalTensorList: {
        c10::List<std::optional<at::Tensor>> aliases;
        for (const c10::IValue& item : value.toListRef())
          aliases.push_back(item.isNone() ? std::nullopt : std::make_optional(of(item.toTensor())));
        return aliases;
      }
      case Kind::Device: return c10::Device(c10::DeviceType::CPU);
      case Kind::PinMemory: return false;
      default: return value;
    }
  }
  // Throws when memory was given back to the device: hardware would read what lies there now.
  void check() const {
    for (const auto& [address, storage] : known_) {
      int unused;
      TORCH_CHECK(storage.nbytes() == 0 || sim_is_device_pointer(address, &unused),
                  "the graph uses memory that was given back to the device");
    }
  }

 private:
  c10::Storage storage_of(const at::Tensor& tensor) {
    void* const data = const_cast<void*>(tensor.storage().data());
    for (const auto& [address, storage] : known_)
      if (address == data && storage.nbytes() == tensor.storage().nbytes()) return storage;
    known_.emplace_back(data, c10::make_intrusive<c10::StorageImpl>(
                                  c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
                                  c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)), c10::GetCPUAllocator(), false));
    return known_.back().second;
  }

  std::vector<std::pair<const void*, c10::Storage>> known_;
};

thread_local std::vector<Draw> recorded;  // of the operator that is captured on this thread

// The random calls of an operator that is replayed.
struct Replayed {
  const std::vector<Draw>* draws;
  size_t next = 0;
};
thread_local Replayed* replayed = nullptr;

class ReplayedDraws {
 public:
  explicit ReplayedDraws(const std::vector<Draw>& draws) : mine_{&draws}, outer_(replayed) { replayed = &mine_; }
  ReplayedDraws(const ReplayedDraws&) = delete;
  ReplayedDraws& operator=(const ReplayedDraws&) = delete;
  ~ReplayedDraws() { replayed = outer_; }

 private:
  Replayed mine_;
  Replayed* outer_;
};

struct Operator {
  c10::OperatorHandle op;
  c10::DispatchKey key;
  Addresses addresses;
  std::vector<c10::IValue> arguments;
  std::vector<size_t> generators;  // which arguments are generators
  std::vector<Draw> draws;
  std::vector<at::Tensor> results;  // tensors of all results; undefined where nothing is to be copied
};

struct Copy {
  Addresses addresses;
  at::Tensor to, from;
  int kind;
};

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
}

// Runs `what` as a task of a graph does: on the CPU's memory, errors as an operator's of the device.
template <typename What>
int run_task(const char* name, What what) {
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    const DeviceMemory host(false);
    what();
    return 0;
  } catch (const std::exception& error) {
    sim_set_error("%s in a graph: %s", name, error.what());
    return kAicoreError;
  }
}

int run_operator(void* argument) {
  auto& call = *static_cast<Operator*>(argument);
  return run_task(call.op.schema().name().c_str(), [&] {
    call.addresses.check();
    const ReplayedDraws draws(call.draws);
    torch::jit::Stack stack(call.arguments.begin(), call.arguments.end());
    for (size_t index : call.generators) stack[index] = take_generator(std::nullopt, c10::DeviceType::PrivateUse1);
    if (is_product(call.op.schema().name())) run_product(call.op, call.key, &stack);
    else call.op.redispatchBoxed(c10::DispatchKeySet(call.key), &stack);
    take_flops();  // counted when it was captured
    size_t next = 0;
    for (const c10::IValue& value : stack)
      each_tensor(value, [&](const at::Tensor& made) {
        at::Tensor& result = call.results[next++];
        if (!result.defined()) return;
        TORCH_CHECK(made.sizes() == result.sizes(), "a result has another shape than it had in the capture");
        result.copy_(made);
      });
  });
}

int run_copy(void* argument) {
  auto& copy = *static_cast<Copy*>(argument);
  return run_task("aten::copy_", [&] {
    copy.addresses.check();
    copy.to.copy_(copy.from);
    if (copy.kind != kDeviceToDevice) sim_count_copy(copy.kind, static_cast<uint64_t>(copy.to.numel()) * copy.to.element_size());
  });
}

template <typename T>
void drop(void* argument) {
  delete static_cast<T*>(argument);
}

void save(void* graph, const c10::Storage& storage) {
  sim_capture_save(graph, const_cast<void*>(storage.data()), storage.nbytes());
}

}  // namespace

bool capture_on_any() {
  static const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  return sim_capturing() != 0 && capture_on(guard.getDevice().index()) != nullptr;
}

CapturedCall::CapturedCall(const c10::OperatorHandle& op, c10::DispatchKey key, c10::ArrayRef<c10::IValue> arguments)
    : op_(op), key_(key), arguments_(arguments.begin(), arguments.end()) {}

std::vector<Draw>* recorded_draws() { return &recorded; }

const Draw* next_replayed_draw() {
  if (replayed == nullptr) return nullptr;
  TORCH_CHECK(replayed->next < replayed->draws->size(), "the operator draws more random numbers than it did in the capture");
  return &(*replayed->draws)[replayed->next++];
}

bool CapturedCall::begin(const Call& call) {
  graph_ = capture_on(call.device().index());
  if (graph_ == nullptr) return false;
  for (const c10::Storage& storage : call.written_storages()) save(graph_, storage);
  recorded.clear();
  return true;
}

void CapturedCall::end(const std::vector<Kind>& kinds, c10::ArrayRef<c10::IValue> results, const Call& call) {
  auto made = std::make_unique<Operator>(Operator{op_, key_, {}, {}, {}, std::exchange(recorded, {}), {}});
  for (size_t i = 0; i < arguments_.size(); i++) {
    made->arguments.push_back(made->addresses.of(kinds[i], arguments_[i]));
    if (kinds[i] == Kind::Generator) made->generators.push_back(i);
  }
  const auto fresh = [&](const at::Tensor& result) {
    for (const at::Tensor& output : call.outputs())
      if (output.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) return true;
    return false;
  };
  for (const c10::IValue& value : results)
    each_tensor(value, [&](const at::Tensor& result) {
      made->results.push_back(result.defined() && on_npu(result) && fresh(result) ? made->addresses.of(result) : at::Tensor());
    });
  sim_capture_named_task(graph_, op_.schema().name().c_str(), &run_operator, &drop<Operator>, made.release());
}

void capture_copy(void* graph, const at::Tensor& to, const at::Tensor& from, int kind) {
  if (on_npu(to)) save(graph, to.storage());
  auto made = std::make_unique<Copy>();
  made->to = made->addresses.of(to);
  made->from = made->addresses.of(from);
  made->kind = kind;
  sim_capture_named_task(graph, "aten::copy_", &run_copy, &drop<Copy>, made.release());
}

}  // namespace sim
