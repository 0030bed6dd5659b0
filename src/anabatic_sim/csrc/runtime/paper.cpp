// Time on paper: a clock for every stream and one for the host, moved by a roofline for operators and by latency and bandwidth
// for collectives. plan/cost_model.py has the same formulas in Python, the constants and their sources.
#include <algorithm>
#include <bit>
#include <mutex>
#include <vector>

#include "profile.h"
#include "state.h"

namespace {

std::mutex mutex;
using sim::Moment;

Moment host_clock;
Moment device_clock[SIM_MAX_DEVICES];  // latest end of anything on the device, by logical number

void reach(Moment& clock, const Moment& moment) {
  clock.ns = std::max(clock.ns, moment.ns);
  clock.alone_ns = std::max(clock.alone_ns, moment.alone_ns);
  clock.shown_ns = std::max(clock.shown_ns, moment.shown_ns);
}

// Takes up what has been learnt about collectives; the mutex is held.
Moment settle(sim::Mark& mark) {
  std::erase_if(mark.after, [&](const auto& meeting) {
    if (meeting->over) reach(mark.at, meeting->end);
    return meeting->over;
  });
  return mark.at;
}

struct Launched {
  int device;
  sim::Stream* stream;
  int stream_id;
  sim::Mark ready;
  std::shared_ptr<sim::Meeting> meeting;
  sim::ProfiledLaunch profiled;
};

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

// The host launches something; the mutex is held.
void launch(bool is_collective) {
  const auto ns = static_cast<uint64_t>(sim_segment()->rates.host_ns);
  host_clock.ns += ns;
  if (!is_collective) host_clock.alone_ns += ns;
  if (sim_profiling() != 0) host_clock.shown_ns = std::max(host_clock.shown_ns, sim::profile_clock_ns());
}

// The share of the tensor that each device sends, and how many phases follow one another.
struct Shape {
  double share;
  int phases;
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

// on_card: the two ranks are the dies of one card.
extern "C" double sim_collective_ns(enum SimCollective kind, double bytes, int ranks, bool on_card) {
  const SimRates& rates = sim_segment()->rates;
  if (rates.memory <= 0) return 0;
  const int inside = std::min(ranks, static_cast<int>(rates.server));
  const int servers = (ranks + inside - 1) / inside;
  double ns = rates.launch_collective_ns;
  const bool pair = kind == SIM_SEND || kind == SIM_RECEIVE;
  if (inside > 1 || pair) {
    double link = pair ? rates.peer : std::min(rates.peers, (inside - 1) * rates.peer);
    if (on_card) link = std::max(link, rates.card);
    ns += 1e9 * shape_of(kind, inside).share * bytes / link;
  }
  if (servers > 1 && !pair) {
    const Shape across = shape_of(kind, servers);
    const int rounds = across.phases * std::bit_width(static_cast<unsigned>(servers - 1));  // the logarithm, rounded up
    ns += rounds * rates.network_ns + 1e9 * across.share * bytes / inside / rates.network;
  }
  return ns;
}

namespace {

// Puts `ns` of work on a stream: one launch of the host. Returns what it takes on this device.
uint64_t run_on_paper(const SimOp& op, double ns) {
  const int physical = sim_physical(op.device);
  if (physical < 0) return 0;
  const auto took = static_cast<uint64_t>(slowness(physical) * ns);
  Moment start;
  sim::Stream* stream = sim::stream_of(op.stream, op.device);
  {
    std::lock_guard<std::mutex> lock(mutex);
    launch(false);
    settle(stream->paper);
    Moment& clock = stream->paper.at;
    reach(clock, host_clock);
    start = clock;
    clock.ns += took;
    clock.alone_ns += took;
    clock.shown_ns += took;
    reach(device_clock[op.device], clock);
  }
  SimDevice& row = sim_segment()->device[physical];
  __atomic_fetch_add(&row.busy_ns, op.host_ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&row.paper_ns, took, __ATOMIC_RELAXED);
  sim::report_op(op, physical, stream->id, start.ns, took);
  if (sim_profiling() != 0) sim::profile_op(op, physical, stream->id, start.shown_ns, took);
  return took;
}

}  // namespace

extern "C" uint64_t sim_paper_op(const SimOp* op) {
  return run_on_paper(*op, sim_operator_ns(op->unit, op->flops, static_cast<double>(op->bytes)));
}

void sim::paper_graph(int device, void* stream, const std::vector<SimWork>& work, uint64_t host_ns) {
  SimOp whole{"aclmdlRIExecuteAsync", "", device, stream, SIM_VECTOR, 0, 0, host_ns};
  double ns = 0;
  for (const SimWork& one : work) {
    ns += sim_operator_ns(one.unit, one.flops, static_cast<double>(one.bytes));
    whole.flops += one.flops;
    whole.bytes += one.bytes;
  }
  run_on_paper(whole, ns);
}

extern "C" void* sim_paper_launch(int device, void* handle) {
  sim::Stream* stream = sim::stream_of(handle, device);
  auto* launched = new Launched{device, stream, stream->id, {}, std::make_shared<sim::Meeting>(), {}};
  if (sim_profiling() != 0) launched->profiled = sim::profile_launch();
  std::lock_guard<std::mutex> lock(mutex);
  launch(true);
  reach(stream->paper.at, host_clock);
  launched->ready = stream->paper;
  stream->paper.after = {launched->meeting};
  return launched;
}

extern "C" void sim_paper_group(void* handle, const char* communicator, int type) {
  sim::ProfiledLaunch& profiled = static_cast<Launched*>(handle)->profiled;
  if (profiled.thread == 0) return;
  profiled.communicator = communicator;
  profiled.type = type;
}

extern "C" uint64_t sim_paper_ready(void* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  return settle(static_cast<Launched*>(handle)->ready).ns;
}

extern "C" void sim_paper_collective(void* handle, enum SimCollective kind, uint64_t bytes, int ranks, bool on_card,
                                     uint64_t start_ns, uint64_t host_ns) {
  const std::unique_ptr<Launched> launched(static_cast<Launched*>(handle));
  const int physical = sim_physical(launched->device);
  const auto took = static_cast<uint64_t>(slowness(physical) * sim_collective_ns(kind, static_cast<double>(bytes), ranks, on_card));
  uint64_t ready, start, shown;
  {
    std::lock_guard<std::mutex> lock(mutex);
    Moment end = settle(launched->ready);
    ready = end.ns;
    start = std::max(ready, start_ns);
    end.ns = start + took;
    // The ranks have met just now; the wait for the others is host time, which the profile does not show as the device's.
    shown = launched->profiled.thread == 0 ? end.shown_ns : std::max(end.shown_ns, sim::profile_clock_ns());
    end.shown_ns = shown + took;
    launched->meeting->end = end;
    launched->meeting->over = true;
    reach(device_clock[launched->device], end);
  }
  SimDevice& row = sim_segment()->device[physical];
  __atomic_fetch_add(&row.busy_ns, host_ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&row.paper_ns, took, __ATOMIC_RELAXED);
  sim::report_collective(kind, physical, launched->stream_id, {0, bytes, took, host_ns}, start, start - ready);
  if (launched->profiled.thread != 0)
    sim::profile_collective(launched->profiled, kind, physical, launched->stream_id, bytes, ranks, shown, took, start - ready);
}

extern "C" void sim_paper_failed(void* handle) {
  const std::unique_ptr<Launched> launched(static_cast<Launched*>(handle));
  std::lock_guard<std::mutex> lock(mutex);
  launched->meeting->end = settle(launched->ready);
  launched->meeting->over = true;
}

namespace sim {

void paper_wait_device(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (device >= 0 && device < SIM_MAX_DEVICES) reach(host_clock, device_clock[device]);
}

void paper_wait_until(Mark mark) {
  std::lock_guard<std::mutex> lock(mutex);
  reach(host_clock, settle(mark));
}

Mark paper_record(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  settle(stream->paper);
  Mark mark = stream->paper;
  reach(mark.at, host_clock);
  return mark;
}

void paper_stream_wait(Stream* stream, const Mark& mark) {
  std::lock_guard<std::mutex> lock(mutex);
  reach(stream->paper.at, mark.at);
  auto& after = stream->paper.after;
  for (const auto& meeting : mark.after)  // once each: streams that wait for each other in turn would double the list
    if (std::find(after.begin(), after.end(), meeting) == after.end()) after.push_back(meeting);
  settle(stream->paper);
}

uint64_t paper_of(Mark mark) {
  std::lock_guard<std::mutex> lock(mutex);
  return settle(mark).ns;
}

uint64_t paper_shown(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  settle(stream->paper);
  return stream->paper.at.shown_ns;
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
