// What ends a collective early: an ACL error for the stream it runs on, an HcclResult for the call or the communicator, and the
// text that HCCL gives (codes EI....; HCCL user guide, chapter fault diagnosis).
#pragma once

#include <hccl/hccl.h>

#include <string>

namespace hccl_sim {

struct Failure {
  int acl = 0;
  HcclResult result = HCCL_E_INTERNAL;
  std::string text;
};

constexpr int kTimeout = 507048;    // ACL_ERROR_RT_FFTS_PLUS_TIMEOUT: a notify that never came
constexpr int kException = 507050;  // an internal task failed
constexpr int kLinkError = 507056;  // ACL_ERROR_RT_LINK_ERROR

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
// "[PID: 1] 2025-06-25-10:45:23.586.187", as HCCL begins its texts.
std::string stamp();
// Tells torch_npu's next look at aclGetRecentErrMsg and hands the code back.
HcclResult refuse(HcclResult result, const std::string& text);

// Seconds; HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT (0: never).
double connect_timeout();
double execute_timeout();

}  // namespace hccl_sim
