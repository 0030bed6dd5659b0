// libms_tools_ext.so: marks and ranges of torch_npu.npu.mstx for the profile. Signatures are those of torch_npu's calls
// (torch_npu/csrc/framework/interface/MstxInterface.cpp); the memory functions of the same header serve leak checkers only.
#include <stdint.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>

#include "profile.h"

namespace {

struct Domain {
  std::string name;
};
const Domain kDefault{"default"};

struct Range {
  sim::ProfiledMark mark;
  sim::Stream* stream;  // null: only of the host
};

std::mutex mutex;
std::unordered_map<uint64_t, Range> open_ranges;
uint64_t last_range = 0;

sim::ProfiledMark begin(const Domain& domain, const char* message, aclrtStream handle) {
  sim::ProfiledMark mark;
  mark.message = message == nullptr ? "" : message;
  mark.domain = domain.name;
  mark.begin_ns = mark.end_ns = sim::profile_clock_ns();
  if (handle == nullptr) return mark;
  sim::Stream* stream = sim::stream_of(handle);
  mark.physical = sim_physical(stream->device);
  mark.stream = stream->id;
  mark.device_begin_ns = mark.device_end_ns = std::max(mark.begin_ns, sim::paper_shown(stream));
  return mark;
}

uint64_t start(const Domain& domain, const char* message, aclrtStream handle) {
  Range range{begin(domain, message, handle), handle == nullptr ? nullptr : sim::stream_of(handle)};
  std::lock_guard<std::mutex> lock(mutex);
  open_ranges.emplace(++last_range, std::move(range));
  return last_range;
}

void finish(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = open_ranges.find(id);
  if (found == open_ranges.end()) return;
  auto& [mark, stream] = found->second;
  mark.end_ns = sim::profile_clock_ns();
  if (stream != nullptr) mark.device_end_ns = std::max(mark.end_ns, sim::paper_shown(stream));
  sim::profile_mark(mark);
  open_ranges.erase(found);
}

}  // namespace

extern "C" {

void mstxMarkA(const char* message, aclrtStream stream) { sim::profile_mark(begin(kDefault, message, stream)); }
uint64_t mstxRangeStartA(const char* message, aclrtStream stream) { return start(kDefault, message, stream); }
void mstxRangeEnd(uint64_t id) { finish(id); }
void* mstxDomainCreateA(const char* name) { return name == nullptr ? nullptr : new Domain{name}; }
void mstxDomainDestroy(void* domain) { delete static_cast<Domain*>(domain); }
void mstxDomainMarkA(void* domain, const char* message, aclrtStream stream) {
  if (domain != nullptr) sim::profile_mark(begin(*static_cast<Domain*>(domain), message, stream));
}
uint64_t mstxDomainRangeStartA(void* domain, const char* message, aclrtStream stream) {
  return domain == nullptr ? 0 : start(*static_cast<Domain*>(domain), message, stream);
}
void mstxDomainRangeEnd(void*, uint64_t id) { finish(id); }

aclError aclprofMarkEx(const char* message, size_t length, aclrtStream stream) {
  if (message == nullptr || stream == nullptr) return sim::fail(ACL_ERROR_INVALID_PARAM, "aclprofMarkEx", "a pointer is null");
  sim::profile_mark(begin(kDefault, std::string(message, length).c_str(), stream));
  return ACL_SUCCESS;
}

}  // extern "C"
