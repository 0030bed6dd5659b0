// A ring of bytes in shared memory for every ordered pair of ranks, and one futex per rank that the others ring.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "failure.h"
#include "mesh.h"

namespace hccl_sim {

namespace {

constexpr uint64_t kMagic = 0x484343494d495331;
// All rings of a communicator together: small, because containers often have 64 MiB of shared memory for everything.
constexpr size_t kBudget = 6 << 20;
constexpr size_t kSmallestRing = 8 << 10, kLargestRing = 1 << 20;

struct alignas(64) Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleeping;
};

struct Shared {
  uint64_t magic;
  uint32_t ranks;
  uint32_t ring_bytes;
  std::atomic<uint32_t> attached;
  std::atomic<int32_t> failed;  // rank + 1
  Bell bell[1];                 // one per rank; the rings follow
};

struct alignas(64) Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

size_t ring_bytes(int ranks) {
  const size_t pairs = static_cast<size_t>(ranks) * static_cast<size_t>(std::max(1, ranks - 1));
  size_t bytes = kLargestRing;
  while (bytes > kSmallestRing && bytes * pairs > kBudget) bytes /= 2;
  return bytes;
}

size_t head_bytes(int ranks) { return (sizeof(Shared) + sizeof(Bell) * static_cast<size_t>(ranks) + 4095) / 4096 * 4096; }
size_t total_bytes(int ranks) {
  return head_bytes(ranks) + static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * sizeof(Ring) +
         static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * ring_bytes(ranks);
}

class Memory final : public Mesh {
 public:
  Memory(Shared* shared, int rank, std::vector<Member> members)
      : shared_(shared), rank_(rank), ranks_(static_cast<int>(members.size())), members_(std::move(members)) {
    touched_.resize(members_.size());
  }
  ~Memory() override { munmap(shared_, total_bytes(ranks_)); }

  size_t push(int peer, const char* data, size_t bytes) override {
    Ring& ring = ring_of(rank_, peer);
    const uint64_t written = ring.written.load(std::memory_order_relaxed);
    const size_t room = shared_->ring_bytes - static_cast<size_t>(written - ring.read.load(std::memory_order_acquire));
    const size_t moved = std::min(bytes, room);
    if (moved == 0) return 0;
    char* base = data_of(rank_, peer);
    const size_t at = written % shared_->ring_bytes, first = std::min(moved, shared_->ring_bytes - at);
    memcpy(base + at, data, first);
    memcpy(base, data + first, moved - first);
    ring.written.store(written + moved, std::memory_order_release);
    touched_[static_cast<size_t>(peer)] = true;
    return moved;
  }

  size_t pull(int peer, char* data, size_t bytes) override {
    Ring& ring = ring_of(peer, rank_);
    const uint64_t read = ring.read.load(std::memory_order_relaxed);
    const size_t moved = std::min(bytes, static_cast<size_t>(ring.written.load(std::memory_order_acquire) - read));
    if (moved == 0) return 0;
    const char* base = data_of(peer, rank_);
    const size_t at = read % shared_->ring_bytes, first = std::min(moved, shared_->ring_bytes - at);
    memcpy(data, base + at, first);
    memcpy(data + first, base, moved - first);
    ring.read.store(read + moved, std::memory_order_release);
    touched_[static_cast<size_t>(peer)] = true;
    return moved;
  }

  void flush() override {
    for (int peer = 0; peer < ranks_; peer++) {
      if (!touched_[static_cast<size_t>(peer)]) continue;
      touched_[static_cast<size_t>(peer)] = false;
      ring_bell(peer);
    }
  }

  uint32_t ticket() override { return shared_->bell[rank_].rung.load(); }

  void wait(uint32_t ticket, const std::vector<Wanted>&, int milliseconds) override {
    Bell& bell = shared_->bell[rank_];
    bell.sleeping.store(1);
    const timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    if (bell.rung.load() == ticket) syscall(SYS_futex, &bell.rung, FUTEX_WAIT, ticket, &time, nullptr, 0);
    bell.sleeping.store(0);
  }

