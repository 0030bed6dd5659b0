#include "rendezvous.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "../sim.h"
#include "failure.h"
#include "network.h"

namespace hccl_sim {

namespace {

constexpr uint64_t kSecond = 1000000000ULL;
constexpr uint64_t kRootMagic = 0x4f4f523153494d48;

// The root's answer; the members follow when all is well.
struct Answer {
  int32_t result;  // HcclResult
  int32_t pad;
  char text[1024];
};

// Ranks that have come for one communicator.
struct Session {
  int ranks = 0;
  uint64_t deadline_ns = 0;
  std::map<int, int> fds;  // rank -> connection
  std::map<int, Member> members;
};

struct Caller {
  int fd;
  size_t got = 0;
  uint64_t deadline_ns;
  Hello hello;
};

struct Server {
  int fd = -1;
  uint16_t port = 0;
  pid_t pid = 0;
  std::vector<Caller> callers;        // have not yet said who they are
  std::map<Id, Session> sessions;
};

std::mutex& links_mutex = *new std::mutex;
std::condition_variable& links_changed = *new std::condition_variable;
std::map<std::pair<Id, int>, int>& links = *new std::map<std::pair<Id, int>, int>;

std::string list_missing(const Session& session) {
  std::string text;
  for (int rank = 0; rank < session.ranks; rank++)
    if (session.fds.count(rank) == 0) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void answer(Session& session, int result, const std::string& text) {
  Answer reply{};
  reply.result = result;
  snprintf(reply.text, sizeof reply.text, "%s", text.c_str());
  std::vector<Member> members;
  for (const auto& [rank, member] : session.members) members.push_back(member);
  for (const auto& [rank, fd] : session.fds) {
    const uint64_t soon = sim_clock_ns() + 5 * kSecond;
    if (send_all(fd, &reply, sizeof reply, soon) && result == HCCL_SUCCESS)
      send_all(fd, members.data(), members.size() * sizeof(Member), soon);
    forget(fd);
    close(fd);
  }
}

std::string memory_name(const Id& id, const Member& member) {
  std::string name = std::string(member.segment) + "-hccl-";
  for (unsigned char byte : id) name += format("%02x", byte);
  return name;
}

bool one_machine(const std::map<int, Member>& members) {
  for (const auto& [rank, member] : members)
    if (strcmp(member.machine, members.begin()->second.machine) != 0) return false;
  return true;
}

void complete(const Id& id, Session& session) {
  for (const auto& [rank, member] : session.members)
    for (const auto& [other, twin] : session.members)
      if (other > rank && member.device == twin.device && strcmp(member.machine, twin.machine) == 0)
        return answer(session, HCCL_E_PARA,
                      format("EI0015: %s Ranktable_Detect_Failed(EI0015): rank %d and rank %d use the same physical device ID%d of one "
                             "machine.\n        Possible Cause: the ranks did not choose their device: torch.npu.set_device(local_rank) "
                             "before the first collective.", stamp().c_str(), rank, other, member.device));
  try {
    if (one_machine(session.members)) create_memory(memory_name(id, session.members.begin()->second), session.ranks);
    answer(session, HCCL_SUCCESS, "");
  } catch (const Failure& failure) {
    answer(session, failure.result, failure.text);
  }
}

void incomplete(Session& session, const char* why) {
  answer(session, HCCL_E_TIMEOUT,
         format("EI0015: %s Ranktable_Detect_Failed(EI0015): Some NPUs of the cluster did not connect to the root: topo exchange server get "
                "socket timeout, %s. expected rank number[%d], missing rank(s): [%s].\n        Possible Cause: 1. A rank failed or ended "
                "earlier. 2. The ranks start at very different times: see HCCL_CONNECT_TIMEOUT (%g s). 3. HCCL_SOCKET_IFNAME or HCCL_IF_IP "
                "names a network on which they cannot reach each other.",
                stamp().c_str(), why, session.ranks, list_missing(session).c_str(), connect_timeout()));
}

void welcome(Server& server, const Caller& caller) {
  const Hello& hello = caller.hello;
  const Id id(hello.id, sizeof hello.id);
  const uint64_t soon = sim_clock_ns() + kSecond;
  if (hello.magic != kHelloMagic || !send_all(caller.fd, hello.id, sizeof hello.id, soon)) {
    forget(caller.fd);
    close(caller.fd);
    return;
  }
  if (hello.kind == kLink) {
    forget(caller.fd);
    std::lock_guard<std::mutex> lock(links_mutex);
    links[{id, hello.rank}] = caller.fd;
    links_changed.notify_all();
    return;
  }
  Session& session = server.sessions[id];
  if (session.ranks == 0) {
    session.ranks = hello.ranks;
    session.deadline_ns = sim_clock_ns() + static_cast<uint64_t>(connect_timeout() * 1e9);
  }
  const bool twice = session.fds.count(hello.rank) != 0;
  session.fds[twice ? session.ranks + static_cast<int>(session.fds.size()) : hello.rank] = caller.fd;
  session.members[hello.rank] = hello.member;
  if (twice || hello.ranks != session.ranks) {
    answer(session, HCCL_E_PARA,
           format("EI0015: %s Ranktable_Detect_Failed(EI0015): rank %d of %d joined a communicator of %d ranks%s.", stamp().c_str(), hello.rank,
                  hello.ranks, session.ranks, twice ? " twice" : ""));
    server.sessions.erase(id);
  } else if (static_cast<int>(session.fds.size()) == session.ranks) {
    complete(id, session);
    server.sessions.erase(id);
  }
}

// Reads what a caller has sent; true when it is done with (welcomed, or gone).
bool advance(Server& server, Caller& caller) {
  const ssize_t got = recv(caller.fd, reinterpret_cast<char*>(&caller.hello) + caller.got, sizeof(Hello) - caller.got, MSG_DONTWAIT);
  if (got > 0) caller.got += static_cast<size_t>(got);
  if (caller.got == sizeof(Hello)) {
    welcome(server, caller);
    return true;
  }
  const bool broken = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR) || sim_clock_ns() > caller.deadline_ns;
  if (broken) {
    forget(caller.fd);
    close(caller.fd);
  }
  return broken;
}

// A rank that waits for the others says nothing more: something to read means that it has gone.
bool left(int fd) {
  char byte;
  const ssize_t got = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

void look_after(Server& server) {
  for (auto at = server.sessions.begin(); at != server.sessions.end();) {
    Session& session = at->second;
    int lost = -1;
    for (const auto& [rank, fd] : session.fds)
      if (left(fd)) lost = rank;
    if (lost >= 0) {
      forget(session.fds[lost]);
      close(session.fds[lost]);
      session.fds.erase(lost);
      incomplete(session, format("rank %d ended while the others were waited for", lost).c_str());
    } else if (sim_clock_ns() > session.deadline_ns) {
      incomplete(session, format("timeout[%g s]", connect_timeout()).c_str());
    } else {
      ++at;
      continue;
    }
    at = server.sessions.erase(at);
  }
}

void serve(Server* server) {
  for (;;) {
    std::vector<pollfd> polled = {{server->fd, POLLIN, 0}};
    for (const Caller& caller : server->callers) polled.push_back({caller.fd, POLLIN, 0});
    for (const auto& [id, session] : server->sessions)
      for (const auto& [rank, fd] : session.fds) polled.push_back({fd, POLLIN, 0});
    poll(polled.data(), polled.size(), polled.size() > 1 ? 200 : -1);
    for (int fd; (fd = accept4(server->fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
      remember(fd);
      server->callers.push_back({fd, 0, sim_clock_ns() + 10 * kSecond, {}});
    }
    for (size_t i = 0; i < server->callers.size();) {
      if (advance(*server, server->callers[i])) server->callers.erase(server->callers.begin() + static_cast<ptrdiff_t>(i));
      else i++;
    }
    look_after(*server);
  }
}

// Only this machine can connect when the job says that it is all on this machine.
bool local_only() {
  const char* master = getenv("MASTER_ADDR");
  return master != nullptr && (strcmp(master, "localhost") == 0 || strncmp(master, "127.", 4) == 0 || strcmp(master, "::1") == 0);
}

int listen_on(int family, uint16_t* port) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  sockaddr_storage address{};
  socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  address.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET6) {
    const int off = 0;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  } else {
    reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr = htonl(local_only() ? INADDR_LOOPBACK : INADDR_ANY);
  }
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd, 512) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    close(fd);
    return -1;
  }
  *port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  return fd;
}

uint16_t listener() {
  static std::mutex& mutex = *new std::mutex;
  static Server* server = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (server != nullptr && server->pid == getpid()) return server->port;
  auto* made = new Server;  // the one of a parent that forked is not ours
  made->fd = local_only() ? -1 : listen_on(AF_INET6, &made->port);
  if (made->fd < 0) made->fd = listen_on(AF_INET, &made->port);
  if (made->fd < 0)
    throw Failure{0, HCCL_E_TCP_CONNECT, format("EI0019: %s Failed to bind a port: %s.", stamp().c_str(), strerror(errno))};
  remember(made->fd);
  made->pid = getpid();
  server = made;
  std::thread(serve, made).detach();
  return made->port;
}

}  // namespace

