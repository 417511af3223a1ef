#include "planner/importers/read_deepspeed.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "planner/importers/setting_keys.h"

namespace shardwright {
namespace {

using S = DeepSpeedSettings;

constexpr std::string_view kOptimizerDevice = "zero_optimization.offload_optimizer.device";
constexpr std::string_view kParamDevice = "zero_optimization.offload_param.device";

// Deprecated: booleans in place of device "cpu", that of the parameters once with an s.
struct OldKey {
  std::string_view key;
  std::string_view now;
  std::optional<std::string> S::*member;
};
constexpr std::array<OldKey, 3> kOldKeys = {{
    {"zero_optimization.cpu_offload", kOptimizerDevice, &S::offload_optimizer},
    {"zero_optimization.cpu_offload_param", kParamDevice, &S::offload_param},
    {"zero_optimization.cpu_offload_params", kParamDevice, &S::offload_param},
}};

const JsonValue* FindLeaf(const std::vector<Leaf>& leaves, std::string_view key) {
  const auto leaf =
      std::find_if(leaves.begin(), leaves.end(), [&](const Leaf& l) { return l.key == key; });
  return leaf == leaves.end() ? nullptr : &leaf->value;
}

// `said`: the value that a device was read of, or null where none was.
bool IsOnHost(const std::optional<std::string>& device, const JsonValue* said, const S& s) {
  if (!device || *device == "none") {
    return false;
  }
  if (*device != "cpu") {
    throw said->Error("\"cpu\" or \"none\", since nothing else is simulated");
  }
  if (s.stage.value_or(0) < 3) {
    throw said->Error("none, since offload below stage 3 is not simulated");
  }
  return true;
}

// A program has both or the optimizer alone on the host.
void CheckOffload(const S& s, const JsonValue* optimizer, const JsonValue* param) {
  const bool updates_on_host = IsOnHost(s.offload_optimizer, optimizer, s);
  if (IsOnHost(s.offload_param, param, s) && !updates_on_host) {
    throw param->Error(
        "the optimizer on the host, too, since offload of parameters alone is not simulated");
  }
}

// On the host a program has page-locked memory, and updates in one pass.
void CheckOnHost(const S& s, const std::vector<Leaf>& leaves) {
  const auto refuse = [&](const std::optional<std::string>& device,
                          const std::optional<bool>& given, bool refused, std::string_view key,
                          std::string_view expected) {
    if (device == "cpu" && given == refused) {
      throw FindLeaf(leaves, key)->Error(expected);
    }
  };
  constexpr std::string_view kPinned = "true, since copies from pageable memory are not simulated";
  refuse(s.offload_optimizer, s.offload_optimizer_pinned, false,
         "zero_optimization.offload_optimizer.pin_memory", kPinned);
  refuse(s.offload_param, s.offload_param_pinned, false,
         "zero_optimization.offload_param.pin_memory", kPinned);
  refuse(s.offload_optimizer, s.torch_adam, true, "optimizer.params.torch_adam",
         "false beside offload_optimizer, since PyTorch's Adam is not simulated on the host");
}

// DeepSpeed's own optimizers by any case, PyTorch's by their classes' names.
void ReadOptimizer(const JsonValue* type, S& s) {
  if (type == nullptr || !s.optimizer) {
    return;
  }
  const std::string lower = LowerCase(*s.optimizer);
  if (lower == "adam" || lower == "adamw") {
    s.optimizer = lower == "adam" ? "Adam" : "AdamW";
  } else if (lower == "lion") {
    s.optimizer = "Lion";
  } else if (*s.optimizer != "SGD" && *s.optimizer != "Adadelta") {
    throw type->Error("AdamW, Adam, Lion, SGD or Adadelta, since the optimizer " + *s.optimizer +
                      " cannot be predicted");
  }
}

}  // namespace

ReadResult<DeepSpeedSettings> ReadDeepSpeed(const JsonValue& root) {
  ReadResult<S> result = ReadSettings<S>(root, DeepSpeedRows(), SettingKeys::Of("deepspeed"));
  S& s = result.settings;
  if (s.sub_group_size == 0) {
    s.sub_group_size = 1;  // each parameter ends a sub-group either way (stage3.py)
  }
  const std::vector<Leaf> leaves = LeavesOf(root);
  const JsonValue* optimizer = FindLeaf(leaves, kOptimizerDevice);
  const JsonValue* param = FindLeaf(leaves, kParamDevice);
  for (const OldKey& old : kOldKeys) {
    const JsonValue* value = FindLeaf(leaves, old.key);
    if (value == nullptr || !value->AsBool()) {
      continue;
    }
    if (s.*old.member) {
      throw value->Error("one of this and " + std::string(old.now));
    }
    s.*old.member = "cpu";
    (old.now == kParamDevice ? param : optimizer) = value;
  }
  ReadOptimizer(FindLeaf(leaves, "optimizer.type"), s);
  CheckOffload(s, optimizer, param);
  CheckOnHost(s, leaves);
  s.autos = result.autos;
  return result;
}

ReadResult<DeepSpeedSettings> ReadInlineDeepSpeed(const JsonValue& table) {
  ReadResult<S> result =
      ReadSettings<S>(table, DeepSpeedRows(), SettingKeys::Of("accelerate.deepspeed_config"));
  result.settings.autos = {"zero_stage", "gradient_clipping"};
  const std::vector<Leaf> leaves = LeavesOf(table);
  CheckOffload(result.settings, FindLeaf(leaves, "offload_optimizer_device"),
               FindLeaf(leaves, "offload_param_device"));
  return result;
}

}  // namespace shardwright
