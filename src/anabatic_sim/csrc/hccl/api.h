#pragma once

#include "comm.h"

namespace hccl_sim {

// Joins the others; the handle stays valid until drop_comm.
HcclResult make_comm(const Root& root, uint32_t ranks, uint32_t rank, const HcclCommConfig* config, HcclComm* handle);
HcclResult drop_comm(HcclComm handle);

}  // namespace hccl_sim
