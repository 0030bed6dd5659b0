// What one process did, kept when --report or --trace was given: ANABATIC_SIM_REPORT names a folder, and each process writes
// PID.json there, now and then and when it ends, and appends to PID.trace when ANABATIC_SIM_TRACE is set. report.py joins them.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <vector>

#include "state.h"

namespace {

constexpr uint64_t kFlushNs = 2000000000;  // a killed process loses at most this much
constexpr size_t kSteps = 100000, kEvents = 1 << 20;

struct Row {
  uint64_t calls = 0, bytes = 0, paper_ns = 0, host_ns = 0, waited_ns = 0;
  double flops = 0;
};

struct Table {
  std::vector<std::string> names;
  std::vector<Row> rows, first, before, last;  // now; at the end of the first step, of the last but one, of the last one
  std::unordered_map<std::string, int> by_name;

  int at(const std::string& name) {
    auto [found, fresh] = by_name.emplace(name, static_cast<int>(names.size()));
    if (fresh) {
      names.push_back(name);
      rows.emplace_back();
    }
    return found->second;
  }
};

struct Totals {
  uint64_t operators, syncs, h2d_calls, h2d_bytes, d2h_calls, d2h_bytes, d2d_calls, d2d_bytes, collectives, collective_bytes;
  uint64_t device_ns, collective_ns, waited_ns;
  double flops;
};

struct Step {
  Totals totals;
  sim::Moment paper;
  uint64_t host_ns;
};

struct Event {
  const char* category;
  int name, physical, stream;
  uint64_t start_ns, ns;
};

struct Report {
  std::mutex mutex;
  std::string folder;
  bool tracing = false;
  pid_t pid = 0;
  Table operators, collectives, syncs, unfused;
  Totals totals{};
  std::vector<Step> steps;
  std::vector<Event> events;
  size_t event_count = 0;
  uint64_t started_ns = 0, flushed_ns = 0;
  uint64_t devices = 0;  // bit N: physical device N has computed
};

Report* report() {
  static Report* made = []() -> Report* {
    const char* folder = getenv("ANABATIC_SIM_REPORT");
    if (folder == nullptr || folder[0] == '\0') return nullptr;
    auto* fresh = new Report;  // outlives everything that may still report while the process ends
    fresh->folder = folder;
    fresh->tracing = getenv("ANABATIC_SIM_TRACE") != nullptr;
    fresh->pid = getpid();
    fresh->started_ns = fresh->flushed_ns = sim_clock_ns();
    atexit(sim::report_flush);
    return fresh;
  }();
  return made;
}

const char* kCollectives[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "all_to_all", "send",
                              "recv",       "barrier"};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    if (letter == '\t') out += "\\t";
    else if (letter >= 0x20) out += static_cast<char>(letter);
  }
  return out + "\"";
}

void write_table(FILE* file, const char* name, const Table& table) {
  fprintf(file, "\"%s\": {", name);
  for (size_t i = 0; i < table.names.size(); i++) {
    const Row& row = table.rows[i];
    const auto at = [i](const std::vector<Row>& rows) { return i < rows.size() ? rows[i] : Row{}; };
    const Row first = at(table.first), before = at(table.before), last = at(table.last);
    fprintf(file, "%s\n%s: [%llu, %llu, %llu, %llu, %llu, %.0f, %llu, %llu, %llu, %llu]", i == 0 ? "" : ",", quoted(table.names[i]).c_str(),
            static_cast<unsigned long long>(row.calls), static_cast<unsigned long long>(row.bytes),
            static_cast<unsigned long long>(row.paper_ns), static_cast<unsigned long long>(row.host_ns),
            static_cast<unsigned long long>(row.waited_ns), row.flops, static_cast<unsigned long long>(first.calls),
            static_cast<unsigned long long>(last.calls), static_cast<unsigned long long>(last.calls - before.calls),
            static_cast<unsigned long long>(last.bytes - before.bytes));
  }
  fprintf(file, "},\n");
}

