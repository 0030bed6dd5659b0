#include "failure.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "../sim.h"

namespace hccl_sim {

std::string format(const char* pattern, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

std::string stamp() {
  timeval now;
  gettimeofday(&now, nullptr);
  tm local;
  localtime_r(&now.tv_sec, &local);
  char day[32];
  strftime(day, sizeof day, "%Y-%m-%d-%H:%M:%S", &local);
  return format("[PID: %d] %s.%03d.%03d", getpid(), day, static_cast<int>(now.tv_usec / 1000), static_cast<int>(now.tv_usec % 1000));
}

HcclResult refuse(HcclResult result, const std::string& text) {
  sim_set_error("%s", text.c_str());
  return result;
}

namespace {

double seconds(const char* name, double otherwise) {
  const char* text = getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end;
  const double value = strtod(text, &end);
  if (*end != '\0' || value < 0) {
    fprintf(stderr, "EI0001: Environment variable [%s] is invalid. Reason: [%s]. The default of %g s is used.\n", name, text, otherwise);
    return otherwise;
  }
  return value;
}

}  // namespace

// Read anew each time: a script may set them before its first collective. A real installation refuses a connect timeout below
// 120 s; here it is honoured, because tests cannot wait that long.
double connect_timeout() { return seconds("HCCL_CONNECT_TIMEOUT", 120); }
double execute_timeout() { return seconds("HCCL_EXEC_TIMEOUT", 1836); }

}  // namespace hccl_sim
