// Where a training step ends. Every torch.optim.Optimizer (torch_npu's fused ones included) runs its step inside a
// record_function range called "Optimizer.step#NAME.step"; a range called "anabatic.step" marks a step by hand. Ranges reach us
// through torch's own observer, so nothing has to be imported or patched in the program.
#include <ATen/record_function.h>

#include <string_view>

#include "../sim.h"
#include "count.h"

namespace sim {

namespace {

bool ends_step(const at::RecordFunction& range) {
  const std::string_view name = range.name();
  return name == "anabatic.step" || name.rfind("Optimizer.step#", 0) == 0;
}

void left(const at::RecordFunction& range, at::ObserverContext*) {
  if (ends_step(range)) sim_report_step(take_backward() || range.name()[0] == 'a');
}

std::unique_ptr<at::ObserverContext> entered(const at::RecordFunction&) { return nullptr; }

}  // namespace

void watch_steps() {
  if (sim_reporting() == 0) return;
  at::addGlobalCallback(at::RecordFunctionCallback(&entered, &left).scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace sim