void write_step(FILE* file, const Step& step) {
  const Totals& t = step.totals;
  const uint64_t values[] = {t.operators, t.syncs,       t.h2d_calls,        t.h2d_bytes, t.d2h_calls,     t.d2h_bytes,  t.d2d_calls,
                             t.d2d_bytes, t.collectives, t.collective_bytes, t.device_ns, t.collective_ns, t.waited_ns};
  fprintf(file, "[");
  for (uint64_t value : values) fprintf(file, "%llu, ", static_cast<unsigned long long>(value));
  fprintf(file, "%.0f, %llu, %llu, %llu]", t.flops, static_cast<unsigned long long>(step.paper.ns),
          static_cast<unsigned long long>(step.paper.alone_ns), static_cast<unsigned long long>(step.host_ns));
}

void write_events(Report& all) {
  if (all.events.empty()) return;
  FILE* file = fopen((all.folder + "/" + std::to_string(all.pid) + ".trace").c_str(), "a");
  if (file != nullptr) {
    for (const Event& event : all.events) {
      const Table& table = event.category[0] == 'o' ? all.operators : event.category[0] == 'c' ? all.collectives : all.syncs;
      fprintf(file, "{\"ph\": \"X\", \"cat\": \"%s\", \"name\": %s, \"pid\": %d, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f},\n",
              event.category, quoted(table.names[event.name]).c_str(), event.physical, event.stream,
              static_cast<double>(event.start_ns) / 1e3, static_cast<double>(event.ns) / 1e3);
    }
    fclose(file);
  }
  all.events.clear();
}

// With the lock held.
void write(Report& all) {
  if (all.pid != getpid()) return;  // a forked child reports nothing of its parent's
  all.flushed_ns = sim_clock_ns();
  write_events(all);
  const std::string target = all.folder + "/" + std::to_string(all.pid) + ".json", draft = target + ".tmp";
  FILE* file = fopen(draft.c_str(), "w");
  if (file == nullptr) return;
  const Step now{all.totals, sim::paper_now(), sim_clock_ns() - all.started_ns};
  fprintf(file, "{\"pid\": %d, \"dropped_events\": %zu, \"started_ns\": %llu, \"devices\": %llu,\n\"now\": ", all.pid,
          all.event_count > kEvents ? all.event_count - kEvents : 0, static_cast<unsigned long long>(all.started_ns),
          static_cast<unsigned long long>(all.devices));
  write_step(file, now);
  fprintf(file, ",\n");
  write_table(file, "operators", all.operators);
  write_table(file, "collectives", all.collectives);
  write_table(file, "syncs", all.syncs);
  write_table(file, "unfused", all.unfused);
  fprintf(file, "\"steps\": [");
  for (size_t i = 0; i < all.steps.size(); i++) {
    fprintf(file, i == 0 ? "\n" : ",\n");
    write_step(file, all.steps[i]);
  }
  fprintf(file, "]}\n");
  if (fclose(file) == 0) rename(draft.c_str(), target.c_str());
}

void add(Row& row, const sim::Measured& what, uint64_t waited_ns = 0) {
  row.calls++;
  row.bytes += what.bytes;
  row.paper_ns += what.paper_ns;
  row.host_ns += what.host_ns;
  row.waited_ns += waited_ns;
  row.flops += what.flops;
}

void trace(Report& all, const char* category, int name, int physical, int stream, uint64_t start_ns, uint64_t ns) {
  if (!all.tracing) return;
  if (all.event_count++ < kEvents) all.events.push_back({category, name, physical, stream, start_ns, ns});
}

void maybe_write(Report& all) {
  if (sim_clock_ns() - all.flushed_ns > kFlushNs) write(all);
}

}  // namespace

extern "C" int sim_reporting(void) { return report() != nullptr ? 1 : 0; }

