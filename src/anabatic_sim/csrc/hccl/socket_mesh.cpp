// One TCP connection for every pair of ranks.
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../sim.h"
#include "failure.h"
#include "mesh.h"
#include "network.h"
#include "rendezvous.h"

namespace hccl_sim {

namespace {

class Sockets final : public Mesh {
 public:
  explicit Sockets(std::vector<int> fds) : fds_(std::move(fds)), closed_(fds_.size()) {}
  ~Sockets() override {
    for (int fd : fds_) {
      if (fd < 0) continue;
      forget(fd);
      close(fd);
    }
  }

  size_t push(int peer, const char* data, size_t bytes) override {
    return moved(peer, send(fds_[static_cast<size_t>(peer)], data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  size_t pull(int peer, char* data, size_t bytes) override {
    const ssize_t got = recv(fds_[static_cast<size_t>(peer)], data, bytes, MSG_DONTWAIT);
    if (got == 0) closed_[static_cast<size_t>(peer)] = true;
    return moved(peer, got);
  }
  void flush() override {}
  uint32_t ticket() override { return 0; }

  void wait(uint32_t, const std::vector<Wanted>& wanted, int milliseconds) override {
    std::vector<pollfd> polled;
    for (const Wanted& want : wanted)
      polled.push_back({fds_[static_cast<size_t>(want.peer)], static_cast<short>(want.out ? POLLOUT : POLLIN), 0});
    poll(polled.data(), polled.size(), milliseconds);
  }

  bool gone(int peer) override { return closed_[static_cast<size_t>(peer)]; }
  int failed() override { return -1; }  // who gives up closes its connections
  void fail() override {
    for (int fd : fds_)
      if (fd >= 0) shutdown(fd, SHUT_RDWR);
  }

 private:
  size_t moved(int peer, ssize_t bytes) {
    if (bytes < 0 && errno != EAGAIN && errno != EINTR) closed_[static_cast<size_t>(peer)] = true;
    return bytes > 0 ? static_cast<size_t>(bytes) : 0;
  }

  std::vector<int> fds_;
  std::vector<bool> closed_;
};

}  // namespace

std::unique_ptr<Mesh> connect_sockets(const Id& id, int rank, const std::vector<Member>& members, uint64_t deadline_ns) {
  std::vector<int> fds(members.size(), -1);
  auto give_up = [&](int peer) {
    for (int fd : fds)
      if (fd >= 0) close(fd);
    const Member& other = members[static_cast<size_t>(peer)];
    throw Failure{0, HCCL_E_TIMEOUT,
                  format("EI0006: %s Getting socket times out. Reason: Remote Rank did not send the data in time. localRank[%d] could not "
                         "be connected with remoteRank[%d] at [%s/%d] within %g s.\n        Possible Cause: 1. The ranks cannot reach each "
                         "other over the network. 2. The other rank failed earlier. 3. HCCL_CONNECT_TIMEOUT is too short.",
                         stamp().c_str(), rank, peer, other.address[0], other.device, connect_timeout())};
  };
  // The higher rank calls, the lower one is called.
  for (int peer = 0; peer < rank; peer++) {
    Hello hello{};
    hello.magic = kHelloMagic;
    memcpy(hello.id, id.data(), sizeof hello.id);
    hello.kind = kLink;
    hello.rank = rank;
    hello.ranks = static_cast<int>(members.size());
    const Member& other = members[static_cast<size_t>(peer)];
    const bool same = strcmp(other.machine, members[static_cast<size_t>(rank)].machine) == 0;
    const int fd = reach(other, hello, same, deadline_ns);
    if (fd < 0) give_up(peer);
    fds[static_cast<size_t>(peer)] = fd;
  }
  for (int peer = rank + 1; peer < static_cast<int>(members.size()); peer++) {
    const int fd = take_link(id, peer, deadline_ns);
    if (fd < 0) give_up(peer);
    fds[static_cast<size_t>(peer)] = fd;
  }
  for (int fd : fds) {
    if (fd < 0) continue;
    const int room = 1 << 20;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    remember(fd);
  }
  return std::make_unique<Sockets>(std::move(fds));
}

}  // namespace hccl_sim
