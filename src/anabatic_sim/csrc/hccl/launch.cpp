// From the call to the stream: order within a communicator, faults, counters.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <deque>
#include <string>
#include <unordered_map>

#include "../sim.h"
#include "comm.h"
#include "dtype.h"

namespace hccl_sim {

namespace {

// How long HcclCommDestroy waits for work under way before it ends it.
constexpr auto kGrace = std::chrono::seconds(3);

struct Job {
  std::shared_ptr<Comm> comm;
  Operation operation;
  void* paper;  // sim_paper_launch
};
struct Grouped {
  HcclComm comm;
  Operation operation;
  aclrtStream stream;
};

thread_local int group_depth = 0;
thread_local std::vector<Grouped> group;

uint64_t volume(const Comm& comm, const Operation& operation) {
  const size_t bytes = size_of(operation.type);
  auto sum = [](const std::vector<uint64_t>& counts) {
    uint64_t total = 0;
    for (uint64_t count : counts) total += count;
    return total;
  };
  uint64_t elements = operation.count;
  if (operation.kind == Kind::BatchSendRecv) {
    uint64_t total = 0;
    for (const auto& item : operation.items) total += item.count * size_of(item.dataType);
    return total;
  }
  if (operation.kind == Kind::Scatter) elements *= static_cast<uint64_t>(comm.ranks);
  if (!operation.send_counts.empty() || !operation.receive_counts.empty())
    elements = std::max(sum(operation.send_counts), sum(operation.receive_counts));
  return elements * bytes;
}

SimCollective on_paper(Kind kind) {
  switch (kind) {
    case Kind::AllReduce: return SIM_ALL_REDUCE;
    case Kind::AllGather:
    case Kind::AllGatherV: return SIM_ALL_GATHER;
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV: return SIM_REDUCE_SCATTER;
    case Kind::Broadcast: return SIM_BROADCAST;
    case Kind::Reduce: return SIM_REDUCE;
    case Kind::Scatter: return SIM_SCATTER;
    case Kind::Send:
    case Kind::BatchSendRecv: return SIM_SEND;
    case Kind::Receive: return SIM_RECEIVE;
    case Kind::Barrier: return SIM_BARRIER;
    default: return SIM_ALL_TO_ALL;
  }
}

void strike_faults(const Comm& comm, const Operation& operation) {
  SimDevice& device = sim_segment()->device[comm.physical];
  if (sim_fault(SIM_FAULT_LINK_DOWN, comm.physical) != 0) __atomic_store_n(&device.link_down, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&device.link_down, __ATOMIC_SEQ_CST) != 0 && comm.ranks > 1) {
    const Member& me = comm.members[static_cast<size_t>(comm.rank)];
    const int other = comm.rank == 0 ? 1 : 0;
    const Member& peer = comm.members[static_cast<size_t>(other)];
    throw Failure{kLinkError, HCCL_E_REMOTE,
                  format("EI0013: %s Execution Error ROCE CQE(EI0013): An error CQE occurred during operator execution. Local information: "
                         "server %s, device ID %d, device IP %s. Peer information: server %s, device ID %d, device IP %s.\n        Possible "
                         "Cause: 1. The network between two devices is abnormal. For example, the network port is intermittently disconnected. "
                         "2. The peer process exits abnormally in advance. (link down on purpose: --fault)",
                         stamp().c_str(), me.address[0], me.device, me.address[0], peer.address[0], peer.device, peer.address[0])};
  }
  const int code = sim_fault(SIM_FAULT_HCCL, comm.physical);
  if (code != 0)
    throw Failure{code, HCCL_E_TIMEOUT,
                  notify_timeout(comm, operation, comm.ranks > 1 ? (comm.rank + 1) % comm.ranks : -1, "Stuck Occurred",
                                 "1.Host process is stuck, 2.Device task is stuck (on purpose: --fault)")};
}

// The two ranks are the dies of one card.
bool on_card(const Comm& comm) {
  return comm.members.size() == 2 && strcmp(comm.members[0].machine, comm.members[1].machine) == 0 &&
         comm.members[0].device / 2 == comm.members[1].device / 2;
}

// Data leave a slow link late, so that all wait for them, or arrive late, which only this rank notices.
void delay(const Comm& comm, bool is_now) {
  const uint64_t late = comm.ranks > 1 ? sim_link_delay_ns(comm.physical) : 0;
  if (late > 0 && is_now) usleep(static_cast<useconds_t>(late / 1000));
}

bool only_receives(const Comm& comm, const Operation& operation) {
  return operation.kind == Kind::Receive ||
         ((operation.kind == Kind::Broadcast || operation.kind == Kind::Scatter) && comm.rank != operation.root);
}

int execute(void* argument, char* text, size_t room) {
  const std::unique_ptr<Job> job(static_cast<Job*>(argument));
  Comm& comm = *job->comm;
  {
    std::unique_lock<std::mutex> lock(comm.mutex);
    comm.changed.wait(lock, [&] { return comm.finished == job->operation.number; });
  }
  int code = 0;
  const uint64_t started = sim_clock_ns();
  try {
    if (text == nullptr) throw Failure{kException, HCCL_E_UNAVAIL, ""};  // earlier work of the stream failed
    if (comm.broken) throw *comm.broken;
    if (comm.aborted) throw destroyed(comm);
    strike_faults(comm, job->operation);
    comm.ready_ns = comm.latest_ns = sim_paper_ready(job->paper);
    const bool receives = only_receives(comm, job->operation);
    delay(comm, !receives);
    if (comm.ranks > 1 && !receives) comm.ready_ns = comm.latest_ns = comm.ready_ns + sim_link_delay_ns(comm.physical);
    run(comm, job->operation);
    delay(comm, receives);
    sim_paper_collective(job->paper, on_paper(job->operation.kind), volume(comm, job->operation), comm.ranks, on_card(comm),
                         comm.latest_ns, sim_clock_ns() - started);
  } catch (const Failure& failure) {
    sim_paper_failed(job->paper);
    code = failure.acl != 0 ? failure.acl : kException;
    if (text != nullptr) snprintf(text, room, "%s", failure.text.c_str());
    std::lock_guard<std::mutex> lock(comm.mutex);
    if (!comm.broken) comm.broken = std::make_unique<Failure>(failure);
    if (failure.result == HCCL_E_REMOTE) comm.async_error = HCCL_E_REMOTE;
    if (comm.mesh) comm.mesh->fail();
  }
  std::lock_guard<std::mutex> lock(comm.mutex);
  comm.finished++;
  comm.changed.notify_all();
  return code;
}

// The mutex of the communicator is held until the work is on its stream: both have the same order.
Job* prepare(const std::shared_ptr<Comm>& comm, Operation operation, aclrtStream stream) {
  SimDevice& device = sim_segment()->device[comm->physical];
  __atomic_fetch_add(&device.collectives, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&device.collective_bytes, volume(*comm, operation), __ATOMIC_RELAXED);
  auto* job = new Job{comm, std::move(operation), sim_paper_launch(comm->logical, stream)};
  sim_paper_group(job->paper, comm->name.c_str(), static_cast<int>(job->operation.type));
  job->operation.number = comm->launched++;
  return job;
}

void enqueue(std::shared_ptr<Comm> comm, Operation operation, aclrtStream stream) {
  std::lock_guard<std::mutex> lock(comm->mutex);
  sim_enqueue(stream, execute, prepare(comm, std::move(operation), stream));
}

// A collective of a graph: each launch of the graph takes the next place in the order of the communicator.
struct Captured {
  std::shared_ptr<Comm> comm;
  Operation operation;
  std::deque<Job*> launched;  // guarded by the communicator's mutex
};

void capture(void* graph, std::shared_ptr<Comm> comm, Operation operation) {
  const std::string name = std::string("Hccl") + name_of(operation.kind);
  sim_capture_launch(
      graph, name.c_str(),
      [](void* argument, void* stream) {
        auto* captured = static_cast<Captured*>(argument);
        std::lock_guard<std::mutex> lock(captured->comm->mutex);
        captured->launched.push_back(prepare(captured->comm, captured->operation, stream));
      },
      [](void* argument, char* text, size_t room) {
        auto* captured = static_cast<Captured*>(argument);
        Job* job;
        {
          std::lock_guard<std::mutex> lock(captured->comm->mutex);
          job = captured->launched.front();
          captured->launched.pop_front();
        }
        return execute(job, text, room);
      },
      [](void* argument) { delete static_cast<Captured*>(argument); }, new Captured{std::move(comm), std::move(operation), {}});
}

}  // namespace

