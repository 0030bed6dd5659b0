// The raw data of a profile (profile.h): PROF_*/host and PROF_*/device_N, lines of JSON. The names of the folders, start_info and
// end_info are CANN's (Ascend/msprof, docs/en/user_guide/profile_data_file_references.md; the keys are those that torch_npu reads,
// profiler/analysis/prof_common_func/_constant.py); the data files inside are our own, as CANN's are its own business.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <acl/acl_prof.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <unordered_map>

#include "profile.h"

namespace {

constexpr size_t kBuffer = 1 << 20;  // bytes of lines before they are written

struct Output {
  FILE* file = nullptr;
  std::string lines;
};

struct Profile {
  std::mutex mutex;
  std::string root;  // PROF_*, empty: none yet
  pid_t pid = 0;
  int starts = 0;
  uint64_t types = 0;
  Output host;
  std::unordered_map<int, Output> devices;  // by physical number
};

std::atomic<bool> active{false};

Profile& profile() {
  static auto* made = new Profile;  // outlives whoever still computes while the process ends
  return *made;
}

uint64_t clock_ns(clockid_t id) {
  timespec now;
  clock_gettime(id, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ULL + static_cast<uint64_t>(now.tv_nsec);
}

int thread_id() {
  static thread_local const int id = static_cast<int>(syscall(SYS_gettid));
  return id;
}

std::string text(const std::string& raw) {
  std::string out = "\"";
  for (unsigned char letter : raw) {
    char code[8];
    if (letter == '"' || letter == '\\') (out += '\\') += static_cast<char>(letter);
    else if (letter >= 0x20) out += static_cast<char>(letter);
    else snprintf(code, sizeof code, "\\u%04x", letter), out += code;
  }
  return out + "\"";
}

// One line of JSON.
class Line {
 public:
  Line& add(const char* key, const std::string& value) { return raw(key, text(value)); }
  Line& add(const char* key, uint64_t value) { return raw(key, std::to_string(value)); }
  Line& add(const char* key, int value) { return raw(key, std::to_string(value)); }
  Line& add(const char* key, double value) {
    char digits[32];
    snprintf(digits, sizeof digits, "%.0f", value);
    return raw(key, digits);
  }
  std::string end() const { return body_ + "}\n"; }

 private:
  Line& raw(const char* key, const std::string& value) {
    (((body_ += body_.size() > 1 ? ", \"" : "\"") += key) += "\": ") += value;
    return *this;
  }
  std::string body_ = "{";
};

void flush(Output& out) {
  if (out.file == nullptr) return;
  fwrite(out.lines.data(), 1, out.lines.size(), out.file);
  fflush(out.file);
  out.lines.clear();
}

// With the lock held.
void put(Output& out, const Line& line) {
  out.lines += line.end();
  if (out.lines.size() > kBuffer) flush(out);
}

bool make_folder(const std::string& path, std::string* trouble) {
  if (mkdir(path.c_str(), 0750) == 0 || errno == EEXIST) return true;
  *trouble = "cannot make the folder " + path + ": " + strerror(errno);
  return false;
}

bool write_file(const std::string& path, const std::string& contents, std::string* trouble) {
  FILE* file = fopen(path.c_str(), "w");
  const bool written = file != nullptr && fwrite(contents.data(), 1, contents.size(), file) == contents.size();
  if ((file != nullptr && fclose(file) != 0) || !written) {
    *trouble = "cannot write " + path + ": " + strerror(errno);
    return false;
  }
  return true;
}

bool open_output(Output& out, const std::string& folder, const char* name, std::string* trouble) {
  if (out.file != nullptr) return true;
  if (!make_folder(folder, trouble) || !make_folder(folder + "/data", trouble)) return false;
  const std::string path = folder + "/data/" + name;
  out.file = fopen(path.c_str(), "a");
  if (out.file == nullptr) *trouble = "cannot write " + path + ": " + strerror(errno);
  return out.file != nullptr;
}

// collectionTimeBegin is CLOCK_REALTIME in microseconds, clockMonotonicRaw nanoseconds: their difference dates everything else.
std::string moment_json() {
  const uint64_t raw = clock_ns(CLOCK_MONOTONIC_RAW), real = clock_ns(CLOCK_REALTIME);
  char out[200];
  snprintf(out, sizeof out, "{\"collectionTimeBegin\": \"%llu.%03llu\", \"clockMonotonicRaw\": \"%llu\"}",
           static_cast<unsigned long long>(real / 1000), static_cast<unsigned long long>(real % 1000), static_cast<unsigned long long>(raw));
  return out;
}

// PROF_000001_20261127071155825_ABCDEFGHIJKLMNOP
std::string root_name(int number) {
  const uint64_t now = clock_ns(CLOCK_REALTIME);
  const auto seconds = static_cast<time_t>(now / 1000000000);
  tm parts;
  localtime_r(&seconds, &parts);
  char digits[32], name[96];
  strftime(digits, sizeof digits, "%Y%m%d%H%M%S", &parts);
  std::random_device chance;
  char letters[17] = {};
  for (int i = 0; i < 16; i++) letters[i] = static_cast<char>('A' + chance() % 26);
  snprintf(name, sizeof name, "PROF_%06d_%s%03d_%s", number, digits, static_cast<int>(now / 1000000 % 1000), letters);
  return name;
}

std::string describe(const sim::ProfileConfig& config) {
  const SimSegment& machine = *sim_segment();
  std::string devices;
  for (int device : config.devices) devices += (devices.empty() ? "" : ",") + std::to_string(device);
  return Line()
      .add("devices", devices)
      .add("types", config.types)
      .add("metrics", config.metrics)
      .add("pid", static_cast<int>(getpid()))
      .add("soc", std::string(machine.soc))
      .add("cube_cores", static_cast<int>(machine.cube_cores))
      .add("vector_cores", static_cast<int>(machine.vector_cores))
      .end();
}

Output* output_of(Profile& all, int physical) {
  if (!active.load(std::memory_order_relaxed) || all.pid != getpid()) return nullptr;
  const auto found = all.devices.find(physical);
  return found == all.devices.end() ? nullptr : &found->second;
}

struct Tensors {
  std::string shapes, types, formats;
};
thread_local std::string api;  // empty: what runs is no operator of torch
thread_local Tensors inputs, outputs;

const char* kUnits[] = {"vector", "cube", "cube", "link"};
const char* kCollectives[] = {"allReduce", "allGather", "reduceScatter", "broadcast", "reduce", "scatter", "alltoall", "send", "receive",
                              "barrier"};

}  // namespace

extern "C" int sim_profiling(void) { return active.load(std::memory_order_relaxed) ? 1 : 0; }

extern "C" void sim_profile_operator(const char* name, const SimTensors* in, const SimTensors* out) {
  api = name;
  inputs = {in->shapes, in->types, in->formats};
  outputs = {out->shapes, out->types, out->formats};
}

namespace sim {

uint64_t profile_clock_ns() { return clock_ns(CLOCK_MONOTONIC_RAW); }

ProfiledLaunch profile_launch() { return {thread_id(), profile_clock_ns(), "", -1}; }

void profile_op(const SimOp& op, int physical, int stream, uint64_t start_ns, uint64_t took_ns) {
  const std::string called = api.empty() ? op.name : std::move(api);
  const Tensors in = std::move(inputs), out = std::move(outputs);
  api.clear();
  inputs = outputs = {};
  Profile& all = profile();
  const uint64_t now = profile_clock_ns();
  std::lock_guard<std::mutex> lock(all.mutex);
  Output* device = output_of(all, physical);
  if (device == nullptr) return;
  put(*device, Line()
                   .add("kind", std::string("operator"))
                   .add("name", std::string(op.name))
                   .add("overload", std::string(op.overload))
                   .add("api", called)
                   .add("unit", std::string(kUnits[op.unit]))
                   .add("stream", stream)
                   .add("thread", thread_id())
                   .add("launch_begin_ns", now - std::min(op.host_ns, now))
                   .add("launch_end_ns", now)
                   .add("start_ns", start_ns)
                   .add("ns", took_ns)
                   .add("bytes", op.bytes)
                   .add("flops", op.flops)
                   .add("input_shapes", in.shapes)
                   .add("input_types", in.types)
                   .add("input_formats", in.formats)
                   .add("output_shapes", out.shapes)
                   .add("output_types", out.types)
                   .add("output_formats", out.formats));
}

void profile_collective(const ProfiledLaunch& launch, SimCollective kind, int physical, int stream, uint64_t bytes, int ranks,
                        uint64_t start_ns, uint64_t took_ns, uint64_t waited_ns) {
  Profile& all = profile();
  std::lock_guard<std::mutex> lock(all.mutex);
  Output* device = output_of(all, physical);
  if (device == nullptr) return;
  put(*device, Line()
                   .add("kind", std::string("collective"))
                   .add("name", std::string(kCollectives[kind]))
                   .add("stream", stream)
                   .add("thread", launch.thread)
                   .add("launch_begin_ns", launch.begin_ns)
                   .add("launch_end_ns", launch.begin_ns)
                   .add("start_ns", start_ns)
                   .add("ns", took_ns)
                   .add("waited_ns", waited_ns)
                   .add("bytes", bytes)
                   .add("ranks", ranks)
                   .add("communicator", launch.communicator)
                   .add("type", launch.type));
}

void profile_memory(int physical, uint64_t used) {
  if (!active.load(std::memory_order_relaxed)) return;
  Profile& all = profile();
  std::lock_guard<std::mutex> lock(all.mutex);
  Output* device = output_of(all, physical);
  if (device == nullptr || (all.types & ACL_PROF_TASK_MEMORY) == 0) return;
  put(*device, Line().add("kind", std::string("memory")).add("at_ns", profile_clock_ns()).add("bytes", used));
}

void profile_mark(const ProfiledMark& mark) {
  Profile& all = profile();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (!active.load() || all.pid != getpid() || (all.types & ACL_PROF_MSPROFTX) == 0) return;
  put(all.host, Line()
                    .add("kind", std::string("mark"))
                    .add("message", mark.message)
                    .add("domain", mark.domain)
                    .add("thread", thread_id())
                    .add("begin_ns", mark.begin_ns)
                    .add("end_ns", mark.end_ns)
                    .add("device", mark.physical)
                    .add("stream", mark.stream)
                    .add("device_begin_ns", mark.device_begin_ns)
                    .add("device_end_ns", mark.device_end_ns));
}

bool profile_start(const std::string& folder, const ProfileConfig& config, std::string* trouble) {
  Profile& all = profile();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.pid != getpid()) {  // a forked child writes a profile of its own
    all.root.clear();
    all.host = {};
    all.devices.clear();
    all.pid = getpid();
  }
  if (all.root.empty()) {
    const std::string root = folder + "/" + root_name(++all.starts);
    const std::string host = root + "/host";
    if (!make_folder(root, trouble) || !open_output(all.host, host, "marks.jsonl", trouble) ||
        !write_file(host + "/start_info", moment_json(), trouble) || !write_file(host + "/sample.json", describe(config), trouble))
      return false;
    all.root = root;
  }
  for (int device : config.devices) {
    const std::string place = all.root + "/device_" + std::to_string(device);
    if (!open_output(all.devices[device], place, "tasks.jsonl", trouble) ||
        !write_file(place + "/start_info." + std::to_string(device), moment_json(), trouble))
      return false;
  }
  all.types = config.types;
  active.store(true);
  return true;
}

void profile_stop() {
  Profile& all = profile();
  std::lock_guard<std::mutex> lock(all.mutex);
  active.store(false);
  if (all.pid != getpid()) return;
  flush(all.host);
  for (auto& [number, device] : all.devices) flush(device);
}

void profile_forget() {
  profile_stop();
  Profile& all = profile();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.pid != getpid()) return;
  std::string ignored;
  if (!all.root.empty()) write_file(all.root + "/host/end_info", moment_json(), &ignored);
  if (all.host.file != nullptr) fclose(all.host.file);
  for (auto& [number, device] : all.devices)
    if (device.file != nullptr) fclose(device.file);
  all.host = {};
  all.devices.clear();
  all.root.clear();
}

}  // namespace sim