Id random_id() {
  char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw Failure{0, HCCL_E_SYSCALL, "no random numbers"};
  return Id(bytes, sizeof bytes);
}

Member myself(int physical_device) {
  Member me{};
  me.pid = getpid();
  me.started = start_of(me.pid);
  me.device = physical_device;
  const char* segment = getenv("ANABATIC_SIM_SEGMENT");
  const bool named = segment != nullptr && *segment != '\0';
  snprintf(me.segment, sizeof me.segment, "%s", named ? segment : "anabatic-sim-0");
  snprintf(me.machine, sizeof me.machine, "%s:%llu", me.segment, static_cast<unsigned long long>(sim_segment()->created_ns));
  if (!named) snprintf(me.machine, sizeof me.machine, "process %d", me.pid);  // its devices are its own
  me.port = listener();
  for (const auto& address : addresses()) {
    if (me.addresses == sizeof me.address / sizeof *me.address) break;
    snprintf(me.address[me.addresses++], sizeof *me.address, "%s", address.c_str());
  }
  return me;
}

Root make_root(const Id& id, const Member& member) {
  Root root{};
  root.magic = kRootMagic;
  memcpy(root.id, id.data(), sizeof root.id);
  root.member = member;
  return root;
}

int take_link(const Id& id, int peer, uint64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(links_mutex);
  for (;;) {
    auto found = links.find({id, peer});
    if (found != links.end()) {
      const int fd = found->second;
      links.erase(found);
      return fd;
    }
    if (sim_clock_ns() >= deadline_ns) return -1;
    links_changed.wait_for(lock, std::chrono::milliseconds(poll_ms(deadline_ns, 500)));
  }
}

