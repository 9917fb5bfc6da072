#include "client/plan_view.h"

#include <map>
#include <string>
#include <vector>

#include "client/message_yaml.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

template <class Enum>
std::string Name(Enum value) {
  const auto* descriptor = google::protobuf::GetEnumDescriptor<Enum>()->FindValueByNumber(value);
  return descriptor == nullptr ? std::to_string(value) : ShortEnumName(*descriptor);
}

// 30532122624 -> "30,532,122,624".
std::string Grouped(int64_t count) {
  std::string text = std::to_string(count);
  for (size_t end = text.size(); end > 3; end -= 3) text.insert(end - 3, ",");
  return text;
}

void WriteMemory(const v1::PlanEstimate& estimate, Output* output) {
  // In the plan's order; a total after each space.
  std::vector<std::string> spaces;
  std::map<std::string, int64_t> totals;
  for (const v1::MemoryEstimate& row : estimate.memory()) {
    if (!totals.contains(row.space())) spaces.push_back(row.space());
    totals[row.space()] += row.bytes();
  }
  Table table({"SPACE", "ITEM", "BYTES"});
  for (const std::string& space : spaces) {
    for (const v1::MemoryEstimate& row : estimate.memory()) {
      if (row.space() == space) table.AddRow({space, row.item(), FormatBytes(row.bytes())});
    }
    table.AddRow({space, "total", FormatBytes(totals[space])});
  }
  table.Write(output);
}

std::string UpdateCost(const v1::Plan& plan) {
  const std::string extra = FormatBytes(plan.estimate().deferred_extra_bytes());
  if (plan.update_mode() == v1::UPDATE_MODE_DEFERRED) {
    return "deferred: clipping or accumulation keeps the whole gradient, " + extra +
           " more host memory than overlapped updates";
  }
  return "overlapped: clipping or accumulation would take " + extra + " more host memory";
}

std::string KeptActivations(const v1::Plan& plan) {
  const int layers = plan.layers_size();
  int mixers = 0, mixtures = 0;
  for (const v1::LayerPlan& layer : plan.layers()) {
    mixers += layer.retain_mixer();
    mixtures += layer.retain_mixture();
  }
  if (mixers + mixtures == 0) return "every layer in backward";
  if (mixers == layers && mixtures == layers) return "nothing: all activations are kept";
  return "the mixers of " + std::to_string(layers - mixers) + " and the mixtures of " +
         std::to_string(layers - mixtures) + " of " + Grouped(layers) +
         " layers; the others' activations are kept";
}

}  // namespace

void WritePlan(const v1::Job& job, Output* output) {
  const v1::Plan& plan = job.plan();
  switch (output->form()) {
    case OutputForm::kJson:
      output->Line(MessageToJson(plan, true));
      return;
    case OutputForm::kJsonl:
      output->Line(MessageToJson(plan, false));
      return;
    case OutputForm::kYaml:
      output->data() << MessageToYaml(plan) << std::flush;
      return;
    case OutputForm::kTable:
    case OutputForm::kWide:
    case OutputForm::kName:
      break;
  }
  const v1::ModelDescription& model = job.model();
  output->Line("Model:      " + Name(model.family()) + ", " + Grouped(model.layer_count()) +
               (model.layer_count() == 1 ? " layer, " : " layers, ") +
               Grouped(model.parameter_count()) + " parameters");
  int streamed = 0;
  for (const v1::UnitPlan& unit : plan.units()) streamed += unit.home() == v1::STATE_HOME_STREAMED;
  output->Line("Path:       " + Name(plan.path()) + ", " + std::to_string(plan.rank_count()) +
               (plan.rank_count() == 1 ? " rank, " : " ranks, ") + Name(plan.precision()));
  output->Line("Units:      " + std::to_string(streamed) + " streamed, " +
               std::to_string(plan.units_size() - streamed) + " resident");
  output->Line("Replay:     " + KeptActivations(plan));
  output->Line("Updates:    " + UpdateCost(plan));
  const v1::PlanEstimate& estimate = plan.estimate();
  output->Line("Peak:       " + FormatBytes(estimate.host_bytes_peak()) + " host, " +
               FormatBytes(estimate.device_bytes_peak()) + " a device");
  output->Line("Disk:       " + FormatBytes(estimate.checkpoint_disk_bytes()) + " for checkpoints");
  output->Line(
      "Step:       at least " + FormatNumber(estimate.step_seconds_lower_bound(), 4) + " s" +
      (estimate.step_seconds() > 0 ? ", expected " + FormatNumber(estimate.step_seconds(), 4) + " s"
                                   : ""));
  output->Line("");
  WriteMemory(estimate, output);
  output->Line("");
  Table resources({"RESOURCE", "SECONDS A STEP", "BYTES A STEP"});
  for (const v1::ResourceEstimate& row : estimate.resources()) {
    resources.AddRow({row.resource(), FormatNumber(row.seconds(), 4), FormatBytes(row.bytes())});
  }
  resources.Write(output);
  if (output->form() != OutputForm::kWide) return;
  output->Line("");
  Table units({"UNIT", "HOME", "DELIVERY", "NUMA"});
  for (const v1::UnitPlan& unit : plan.units()) {
    units.AddRow(
        {unit.unit(), Name(unit.home()), Name(unit.delivery()), std::to_string(unit.numa_node())});
  }
  units.Write(output);
}

}  // namespace oom
