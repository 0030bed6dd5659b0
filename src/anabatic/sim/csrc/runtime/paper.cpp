// Time on paper: a clock for every stream and one for the host, moved by a roofline for operators and by latency and bandwidth
// for collectives. cost.py has the same formulas in Python, the constants and their sources.
#include <algorithm>
#include <mutex>
#include <vector>

#include "state.h"

namespace {

std::mutex mutex;
using sim::Moment;

Moment host_clock;
Moment device_clock[SIM_MAX_DEVICES];  // latest end of anything on the device, by logical number

void reach(Moment& clock, const Moment& moment) {
  clock.ns = std::max(clock.ns, moment.ns);
  clock.alone_ns = std::max(clock.alone_ns, moment.alone_ns);
}

double factor_of(int physical) {
  double factor = 1.0;
  for (const auto& fault : sim_segment()->fault)
    if (fault.kind == SIM_FAULT_SLOW && (fault.device < 0 || fault.device == physical)) factor *= fault.factor;
  return factor;
}

double slowness(int physical) {
  static const std::vector<double> factors = [] {
    std::vector<double> found;
    for (int i = 0; i < SIM_MAX_DEVICES; i++) found.push_back(factor_of(i));
    return found;
  }();
  return factors[physical];
}

uint64_t launch() { return static_cast<uint64_t>(sim_segment()->rates.host_ns); }

// The share of the tensor that each device sends, and how many exchanges follow one another.
struct Shape {
  double share;
  int exchanges;
};

Shape shape_of(SimCollective kind, int ranks) {
  const double others = ranks > 1 ? static_cast<double>(ranks - 1) / ranks : 0;
  switch (kind) {
    case SIM_ALL_REDUCE: return {2 * others, 2};
    case SIM_BROADCAST:
    case SIM_REDUCE: return {2 * others, 2};  // scatter and gather
    case SIM_SEND:
    case SIM_RECEIVE: return {1, 1};
    case SIM_BARRIER: return {0, 1};
    default: return {others, 1};
  }
}

}  // namespace

extern "C" double sim_operator_ns(enum SimUnit unit, double flops, double bytes) {
  const SimRates& rates = sim_segment()->rates;
  if (rates.memory <= 0) return 0;
  if (unit == SIM_HOST_LINK) return rates.launch_ns + 1e9 * bytes / rates.host_link;
  const double moved = 1e9 * bytes / rates.memory;
  if (unit == SIM_VECTOR) return rates.launch_ns + moved;
  return rates.launch_cube_ns + std::max(moved, 1e9 * flops / (unit == SIM_CUBE_HALF ? rates.half_flops : rates.single_flops));
}

extern "C" double sim_collective_ns(enum SimCollective kind, double bytes, int ranks) {
  const SimRates& rates = sim_segment()->rates;
  if (rates.memory <= 0) return 0;
  const int inside = std::min(ranks, static_cast<int>(rates.server));
  const int servers = (ranks + inside - 1) / inside;
  double ns = rates.launch_collective_ns;
  const bool pair = kind == SIM_SEND || kind == SIM_RECEIVE;
  if (inside > 1 || pair) {
    const double link = pair ? rates.peer : std::min(rates.peers, (inside - 1) * rates.peer);
    ns += 1e9 * shape_of(kind, inside).share * bytes / link;
  }
  if (servers > 1 && !pair) {
    const Shape across = shape_of(kind, servers);
    ns += across.exchanges * rates.network_ns + 1e9 * across.share * bytes / inside / rates.network;
  }
  return ns;
}

extern "C" uint64_t sim_paper_op(const SimOp* op) {
  const int physical = sim_physical(op->device);
  if (physical < 0) return 0;
  const double factor = slowness(physical);
  const auto took = static_cast<uint64_t>(factor * sim_operator_ns(op->unit, op->flops, static_cast<double>(op->bytes)));
  uint64_t start;
  sim::Stream* stream = sim::stream_of(op->stream, op->device);
  {
    std::lock_guard<std::mutex> lock(mutex);
    host_clock.ns += launch();
    host_clock.alone_ns += launch();
    reach(stream->paper, host_clock);
    start = stream->paper.ns;
    stream->paper.ns += took;
    stream->paper.alone_ns += took;
    reach(device_clock[op->device], stream->paper);
  }
  SimDevice& row = sim_segment()->device[physical];
  __atomic_fetch_add(&row.busy_ns, op->host_ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&row.paper_ns, took, __ATOMIC_RELAXED);
  sim::report_op(*op, physical, stream->id, start, took);
  return took;
}

extern "C" uint64_t sim_paper_ready(int device, void* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return std::max(sim::stream_of(stream, device)->paper.ns, host_clock.ns + launch());
}

extern "C" uint64_t sim_paper_collective(enum SimCollective kind, int device, void* stream, uint64_t bytes, int ranks,
                                         uint64_t start_ns, uint64_t host_ns) {
  const int physical = sim_physical(device);
  if (physical < 0) return 0;
  const auto took = static_cast<uint64_t>(slowness(physical) * sim_collective_ns(kind, static_cast<double>(bytes), ranks));
  sim::Stream* used = sim::stream_of(stream, device);
  uint64_t ready, start;
  {
    std::lock_guard<std::mutex> lock(mutex);
    host_clock.ns += launch();
    reach(used->paper, host_clock);
    ready = used->paper.ns;
    start = std::max(ready, start_ns);
    used->paper.ns = start + took;
    reach(device_clock[device], used->paper);
  }
  SimDevice& row = sim_segment()->device[physical];
  __atomic_fetch_add(&row.busy_ns, host_ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&row.paper_ns, took, __ATOMIC_RELAXED);
  sim::report_collective(kind, physical, used->id, {0, bytes, took, host_ns}, start, start - ready);
  return took;
}

namespace sim {

void paper_wait_device(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (device >= 0 && device < SIM_MAX_DEVICES) reach(host_clock, device_clock[device]);
}

void paper_wait_until(Moment moment) {
  std::lock_guard<std::mutex> lock(mutex);
  reach(host_clock, moment);
}

Moment paper_record(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  Moment moment = stream->paper;
  reach(moment, host_clock);
  return moment;
}

void paper_stream_wait(Stream* stream, Moment moment) {
  std::lock_guard<std::mutex> lock(mutex);
  reach(stream->paper, moment);
}

uint64_t paper_host() {
  std::lock_guard<std::mutex> lock(mutex);
  return host_clock.ns;
}

Moment paper_now() {
  std::lock_guard<std::mutex> lock(mutex);
  Moment latest = host_clock;
  for (const Moment& clock : device_clock) reach(latest, clock);
  return latest;
}

}  // namespace sim
