// A communicator, and what travels through it.
#pragma once

#include <hccl/hccl.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "failure.h"
#include "mesh.h"
#include "rendezvous.h"

namespace hccl_sim {

struct Comm : std::enable_shared_from_this<Comm> {
  std::string name;
  int rank = 0, ranks = 1;
  int logical = 0, physical = 0;  // the device it was made on
  double execute_timeout = 0;     // seconds, 0: never
  void* buffers = nullptr;        // device memory that is counted and never touched
  std::unique_ptr<Mesh> mesh;     // none for a single rank
  std::vector<Member> members;
  Root root;                      // sub-communicators are derived from it
  std::atomic<bool> aborted{false};
  std::atomic<int> async_error{HCCL_SUCCESS};
  std::vector<char> scratch;      // for reductions, kept between calls
  std::unique_ptr<Failure> broken;  // what ended it: its byte streams no longer agree

  // Operations run in the order in which they were launched, whatever their streams do.
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t launched = 0, finished = 0;
  uint64_t ready_ns = 0, latest_ns = 0;  // on paper, of the operation that runs: this rank's and the latest of all
};

enum class Kind : uint32_t {
  AllReduce, Broadcast, AllGather, AllGatherV, ReduceScatter, ReduceScatterV, Reduce, Scatter, AlltoAll, AlltoAllV, AlltoAllVC,
  Send, Receive, BatchSendRecv, Barrier
};
const char* name_of(Kind kind);

// One launched operation. Counts are elements; `counts` and `displacements` belong to the side that has one block per rank.
struct Operation {
  Kind kind;
  HcclDataType type = HCCL_DATA_TYPE_INT8;
  HcclReduceOp op = HCCL_REDUCE_SUM;
  int root = 0;  // or the peer
  const char* from = nullptr;
  char* to = nullptr;
  uint64_t count = 0;
  std::vector<uint64_t> send_counts, send_offsets, receive_counts, receive_offsets;
  std::vector<HcclSendRecvItem> items;
  uint64_t number = 0;  // of the communicator's operations
};

// Runs the operation on this thread. Throws a Failure.
void run(Comm& comm, Operation& operation);
// Puts it on the stream; between HcclGroupStart and HcclGroupEnd, of this thread, when the group ends.
HcclResult launch(HcclComm comm, Operation operation, aclrtStream stream);
void begin_group();
HcclResult end_group();
// The communicator of a handle, none when there is no such.
std::shared_ptr<Comm> comm_of(HcclComm handle);
// Waits for what was launched, then ends what does not end.
void close(Comm& comm);

// Byte streams to and from the peers, all at once, so that no order of the ranks can block.
class Exchange {
 public:
  Exchange(Comm& comm, const Operation& operation);
  // The first transfer with a peer: both sides say what they are about to do, and a difference is an error (EI0005).
  void greet(int peer, bool both = true);
  void greet(int peer, Kind kind, uint64_t count, bool out);
  void send(int peer, const void* data, size_t bytes);
  void receive(int peer, void* data, size_t bytes);
  void run();

 private:
  struct Header {
    uint32_t magic, kind, type, op;
    uint32_t root, pad;
    uint64_t count, digest;
    uint64_t ready_ns;  // on paper: the last rank to be ready decides; not compared
  };
  struct Piece {
    char* at;
    size_t left;
    std::unique_ptr<Header> header;  // received into, then compared
    std::unique_ptr<Header> expected;
  };
  struct Lane {
    std::vector<Piece> pieces;
    size_t next = 0;
  };
  Header header(Kind kind, uint64_t count) const;
  bool advance(int peer, Lane& lane, bool out);
  void compare(int peer, const Header& mine, const Header& theirs);
  void check(std::vector<Wanted>& wanted);
  [[noreturn]] void lost(int peer, const char* type, const char* reason);

  Comm& comm_;
  const Operation& operation_;
  uint64_t next_check_ns_ = 0, stuck_since_ns_ = 0;
  std::vector<Lane> out_, in_;
};

// What work is told that is still under way when its communicator is destroyed.
Failure destroyed(const Comm& comm);
// The text of EI0002 with everything that HCCL puts into it.
std::string notify_timeout(const Comm& comm, const Operation& operation, int peer, const char* type, const char* reason);

}  // namespace hccl_sim