extern "C" void sim_report_unfused(const char* name, const char* reason) {
  Report* all = report();
  if (all == nullptr) return;
  std::lock_guard<std::mutex> lock(all->mutex);
  all->unfused.rows[all->unfused.at(std::string(name) + ": " + reason)].calls++;
}

extern "C" void sim_report_step(int backward_since) {
  Report* all = report();
  if (all == nullptr) return;
  std::lock_guard<std::mutex> lock(all->mutex);
  const Step step{all->totals, sim::paper_now(), sim_clock_ns() - all->started_ns};
  const bool fresh = backward_since != 0 || all->steps.empty();
  if (!fresh) all->steps.back() = step;
  else if (all->steps.size() < kSteps) all->steps.push_back(step);
  for (Table* table : {&all->operators, &all->collectives, &all->syncs, &all->unfused}) {
    if (fresh) table->before = table->last;
    table->last = table->rows;
    if (all->steps.size() == 1) table->first = table->rows;
  }
  maybe_write(*all);
}

namespace sim {

void report_op(const SimOp& op, int physical, int stream, uint64_t start_ns, uint64_t paper_ns) {
  Report* all = report();
  if (all == nullptr) return;
  std::lock_guard<std::mutex> lock(all->mutex);
  std::string full = op.name;
  if (op.overload[0] != '\0') full.append(".").append(op.overload);
  const int name = all->operators.at(full);
  add(all->operators.rows[name], {op.flops, op.bytes, paper_ns, op.host_ns});
  all->totals.operators++;
  all->devices |= 1ULL << physical;
  all->totals.device_ns += paper_ns;
  all->totals.flops += op.flops;
  trace(*all, "operator", name, physical, stream, start_ns, paper_ns);
  if ((all->totals.operators & 255) == 0) maybe_write(*all);
}

void report_collective(SimCollective kind, int physical, int stream, const Measured& what, uint64_t start_ns, uint64_t waited_ns) {
  Report* all = report();
  if (all == nullptr) return;
  std::lock_guard<std::mutex> lock(all->mutex);
  const int name = all->collectives.at(kCollectives[kind]);
  add(all->collectives.rows[name], what, waited_ns);
  all->totals.collectives++;
  all->devices |= 1ULL << physical;
  all->totals.collective_bytes += what.bytes;
  all->totals.collective_ns += what.paper_ns;
  all->totals.waited_ns += waited_ns;
  trace(*all, "collective", name, physical, stream, start_ns, what.paper_ns);
}

void report_sync(const char* what, int physical, uint64_t from_ns, uint64_t until_ns) {
  Report* all = report();
  if (all == nullptr) return;
  std::string line = python_line();  // before the lock: it waits for Python's
  std::lock_guard<std::mutex> lock(all->mutex);
  const int name = all->syncs.at((line.empty() ? "no Python code" : line) + "\t" + what);
  all->syncs.rows[name].calls++;
  all->syncs.rows[name].waited_ns += until_ns - from_ns;
  all->totals.syncs++;
  trace(*all, "synchronisation", name, physical, -1, from_ns, until_ns - from_ns);
}

void report_copy(int kind, uint64_t bytes) {
  Report* all = report();
  if (all == nullptr) return;
  std::lock_guard<std::mutex> lock(all->mutex);
  Totals& totals = all->totals;
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE) {
    totals.h2d_calls++;
    totals.h2d_bytes += bytes;
  } else if (kind == ACL_MEMCPY_DEVICE_TO_HOST) {
    totals.d2h_calls++;
    totals.d2h_bytes += bytes;
  } else if (kind != ACL_MEMCPY_HOST_TO_HOST) {
    totals.d2d_calls++;
    totals.d2d_bytes += bytes;
  }
}

void report_flush() {
  Report* all = report();
  if (all == nullptr) return;
  std::lock_guard<std::mutex> lock(all->mutex);
  write(*all);
}

}  // namespace sim
