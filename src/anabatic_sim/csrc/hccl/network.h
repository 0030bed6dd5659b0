// Sockets: this process's one listener, its addresses, and messages of fixed size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mesh.h"

namespace hccl_sim {

// What everybody who connects says first.
struct Hello {
  uint64_t magic;
  char id[16];    // of the communicator
  int32_t kind;   // kJoin: to the root, kLink: one rank to another
  int32_t rank;
  int32_t ranks;
  int32_t pad;
  Member member;
};
constexpr uint64_t kHelloMagic = 0x4848434353494d31;
enum { kJoin = 1, kLink = 2 };

// Addresses at which this machine may be reached, the most likely one first (HCCL_IF_IP, HCCL_SOCKET_IFNAME). Throws a Failure
// when they name something that does not exist.
std::vector<std::string> addresses();
// A connected socket that has said `hello` and been accepted, -1 when none of the member's addresses answers in time.
int reach(const Member& member, const Hello& hello, bool same_machine, uint64_t deadline_ns);
// Blocking, with a deadline; false when the other side went away or the time is over.
bool send_all(int fd, const void* data, size_t bytes, uint64_t deadline_ns);
bool receive_all(int fd, void* data, size_t bytes, uint64_t deadline_ns);
// Closed in a forked child: else a dead rank's connections would live on in its data loader.
void remember(int fd);
void forget(int fd);
int poll_ms(uint64_t deadline_ns, int most);

}  // namespace hccl_sim
