#include <torch/library.h>

#include "kernels.h"

namespace sim {
void register_comm_experts(torch::Library&) {}
}  // namespace sim
