// The collectives, as transfers between pairs of ranks. Reductions go through the owner of a slice, who adds the ranks' parts in
// the order of their numbers: every rank gets the same bits, and every run too.
#include <string.h>

#include <algorithm>

#include "comm.h"
#include "dtype.h"

namespace hccl_sim {

namespace {

constexpr size_t kScratch = 8 << 20;  // bytes that a rank holds of the others' parts at a time

struct Run {
  Comm& comm;
  Operation& operation;
  Exchange exchange;
  size_t bytes;  // of an element
  int rank, ranks;

  template <typename Function>
  void each_peer(Function function) {
    for (int peer = 0; peer < ranks; peer++)
      if (peer != rank) function(peer);
  }
  void greet_all() {
    each_peer([&](int peer) { exchange.greet(peer); });
  }
};

void copy(char* to, const char* from, size_t bytes) {
  if (to != from && bytes > 0) memmove(to, from, bytes);
}

// The part of `block` elements that piece `index` of `parts` has.
struct Slice {
  uint64_t begin, count;
};
Slice slice_of(uint64_t block, int parts, int index) {
  const uint64_t each = (block + static_cast<uint64_t>(parts) - 1) / static_cast<uint64_t>(parts);
  const uint64_t begin = std::min(block, each * static_cast<uint64_t>(index));
  return {begin, std::min(each, block - begin)};
}

// Adds `parts` (one per rank, mine among them) in rank order into `to`.
void combine(const Run& run, const std::vector<const char*>& parts, char* to, uint64_t count) {
  const HcclDataType type = run.operation.type;
  const size_t total = count * run.bytes;
  if (to != parts[0] && run.rank != 0 && to == parts[static_cast<size_t>(run.rank)]) {
    // My own part lies where the result goes: it must not be overwritten before its turn.
    char* spare = run.comm.scratch.data() + total * static_cast<size_t>(run.ranks - 1);
    memcpy(spare, parts[0], total);
    for (int peer = 1; peer < run.ranks; peer++) reduce(type, run.operation.op, spare, parts[static_cast<size_t>(peer)], count);
    memcpy(to, spare, total);
    return;
  }
  copy(to, parts[0], total);
  for (int peer = 1; peer < run.ranks; peer++) reduce(type, run.operation.op, to, parts[static_cast<size_t>(peer)], count);
}

// Every rank gives its part of my slice, I give mine of theirs; `mine(peer)` is where I keep the part that peer owns.
// The sum of my slice goes to `to`.
template <typename Where>
void reduce_slices(Run& run, Where mine, char* to, const std::vector<Slice>& slices) {
  const Slice own = slices[static_cast<size_t>(run.rank)];
  const size_t total = own.count * run.bytes;
  run.comm.scratch.resize(std::max(run.comm.scratch.size(), total * static_cast<size_t>(run.ranks)));
  std::vector<const char*> parts(static_cast<size_t>(run.ranks));
  size_t used = 0;
  for (int peer = 0; peer < run.ranks; peer++) {
    if (peer == run.rank) {
      parts[static_cast<size_t>(peer)] = mine(peer);
      continue;
    }
    parts[static_cast<size_t>(peer)] = run.comm.scratch.data() + total * used++;
    run.exchange.receive(peer, const_cast<char*>(parts[static_cast<size_t>(peer)]), total);
    run.exchange.send(peer, mine(peer), slices[static_cast<size_t>(peer)].count * run.bytes);
  }
  run.exchange.run();
  if (own.count > 0) combine(run, parts, to, own.count);
}

uint64_t segment_elements(const Run& run) { return std::max<uint64_t>(1, kScratch / run.bytes / static_cast<uint64_t>(run.ranks)); }

// AllReduce, and Reduce when `root` is a rank.
void all_reduce(Run& run, int root) {
  Operation& operation = run.operation;
  run.greet_all();
  const uint64_t step = segment_elements(run) * static_cast<uint64_t>(run.ranks);
  std::vector<char> own;
  for (uint64_t begin = 0; begin == 0 || begin < operation.count; begin += step) {
    const uint64_t count = std::min(step, operation.count - begin);
    std::vector<Slice> slices;
    for (int peer = 0; peer < run.ranks; peer++) slices.push_back(slice_of(count, run.ranks, peer));
    auto at = [&](const void* base, int peer) {
      return static_cast<char*>(const_cast<void*>(base)) + (begin + slices[static_cast<size_t>(peer)].begin) * run.bytes;
    };
    const Slice mine = slices[static_cast<size_t>(run.rank)];
    // Only the root of a Reduce may write to its result.
    char* sum = at(operation.to, run.rank);
    if (root >= 0 && root != run.rank) {
      own.resize(mine.count * run.bytes);
      sum = own.data();
    }
    reduce_slices(run, [&](int peer) { return at(operation.from, peer); }, sum, slices);
    run.each_peer([&](int peer) {
      if (root < 0 || peer == root) run.exchange.send(peer, sum, mine.count * run.bytes);
      if (root < 0 || run.rank == root) run.exchange.receive(peer, at(operation.to, peer), slices[static_cast<size_t>(peer)].count * run.bytes);
    });
    run.exchange.run();
  }
}

void reduce_scatter(Run& run) {
  Operation& operation = run.operation;
  run.greet_all();
  uint64_t longest = 0;
  for (uint64_t count : operation.send_counts) longest = std::max(longest, count);
  const uint64_t step = segment_elements(run);
  for (uint64_t begin = 0; begin == 0 || begin < longest; begin += step) {
    std::vector<Slice> slices;
    for (uint64_t count : operation.send_counts) slices.push_back({begin, begin < count ? std::min(step, count - begin) : 0});
    reduce_slices(
        run,
        [&](int peer) {
          return operation.from + (operation.send_offsets[static_cast<size_t>(peer)] + slices[static_cast<size_t>(peer)].begin) * run.bytes;
        },
        operation.to + begin * run.bytes, slices);
  }
}

// Everybody sends one block to everybody: `send_counts` per receiver, `receive_counts` per sender; 0 elements is no block.
void all_to_all(Run& run) {
  Operation& operation = run.operation;
  auto from = [&](int peer) { return operation.from + operation.send_offsets[static_cast<size_t>(peer)] * run.bytes; };
  auto to = [&](int peer) { return operation.to + operation.receive_offsets[static_cast<size_t>(peer)] * run.bytes; };
  run.each_peer([&](int peer) {
    const auto index = static_cast<size_t>(peer);
    if (operation.kind == Kind::AllGatherV) {
      run.exchange.greet(peer);  // the digest of all counts is compared
    } else {
      run.exchange.greet(peer, operation.kind, operation.send_counts[index], true);
      run.exchange.greet(peer, operation.kind, operation.receive_counts[index], false);
    }
    run.exchange.send(peer, from(peer), operation.send_counts[index] * run.bytes);
    run.exchange.receive(peer, to(peer), operation.receive_counts[index] * run.bytes);
  });
  run.exchange.run();
  copy(to(run.rank), from(run.rank), operation.send_counts[static_cast<size_t>(run.rank)] * run.bytes);
}

void broadcast(Run& run) {
  const size_t total = run.operation.count * run.bytes;
  const int root = run.operation.root;
  run.each_peer([&](int peer) {
    if (run.rank != root && peer != root) return;
    run.exchange.greet(peer);
    if (run.rank == root) run.exchange.send(peer, run.operation.to, total);
    else run.exchange.receive(peer, run.operation.to, total);
  });
  run.exchange.run();
}

void scatter(Run& run) {
  const size_t total = run.operation.count * run.bytes;
  const int root = run.operation.root;
  run.each_peer([&](int peer) {
    if (run.rank != root && peer != root) return;
    run.exchange.greet(peer);
    if (run.rank == root) run.exchange.send(peer, run.operation.from + total * static_cast<size_t>(peer), total);
    else run.exchange.receive(peer, run.operation.to, total);
  });
  run.exchange.run();
  if (run.rank == root) copy(run.operation.to, run.operation.from + total * static_cast<size_t>(root), total);
}

// The sender ends when the receiver has begun, as on a device: two ranks that both send first never meet.
void send_or_receive(Run& run) {
  const bool sends = run.operation.kind == Kind::Send;
  const int peer = run.operation.root;
  run.exchange.greet(peer, run.operation.kind, run.operation.count, true);
  run.exchange.greet(peer, sends ? Kind::Receive : Kind::Send, run.operation.count, false);
  if (sends) run.exchange.send(peer, run.operation.from, run.operation.count * run.bytes);
  else run.exchange.receive(peer, run.operation.to, run.operation.count * run.bytes);
  run.exchange.run();
}

void batch(Run& run) {
  std::vector<const HcclSendRecvItem*> to_self;
  for (const HcclSendRecvItem& item : run.operation.items) {
    const int peer = static_cast<int>(item.remoteRank);
    const size_t total = item.count * size_of(item.dataType);
    const bool out = item.sendRecvType == HCCL_SEND;
    if (peer == run.rank) {
      if (out) to_self.push_back(&item);
      continue;
    }
    run.exchange.greet(peer, Kind::BatchSendRecv, total, out);
    if (out) run.exchange.send(peer, item.buf, total);
    else run.exchange.receive(peer, item.buf, total);
  }
  run.exchange.run();
  size_t next = 0;
  for (const HcclSendRecvItem& item : run.operation.items)
    if (static_cast<int>(item.remoteRank) == run.rank && item.sendRecvType == HCCL_RECV && next < to_self.size()) {
      const HcclSendRecvItem* source = to_self[next++];
      copy(static_cast<char*>(item.buf), static_cast<const char*>(source->buf), std::min(item.count, source->count) * size_of(item.dataType));
    }
}

void alone(Run& run) {
  Operation& operation = run.operation;
  switch (operation.kind) {
    case Kind::BatchSendRecv: return batch(run);
    case Kind::Broadcast:
    case Kind::Barrier: return;
    case Kind::Send:
    case Kind::Receive: throw Failure{kException, HCCL_E_PARA, "EI0003: a rank cannot send to itself"};
    default: break;
  }
  const uint64_t count = operation.send_counts.empty() ? operation.count : operation.send_counts[0];
  const uint64_t from = operation.send_offsets.empty() ? 0 : operation.send_offsets[0];
  const uint64_t to = operation.receive_offsets.empty() ? 0 : operation.receive_offsets[0];
  copy(operation.to + to * run.bytes, operation.from + from * run.bytes, count * run.bytes);
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"AllReduce", "Broadcast", "AllGather", "AllGatherV", "ReduceScatter", "ReduceScatterV", "Reduce", "Scatter",
                                   "AlltoAll", "AlltoAllV", "AlltoAllVC", "Send", "Receive", "BatchSendRecv", "Barrier"};
  return static_cast<uint32_t>(kind) < sizeof names / sizeof *names ? names[static_cast<uint32_t>(kind)] : "unknown";
}

void run(Comm& comm, Operation& operation) {
  Run run{comm, operation, Exchange(comm, operation), size_of(operation.type), comm.rank, comm.ranks};
  if (comm.ranks == 1) return alone(run);
  switch (operation.kind) {
    case Kind::AllReduce: return all_reduce(run, -1);
    case Kind::Reduce: return all_reduce(run, operation.root);
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV: return reduce_scatter(run);
    case Kind::Broadcast: return broadcast(run);
    case Kind::Scatter: return scatter(run);
    case Kind::Send:
    case Kind::Receive: return send_or_receive(run);
    case Kind::BatchSendRecv: return batch(run);
    case Kind::Barrier: run.greet_all(); return run.exchange.run();
    default: return all_to_all(run);
  }
}

}  // namespace hccl_sim
