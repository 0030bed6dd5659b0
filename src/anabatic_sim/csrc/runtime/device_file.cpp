// The file behind device memory: sparse, without a name, gone with its last user. Addresses that were given back leave a hole.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "memory.h"

namespace {

constexpr int64_t kLength = int64_t{1} << 62;  // holes take no memory, and an offset is never used twice

struct Piece {
  uint64_t bytes;
  int64_t offset;
};

// Never freed: threads may allocate while the process ends.
std::mutex& mutex = *new std::mutex;
std::map<void*, Piece>& pieces = *new std::map<void*, Piece>;
int file = -1;
pid_t owner = 0;
int64_t next = 0;

// A forked child does not hold its parent's devices: what it writes there is a copy of its own, and it allocates from another file.
void leave_parent() {
  for (const auto& [at, piece] : pieces)
    mmap(at, piece.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, piece.offset);
  mutex.unlock();
}

// The mutex is held.
bool open_file() {
  if (owner == getpid()) return file >= 0;
  static const int watched = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, &leave_parent);
  owner = getpid();
  next = 0;
  pieces.clear();
  file = watched == 0 ? memfd_create("anabatic-sim-hbm", MFD_CLOEXEC) : -1;
  if (file >= 0 && ftruncate(file, kLength) != 0) {
    close(file);
    file = -1;
  }
  return file >= 0;
}

}  // namespace

namespace sim {

int device_file() {
  std::lock_guard<std::mutex> lock(mutex);
  return owner == getpid() ? file : -1;
}

void* map_device_memory(uint64_t bytes, int64_t* offset) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!open_file() || next > kLength - static_cast<int64_t>(bytes)) return nullptr;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, next);
  if (at == MAP_FAILED) return nullptr;
  pieces[at] = {bytes, next};
  *offset = next;
  next += static_cast<int64_t>(bytes);
  return at;
}

void unmap_device_memory(void* at, const Range& range) {
  std::lock_guard<std::mutex> lock(mutex);
  pieces.erase(at);
  munmap(at, range.bytes);
  if (owner != getpid() || range.owner != owner) return;  // a forked child gives nothing of its parent back
  fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range.offset, static_cast<off_t>(range.bytes));
}

}  // namespace sim
