// LLaMA-Factory's version 1: its own trainer, with plugins for what is sharded, adapted and
// quantized (src/llamafactory/v1).

#include <algorithm>
#include <string>
#include <utility>

#include "planner/importers/read_adapters.h"
#include "planner/importers/read_trainer.h"
#include "planner/importers/setting_keys.h"

namespace shardwright {
namespace {

// A plugin's table, or its name alone; null: none.
std::optional<JsonValue> PluginOf(const JsonValue& root, const char* key) {
  auto table = root.Find(key);
  return table && table->IsObject() ? std::move(table) : std::nullopt;
}

std::string NameOf(const std::optional<JsonValue>& plugin) {
  const auto name = plugin ? plugin->Find("name") : std::nullopt;
  return name ? name->AsString() : "";
}

[[noreturn]] void Refuse(const JsonValue& plugin, const std::string& expected) {
  const JsonValue name = plugin.At("name");
  throw name.Error(expected + ", since " + name.AsString() + " cannot be predicted");
}

// bitsandbytes' 4 bits are the only ones that train.
FrozenFormat BaseOf(const std::optional<JsonValue>& quant) {
  if (!quant) {
    return FrozenFormat::kParam;
  }
  if (NameOf(quant) != "bnb" && NameOf(quant) != "auto") {
    Refuse(*quant, "bnb or auto");
  }
  const auto bits = quant->Find("quantization_bit");
  if (bits && bits->AsInt(0, 64) != 4) {
    throw bits->Error("4, since weights in other numbers of bits cannot be predicted");
  }
  const auto twice = quant->Find("double_quantization");
  return !bits && NameOf(quant) == "auto" ? FrozenFormat::kParam
         : twice && !twice->AsBool()      ? FrozenFormat::kNf4
                                          : FrozenFormat::kNf4Double;
}

void ReadSharding(const JsonValue& root, TrainerFile& file) {
  TrainerSettings& s = file.result.settings;
  const auto dist = PluginOf(root, "dist_config");
  if (!dist) {
    return;
  }
  if (NameOf(dist) == "deepspeed") {
    s.deepspeed = dist->At("config_file").AsString();
  } else if (NameOf(dist) == "fsdp2") {
    s.fsdp = true;
    s.version = 2;
    s.auto_wrap_policy = "TRANSFORMER_BASED_WRAP";
    const auto reshard = dist->Find("reshard_after_forward");
    s.reshard_after_forward = !reshard || reshard->AsBool();
    const auto offload = dist->Find("offload_params");
    s.cpu_offload = offload && offload->AsBool();
  } else {
    Refuse(*dist, "fsdp2 or deepspeed");
  }
}

void ReadLayers(const JsonValue& root, TrainerFile& file) {
  const auto kernels = PluginOf(root, "kernel_config");
  if (const std::string name = NameOf(kernels); name == "liger_kernel") {
    file.result.settings.use_liger_kernel = true;
  } else if (name == "auto") {  // of GPUs: those that the machine has installed
    file.script.assumed.push_back({"kernel_config.name", "PyTorch's own kernels"});
  } else if (kernels) {
    Refuse(*kernels, "auto or liger_kernel");
  }
  const auto quant = PluginOf(root, "quant_config");
  const auto peft = PluginOf(root, "peft_config");
  if (!peft && BaseOf(quant) != FrozenFormat::kParam) {
    Refuse(*quant, "a peft_config beside it");
  }
  if (NameOf(peft) == "freeze") {
    if (BaseOf(quant) != FrozenFormat::kParam) {
      Refuse(*quant, "adapters above it");
    }
    file.script.layers = ReadLearningLayers(*peft);
    return;
  }
  if (peft && NameOf(peft) != "lora") {
    Refuse(*peft, "lora or freeze");
  }
  if (peft) {
    if (const auto given = peft->Find("adapter_name_or_path")) {
      throw given->Error("no such key, since adapters that are trained before are not read");
    }
    file.script.adapters = ReadAdapters(*peft, "llamafactory-v1", BaseOf(quant));
  }
}

}  // namespace

TrainerFile ReadLlamaFactoryV1(const JsonValue& root) {
  TrainerFile file;
  file.result =
      ReadSettings<TrainerSettings>(root, TrainerRows(), SettingKeys::Of("llamafactory-v1"));
  TrainerSettings& s = file.result.settings;
  ReadSharding(root, file);
  ReadLayers(root, file);
  if (const auto optimizer = PluginOf(root, "optim_config")) {
    throw optimizer->At("name").Error("no optim_config, since the optimizer " + NameOf(optimizer) +
                                      " cannot be predicted");
  }
  const auto assume = [&](auto& slot, auto value, const char* key, const char* text) {
    if (!slot) {
      slot = value;
      file.script.assumed.push_back({key, text});
    }
  };
  assume(s.per_device_train_batch_size, 1, "micro_batch_size", "1");
  assume(s.bf16, true, "bf16", "true");
  assume(s.gradient_checkpointing, true, "enable_activation_checkpointing", "true");
  s.optim = "adamw_torch";
  s.sync_each_batch = true;
  file.script.context_method = ContextMethod::kUlysses;
  constexpr double kDecay = 0.01;  // torch.optim.AdamW's own
  s.weight_decay = kDecay;
  constexpr std::int64_t kMost = std::int64_t{1} << 30, kCutoff = 2048;
  const auto cutoff = root.Find("cutoff_len");
  file.script.sequence_length = cutoff ? cutoff->AsInt(1, kMost) : kCutoff;
  const auto batch = root.Find("global_batch_size");
  file.script.global_batch = batch ? batch->AsInt(1, kMost) : 0;
  file.script.model = root.At("model").AsString();
  const auto attention = root.Find("flash_attn");
  file.script.attention = attention && attention->AsString() == "eager" ? "materialized" : "";
  file.script.has_bf16_weights = true;
  file.script.is_llamafactory_v1 = file.script.recomputes_by_itself = true;
  return file;
}

}  // namespace shardwright
