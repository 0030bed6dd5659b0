// How the ranks of one communicator reach each other: a byte stream from every rank to every other, never blocking. Two kinds:
// shared memory when all ranks live on one simulated machine, TCP otherwise. One thread at a time uses a mesh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hccl_sim {

struct Wanted {
  int peer;
  bool out;  // room to send, or something to receive
};

class Mesh {
 public:
  virtual ~Mesh() = default;
  // Bytes moved, 0 when there is no room or nothing there.
  virtual size_t push(int peer, const char* data, size_t bytes) = 0;
  virtual size_t pull(int peer, char* data, size_t bytes) = 0;
  // Wakes the peers that the last pushes and pulls concern.
  virtual void flush() = 0;
  // To be taken before trying: wait() returns at once when something happened since.
  virtual uint32_t ticket() = 0;
  virtual void wait(uint32_t ticket, const std::vector<Wanted>& wanted, int milliseconds) = 0;
  // True when the peer's process has ended, or its connection.
  virtual bool gone(int peer) = 0;
  // The rank that gave up, -1: none; and giving up.
  virtual int failed() = 0;
  virtual void fail() = 0;
};

// A rank as the others know it.
struct Member {
  int32_t pid;
  int32_t device;   // physical number
  uint64_t started; // field 22 of /proc/PID/stat
  char machine[96]; // name and birth of the segment: equal on one simulated machine
  char segment[64];
  uint16_t port;
  uint16_t addresses;
  char address[6][46];  // text, the most likely one first
};

using Id = std::string;  // 16 random bytes

// Makes (once, by the root) and opens the shared memory of a communicator. Errors are thrown as Failure.
void create_memory(const std::string& name, int ranks);
std::unique_ptr<Mesh> open_memory(const std::string& name, int rank, const std::vector<Member>& members);
// Connects all ranks with each other within the time.
std::unique_ptr<Mesh> connect_sockets(const Id& id, int rank, const std::vector<Member>& members, uint64_t deadline_ns);

// 0 when the process has ended (also when nobody has waited for it yet).
uint64_t start_of(int pid);

}  // namespace hccl_sim
