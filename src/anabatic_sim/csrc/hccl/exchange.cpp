#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "../sim.h"
#include "comm.h"
#include "dtype.h"

namespace hccl_sim {

namespace {
constexpr uint32_t kMagic = 0x48434c48;
constexpr const char *kLost = "Heartbeat Lost Occurred", *kExited = "1. Process has exited, 2. Network Disconnected";
constexpr uint64_t kCheckEvery = 100000000;  // ns between looks at the peers' processes
}  // namespace

Exchange::Exchange(Comm& comm, const Operation& operation)
    : comm_(comm), operation_(operation), out_(comm.members.size()), in_(comm.members.size()) {}

Exchange::Header Exchange::header(Kind kind, uint64_t count) const {
  uint64_t digest = 0;
  if (kind == Kind::AllGatherV)
    for (uint64_t value : operation_.receive_counts) digest = digest * 1000003 + value;
  if (kind == Kind::ReduceScatterV)
    for (uint64_t value : operation_.send_counts) digest = digest * 1000003 + value;
  return {kMagic, static_cast<uint32_t>(kind), static_cast<uint32_t>(operation_.type), static_cast<uint32_t>(operation_.op),
          static_cast<uint32_t>(kind == Kind::Send || kind == Kind::Receive || kind == Kind::BatchSendRecv ? 0 : operation_.root), 0,
          count, digest, comm_.ready_ns};
}

void Exchange::greet(int peer, bool both) {
  greet(peer, operation_.kind, operation_.count, true);
  if (both) greet(peer, operation_.kind, operation_.count, false);
}

void Exchange::greet(int peer, Kind kind, uint64_t count, bool out) {
  auto mine = std::make_unique<Header>(header(kind, count));
  Lane& lane = (out ? out_ : in_)[static_cast<size_t>(peer)];
  if (out) {
    lane.pieces.push_back({reinterpret_cast<char*>(mine.get()), sizeof(Header), nullptr, nullptr});
    lane.pieces.back().expected = std::move(mine);
  } else {
    auto theirs = std::make_unique<Header>();
    lane.pieces.push_back({reinterpret_cast<char*>(theirs.get()), sizeof(Header), nullptr, nullptr});
    lane.pieces.back().header = std::move(theirs);
    lane.pieces.back().expected = std::move(mine);
  }
}

void Exchange::send(int peer, const void* data, size_t bytes) {
  auto* from = const_cast<char*>(static_cast<const char*>(data));
  if (bytes > 0) out_[static_cast<size_t>(peer)].pieces.push_back({from, bytes, nullptr, nullptr});
}

void Exchange::receive(int peer, void* data, size_t bytes) {
  if (bytes > 0) in_[static_cast<size_t>(peer)].pieces.push_back({static_cast<char*>(data), bytes, nullptr, nullptr});
}

bool Exchange::advance(int peer, Lane& lane, bool out) {
  bool moved = false;
  while (lane.next < lane.pieces.size()) {
    Piece& piece = lane.pieces[lane.next];
    const size_t bytes = out ? comm_.mesh->push(peer, piece.at, piece.left) : comm_.mesh->pull(peer, piece.at, piece.left);
    moved |= bytes > 0;
    piece.at += bytes;
    piece.left -= bytes;
    if (piece.left > 0) break;
    if (piece.header) compare(peer, *piece.expected, *piece.header);
    lane.next++;
  }
  return moved;
}

void Exchange::compare(int peer, const Header& mine, const Header& theirs) {
  comm_.latest_ns = std::max(comm_.latest_ns, theirs.ready_ns);
  if (memcmp(&mine, &theirs, offsetof(Header, ready_ns)) == 0) return;
  const auto kind = [](const Header& header) { return name_of(static_cast<Kind>(header.kind)); };
  std::string what;
  if (theirs.magic != kMagic) {
    what = "parameter tag";
  } else if (theirs.kind == static_cast<uint32_t>(operation_.kind) && mine.kind != theirs.kind) {
    throw Failure{kTimeout, HCCL_E_TIMEOUT,
                  notify_timeout(comm_, operation_, peer, "Stuck Occurred",
                                 operation_.kind == Kind::Send
                                     ? "both ranks send first and would wait for each other for ever: use batch_isend_irecv"
                                     : "both ranks receive first and would wait for each other for ever")};
  } else if (mine.kind != theirs.kind) {
    what = format("parameter tag, local end %s, remote end %s", kind(mine), kind(theirs));
  } else if (mine.count != theirs.count) {
    what = format("parameter count, local end %llu, remote end %llu", static_cast<unsigned long long>(mine.count),
                  static_cast<unsigned long long>(theirs.count));
  } else if (mine.type != theirs.type) {
    what = format("parameter dataType, local end %s, remote end %s", name_of(static_cast<HcclDataType>(mine.type)),
                  name_of(static_cast<HcclDataType>(theirs.type)));
  } else if (mine.op != theirs.op) {
    what = format("parameter op, local end %s, remote end %s", name_of(static_cast<HcclReduceOp>(mine.op)),
                  name_of(static_cast<HcclReduceOp>(theirs.op)));
  } else if (mine.root != theirs.root) {
    what = format("parameter root, local end %u, remote end %u", mine.root, theirs.root);
  } else {
    what = "parameter counts";
  }
  throw Failure{kTimeout, HCCL_E_PARA,
                format("EI0005: %s The arguments for collective communication are inconsistent between ranks:%s (rank %d and rank %d, "
                       "operation %llu of group %s).\n        Possible Cause: the ranks do not run the same collectives in the same order "
                       "with the same shapes. A real NPU may wait until HCCL_EXEC_TIMEOUT instead (EI0002).",
                       stamp().c_str(), what.c_str(), comm_.rank, peer, static_cast<unsigned long long>(operation_.number),
                       comm_.name.c_str())};
}

Failure destroyed(const Comm& comm) {
  return {kException, HCCL_E_UNAVAIL,
          format("EI0012: %s SDMA task exception: group %s was destroyed.", stamp().c_str(), comm.name.c_str())};
}

std::string notify_timeout(const Comm& comm, const Operation& operation, int peer, const char* type, const char* reason) {
  char arrival[64];
  const time_t now = time(nullptr);
  tm local;
  localtime_r(&now, &local);
  strftime(arrival, sizeof arrival, "%a %b %d %H:%M:%S %Y", &local);
  std::string where;
  if (peer >= 0) {
    const Member &other = comm.members[static_cast<size_t>(peer)], &me = comm.members[static_cast<size_t>(comm.rank)];
    where = format("\nthere are(is) 1 abnormal device(s):\n        Cluster Exception Location[IP/ID]:[%s/%d], Arrival Time:[%s], "
                   "Discoverer:[%s/%d], ExceptionType:[%s], Possible Reason:%s\n",
                   other.address[0], other.device, arrival, me.address[0], me.device, type, reason);
  }
  const std::string remote = peer >= 0 ? std::to_string(peer) : "unknown";
  return format("EI0002: %s The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify "
                "record from remote rank: [%s]. base information: [taskID[%llu], tag[%s_%s], AlgType(level 0-1-2):[fullmesh-ring-NHR].]. task "
                "information: [%s]. group information: [group:[%s], user define information[], rankSize[%d], rankId[%d].]\n"
                "        Possible Cause: 1. An exception occurs during the execution on some NPUs in the cluster. As a result, collective "
                "communication operation failed. 2. The execution speed on some NPU in the cluster is too slow to complete a communication "
                "operation within the timeout interval (default 1836s, You can set the interval by using HCCL_EXEC_TIMEOUT.). 3. The number "
                "of training samples of each NPU is inconsistent.",
                stamp().c_str(), remote.c_str(), static_cast<unsigned long long>(operation.number), name_of(operation.kind), comm.name.c_str(),
                where.c_str(), comm.name.c_str(), comm.ranks, comm.rank);
}

void Exchange::lost(int peer, const char* type, const char* reason) {
  throw Failure{kTimeout, HCCL_E_REMOTE, notify_timeout(comm_, operation_, peer, type, reason)};
}

// Nothing moves: is there anybody left to wait for?
void Exchange::check(std::vector<Wanted>& wanted) {
  if (comm_.aborted) throw destroyed(comm_);
  const int failed = comm_.mesh->failed();
  if (failed >= 0) {
    // It may itself have failed because of a third one that is gone: that is the cause.
    for (int peer = 0; peer < comm_.ranks; peer++)
      if (peer != comm_.rank && comm_.mesh->gone(peer)) lost(peer, kLost, kExited);
    lost(failed, "Stuck Occurred", "1.Host process is stuck, 2.Device task is stuck (the rank's own operation failed)");
  }
  const uint64_t now = sim_clock_ns();
  if (now >= next_check_ns_) {
    next_check_ns_ = now + kCheckEvery;
    for (const Wanted& want : wanted) {
      if (!comm_.mesh->gone(want.peer)) continue;
      // What it wrote before it ended may have come meanwhile.
      auto& lane = (want.out ? out_ : in_)[static_cast<size_t>(want.peer)];
      if (advance(want.peer, lane, want.out)) return;
      lost(want.peer, kLost, kExited);
    }
  }
  if (stuck_since_ns_ == 0) stuck_since_ns_ = now;
  if (comm_.execute_timeout > 0 && static_cast<double>(now - stuck_since_ns_) >= comm_.execute_timeout * 1e9)
    throw Failure{kTimeout, HCCL_E_TIMEOUT,
                  notify_timeout(comm_, operation_, wanted.front().peer, "Stuck Occurred", "1.Host process is stuck, 2.Device task is stuck")};
}

void Exchange::run() {
  std::vector<Wanted> wanted;
  const int ranks = static_cast<int>(out_.size());
  for (;;) {
    const uint32_t ticket = comm_.mesh->ticket();
    bool moved = false;
    wanted.clear();
    // Each rank begins with another peer, so that they do not all press on the first.
    for (int step = 1; step < ranks; step++) {
      const int to = (comm_.rank + step) % ranks, from = (comm_.rank + ranks - step) % ranks;
      Lane &out = out_[static_cast<size_t>(to)], &in = in_[static_cast<size_t>(from)];
      moved |= advance(to, out, true);
      moved |= advance(from, in, false);
      if (out.next < out.pieces.size()) wanted.push_back({to, true});
      if (in.next < in.pieces.size()) wanted.push_back({from, false});
    }
    comm_.mesh->flush();
    if (wanted.empty()) break;
    if (moved) {
      stuck_since_ns_ = 0;
      continue;
    }
    check(wanted);
    comm_.mesh->wait(ticket, wanted, 50);
  }
  for (Lane& lane : out_) lane = {};
  for (Lane& lane : in_) lane = {};
}

}  // namespace hccl_sim