  bool gone(int peer) override {
    const Member& member = members_[static_cast<size_t>(peer)];
    return start_of(member.pid) != member.started;
  }

  int failed() override { return shared_->failed.load() - 1; }

  void fail() override {
    int32_t none = 0;
    shared_->failed.compare_exchange_strong(none, rank_ + 1);
    for (int peer = 0; peer < ranks_; peer++) ring_bell(peer);
  }

 private:
  Ring& ring_of(int from, int to) {
    auto* rings = reinterpret_cast<Ring*>(reinterpret_cast<char*>(shared_) + head_bytes(ranks_));
    return rings[from * ranks_ + to];
  }
  char* data_of(int from, int to) {
    char* base = reinterpret_cast<char*>(shared_) + head_bytes(ranks_) + static_cast<size_t>(ranks_ * ranks_) * sizeof(Ring);
    return base + static_cast<size_t>(from * ranks_ + to) * shared_->ring_bytes;
  }
  void ring_bell(int peer) {
    Bell& bell = shared_->bell[peer];
    bell.rung.fetch_add(1);
    if (bell.sleeping.load() != 0) syscall(SYS_futex, &bell.rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  Shared* shared_;
  int rank_, ranks_;
  std::vector<Member> members_;
  std::vector<bool> touched_;
};

Failure no_memory(const char* what) {
  return {0, HCCL_E_MEMORY,
          format("EI0007: %s Resource_Allocation_Failure(EI0007): shared memory for a communicator: %s failed: %s. The simulator needs "
                 "room in /dev/shm; in a container see --shm-size.", stamp().c_str(), what, strerror(errno))};
}

void* map(int fd, size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return at;
}

}  // namespace

uint64_t start_of(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = fopen(path, "r");
  if (file == nullptr) return 0;
  const size_t got = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[got] = '\0';
  const char* after = strrchr(text, ')');
  if (after == nullptr) return 0;
  char state = '?';
  unsigned long long value = 0;
  // Field 3 is the state, field 22 the start (proc(5)).
  sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &value);
  return state == 'Z' || state == 'X' ? 0 : value;
}

void create_memory(const std::string& name, int ranks) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) throw no_memory("shm_open");
  // Rings from a rank to itself are never touched and stay holes; the rest is reserved now, so that a full /dev/shm is an
  // error here and not a SIGBUS later.
  const size_t rings = ring_bytes(ranks), head = head_bytes(ranks) + static_cast<size_t>(ranks * ranks) * sizeof(Ring);
  errno = ftruncate(fd, static_cast<off_t>(total_bytes(ranks))) == 0 ? posix_fallocate(fd, 0, static_cast<off_t>(head)) : errno;
  for (int from = 0; errno == 0 && from < ranks; from++)
    for (int to = 0; errno == 0 && to < ranks; to++)
      if (from != to)
        errno = posix_fallocate(fd, static_cast<off_t>(head + static_cast<size_t>(from * ranks + to) * rings), static_cast<off_t>(rings));
  if (errno != 0) {
    const Failure failure = no_memory("posix_fallocate");
    close(fd);
    shm_unlink(name.c_str());
    throw failure;
  }
  auto* shared = static_cast<Shared*>(map(fd, total_bytes(ranks)));
  if (shared == MAP_FAILED) throw no_memory("mmap");
  shared->ranks = static_cast<uint32_t>(ranks);
  shared->ring_bytes = static_cast<uint32_t>(rings);
  shared->magic = kMagic;
  munmap(shared, total_bytes(ranks));
}

std::unique_ptr<Mesh> open_memory(const std::string& name, int rank, const std::vector<Member>& members) {
  const int ranks = static_cast<int>(members.size());
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) throw no_memory("shm_open");
  auto* shared = static_cast<Shared*>(map(fd, total_bytes(ranks)));
  if (shared == MAP_FAILED || shared->magic != kMagic) throw no_memory("mmap");
  // The last one in takes the name away: nothing is left behind however the ranks end.
  if (shared->attached.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) shm_unlink(name.c_str());
  return std::make_unique<Memory>(shared, rank, members);
}

}  // namespace hccl_sim