void begin_group() { group_depth++; }

// A group is one operation to its members: sends and receives that follow each other on a communicator run together.
HcclResult end_group() {
  if (group_depth == 0) return refuse(HCCL_E_PARA, "EI0003: HcclGroupEnd without HcclGroupStart");
  if (--group_depth > 0) return HCCL_SUCCESS;
  std::vector<Grouped> calls;
  calls.swap(group);
  for (size_t i = 0; i < calls.size();) {
    auto single = [](const Operation& operation) { return operation.kind == Kind::Send || operation.kind == Kind::Receive; };
    if (!single(calls[i].operation)) {
      const HcclResult result = launch(calls[i].comm, std::move(calls[i].operation), calls[i].stream);
      if (result != HCCL_SUCCESS) return result;
      i++;
      continue;
    }
    Operation together{Kind::BatchSendRecv};
    size_t last = i;
    for (; last < calls.size() && single(calls[last].operation) && calls[last].comm == calls[i].comm && calls[last].stream == calls[i].stream;
         last++) {
      const Operation& one = calls[last].operation;
      const bool out = one.kind == Kind::Send;
      together.items.push_back({out ? HCCL_SEND : HCCL_RECV, out ? const_cast<char*>(one.from) : one.to, one.count, one.type,
                                static_cast<uint32_t>(one.root)});
    }
    const HcclResult result = launch(calls[i].comm, std::move(together), calls[i].stream);
    if (result != HCCL_SUCCESS) return result;
    i = last;
  }
  return HCCL_SUCCESS;
}

HcclResult launch(HcclComm handle, Operation operation, aclrtStream stream) {
  if (group_depth > 0) {
    group.push_back({handle, std::move(operation), stream});
    return HCCL_SUCCESS;
  }
  auto comm = comm_of(handle);
  if (!comm)
    return refuse(HCCL_E_PTR, format("EI0003: %s Invalid_Argument(EI0003): In [Hccl%s], value [nullptr] for parameter [comm] is "
                                     "invalid.", stamp().c_str(), name_of(operation.kind)));
  if (void* graph = sim_capture(stream)) capture(graph, std::move(comm), std::move(operation));
  else enqueue(std::move(comm), std::move(operation), stream);
  return HCCL_SUCCESS;
}

void close(Comm& comm) {
  std::unique_lock<std::mutex> lock(comm.mutex);
  const auto idle = [&] { return comm.finished == comm.launched; };
  comm.changed.wait_for(lock, kGrace, idle);
  comm.aborted = true;
}

}  // namespace hccl_sim
