#include "network.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include "../sim.h"
#include "failure.h"

namespace hccl_sim {

namespace {

std::mutex& fds_mutex = *new std::mutex;
std::vector<int>& fds = *new std::vector<int>;

bool selected(const char* interface, const char* wanted) {
  // "eth" names every interface that begins so, "=eth0" exactly one, "^" turns the choice round (HCCL environment variables).
  if (wanted == nullptr || *wanted == '\0') return true;
  const bool inverted = *wanted == '^';
  std::string list = wanted + (inverted ? 1 : 0);
  bool found = false;
  for (size_t from = 0; from <= list.size();) {
    size_t to = std::min(list.find(',', from), list.size());
    std::string name = list.substr(from, to - from);
    const bool exact = !name.empty() && name[0] == '=';
    if (exact) name.erase(0, 1);
    found |= !name.empty() && (exact ? name == interface : strncmp(interface, name.c_str(), name.size()) == 0);
    from = to + 1;
  }
  return found != inverted;
}

std::string text_of(const sockaddr* address) {
  char text[46] = "";
  if (address->sa_family == AF_INET)
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
  else if (!IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr))
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof text);
  return text;
}

int connect_to(const char* address, uint16_t port, uint64_t deadline_ns) {
  sockaddr_storage storage{};
  socklen_t length;
  if (inet_pton(AF_INET, address, &reinterpret_cast<sockaddr_in*>(&storage)->sin_addr) == 1) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    length = sizeof *v4;
  } else {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
    if (inet_pton(AF_INET6, address, &v6->sin6_addr) != 1) return -1;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    length = sizeof *v6;
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  int error = connect(fd, reinterpret_cast<sockaddr*>(&storage), length) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waiting = {fd, POLLOUT, 0};
    socklen_t size = sizeof error;
    if (poll(&waiting, 1, poll_ms(deadline_ns, 2000)) <= 0) error = ETIMEDOUT;
    else getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) {
    close(fd);
    return -1;
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

}  // namespace

int poll_ms(uint64_t deadline_ns, int most) {
  const uint64_t now = sim_clock_ns();
  if (now >= deadline_ns) return 0;
  return static_cast<int>(std::min<uint64_t>((deadline_ns - now) / 1000000 + 1, static_cast<uint64_t>(most)));
}

void remember(int fd) {
  static const int installed = pthread_atfork(nullptr, nullptr, [] {
    for (int old : fds) close(old);
    fds.clear();
  });
  (void)installed;
  std::lock_guard<std::mutex> lock(fds_mutex);
  fds.push_back(fd);
}

void forget(int fd) {
  std::lock_guard<std::mutex> lock(fds_mutex);
  std::erase(fds, fd);
}

std::vector<std::string> addresses() {
  const char* given = getenv("HCCL_IF_IP");
  if (given != nullptr && *given != '\0') return {given};
  const char* wanted = getenv("HCCL_SOCKET_IFNAME");
  std::vector<std::string> first, second, local;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {"127.0.0.1"};
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0 || !selected(at->ifa_name, wanted)) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const std::string text = text_of(at->ifa_addr);
    if (text.empty()) continue;
    if ((at->ifa_flags & IFF_LOOPBACK) != 0) local.push_back(text);
    else (family == AF_INET ? first : second).push_back(text);
  }
  freeifaddrs(list);
  first.insert(first.end(), second.begin(), second.end());
  first.insert(first.end(), local.begin(), local.end());
  if (first.empty() && wanted != nullptr && *wanted != '\0')
    throw Failure{0, HCCL_E_PARA,
                  format("EI0001: %s Environment variable [HCCL_SOCKET_IFNAME] is invalid. Reason: [no network interface of this "
                         "machine is called %s].", stamp().c_str(), wanted)};
  if (first.empty()) first.push_back("127.0.0.1");
  return first;
}

bool send_all(int fd, const void* data, size_t bytes, uint64_t deadline_ns) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      at += sent;
      bytes -= static_cast<size_t>(sent);
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return false;
    pollfd waiting = {fd, POLLOUT, 0};
    if (poll(&waiting, 1, poll_ms(deadline_ns, 1000)) < 0 && errno != EINTR) return false;
    if (sim_clock_ns() >= deadline_ns) return false;
  }
  return true;
}

bool receive_all(int fd, void* data, size_t bytes, uint64_t deadline_ns) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = recv(fd, at, bytes, MSG_DONTWAIT);
    if (got > 0) {
      at += got;
      bytes -= static_cast<size_t>(got);
      continue;
    }
    if (got == 0 || (errno != EAGAIN && errno != EINTR)) return false;
    pollfd waiting = {fd, POLLIN, 0};
    if (poll(&waiting, 1, poll_ms(deadline_ns, 1000)) < 0 && errno != EINTR) return false;
    if (sim_clock_ns() >= deadline_ns) return false;
  }
  return true;
}

int reach(const Member& member, const Hello& hello, bool same_machine, uint64_t deadline_ns) {
  std::vector<std::string> order;
  for (int i = 0; i < member.addresses; i++) order.emplace_back(member.address[i]);
  if (same_machine) order.insert(order.begin(), "127.0.0.1");
  for (;;) {
    for (const auto& address : order) {
      const int fd = connect_to(address.c_str(), member.port, deadline_ns);
      if (fd < 0) continue;
      // The answer tells whether this is the right process: 127.0.0.1 is another one in every network namespace.
      char answer[16];
      const uint64_t soon = std::min<uint64_t>(deadline_ns, sim_clock_ns() + 5000000000ULL);
      if (send_all(fd, &hello, sizeof hello, soon) && receive_all(fd, answer, sizeof answer, soon) &&
          memcmp(answer, hello.id, sizeof answer) == 0)
        return fd;
      close(fd);
    }
    // A root that is gone never comes back. Its process can be seen from the same machine only.
    if (sim_clock_ns() >= deadline_ns || (same_machine && start_of(member.pid) != member.started)) return -1;
    usleep(50000);
  }
}

}  // namespace hccl_sim