std::unique_ptr<Mesh> join(const Root& root, int rank, int ranks, const Member& me, std::vector<Member>* members) {
  if (root.magic != kRootMagic)
    throw Failure{0, HCCL_E_PARA, format("EI0003: %s HcclCommInitRootInfo: the root info was not made by HcclGetRootInfo.", stamp().c_str())};
  const Id id(root.id, sizeof root.id);
  const uint64_t deadline = sim_clock_ns() + static_cast<uint64_t>(connect_timeout() * 1e9);
  Hello hello{};
  hello.magic = kHelloMagic;
  memcpy(hello.id, root.id, sizeof hello.id);
  hello.kind = kJoin;
  hello.rank = rank;
  hello.ranks = ranks;
  hello.member = me;
  const int fd = reach(root.member, hello, strcmp(root.member.machine, me.machine) == 0, deadline);
  if (fd < 0)
    throw Failure{0, HCCL_E_TIMEOUT,
                  format("EI0015: %s Ranktable_Detect_Failed(EI0015): topo exchange agent get socket timeout: rank %d could not connect to "
                         "the root (pid %d at %s:%d) within %g s.\n        Possible Cause: 1. The root has ended. 2. The launcher has "
                         "started the job again and its store still holds the root of the attempt before: torchrun --max-restarts needs "
                         "--standalone and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. 3. HCCL_SOCKET_IFNAME or HCCL_IF_IP names a network on which it cannot be "
                         "reached.",
                         stamp().c_str(), rank, root.member.pid, root.member.address[0], root.member.port, connect_timeout())};
  remember(fd);
  Answer reply{};
  members->resize(static_cast<size_t>(ranks));
  // The root decides when the time is over; it gets 20 s more to say so, as in HCCL.
  const uint64_t last = deadline + 20 * kSecond;
  bool heard = receive_all(fd, &reply, sizeof reply, last);
  if (heard && reply.result == HCCL_SUCCESS) heard = receive_all(fd, members->data(), members->size() * sizeof(Member), last);
  forget(fd);
  close(fd);
  if (!heard)
    throw Failure{0, HCCL_E_TIMEOUT,
                  format("EI0015: %s Ranktable_Detect_Failed(EI0015): the root (pid %d) ended while rank %d waited for the other ranks.",
                         stamp().c_str(), root.member.pid, rank)};
  if (reply.result != HCCL_SUCCESS) throw Failure{0, static_cast<HcclResult>(reply.result), reply.text};
  bool together = true;
  for (const Member& member : *members) together &= strcmp(member.machine, me.machine) == 0;
  if (together) return open_memory(memory_name(id, me), rank, *members);
  return connect_sockets(id, rank, *members, last);
}

}  // namespace hccl_sim
