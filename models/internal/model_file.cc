#include "models/internal/model_file.h"

#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/budget.h"
#include "core/error.h"
#include "core/ranges.h"
#include "core/threads.h"
#include "models/internal/builder.h"
#include "models/internal/model_file_ops.h"
#include "models/internal/order.h"
#include "models/internal/substitute.h"

namespace shardwright {
namespace {

constexpr std::int64_t kVersion = 1;
// Modules, ops and iterations when repeats are written out: of a user's file, and of a template,
// whose 10,000 layers may have 60 each.
constexpr std::size_t kLargestExpansion = 200'000;
constexpr std::size_t kLargestOfTemplate = 600'000;
constexpr std::size_t kDeepestRepeat = 8;
// Bytes of names and shapes when repeats are written out: each may be as long as the file.
constexpr std::int64_t kMostNames = std::int64_t{64} << 20;
// What ops of the kind "other" list, when repeats are written out: about 150 bytes each.
constexpr std::int64_t kMostLaunches = 1'000'000;

// An op entry for one iteration of the repeats around it.
struct ExpandedOp {
  JsonValue json;
  LoopValues loops;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
};

class FileReader {
 public:
  FileReader(const JsonValue& file, const std::string& name, const LoadOptions& options,
             const TemplateSource* source)
      : file_(file),
        options_(options),
        source_(source),
        names_budget_(file.path().str(), "bytes of names when repeats are written out", kMostNames),
        launches_budget_(file.path().str(),
                         "launches and kept tensors when repeats are written out", kMostLaunches),
        builder_(source != nullptr ? source->config : file.path().str(), name, "custom",
                 TextOr(file, "class", "Module")) {}

  Model Read() {
    file_.AllowOnly({"format", "version", "_source", "class", "block_class", "sequence_length",
                     "image_size", "fixed_length", "tokens_per_sample", "inputs", "params",
                     "buffers", "modules", "ops"});
    (void)file_.At("format").AsChoice({"shardwright-model"});
    if (file_.At("version").AsInt() != kVersion) {
      throw file_.At("version").Error("version 1, the only one that this program knows");
    }
    ReadSizes();
    LoopValues loops;
    modules_.emplace("", ModelBuilder::Root());
    ReadOwn(file_, ModelBuilder::Root(), loops);
    ReadModules(file_.At("modules"), ModelBuilder::Root(), loops);
    ReadInputs(file_.At("inputs"));
    ExpandOps(file_.At("ops"), loops);
    CheckOrder();
    for (const ExpandedOp& op : ops_) {
      ThrowIfStopped();
      AddOp(op);
    }
    CheckParamsAreUsed();
    CheckLength();
    Model model = builder_.Finish();
    model.block_classes = BlockClasses();
    model.sequence_length = sizes_.sequence_length;
    const std::optional<JsonValue> tokens = file_.Find("tokens_per_sample");
    model.tokens_per_sample = tokens ? Dimension(*tokens, 2 * ModelLimits::kTokens)
                                     : std::max<std::int64_t>(sizes_.sequence_length, 1);
    ValidateModel(model, file_.path().str());
    return model;
  }

 private:
  static std::string TextOr(const JsonValue& json, std::string_view key, std::string fallback) {
    const std::optional<JsonValue> value = json.Find(key);
    return value ? value->AsString() : std::move(fallback);
  }

  // A name, or a list of names where the layers are of several classes.
  std::vector<std::string> BlockClasses() {
    const std::optional<JsonValue> value = file_.Find("block_class");
    std::vector<std::string> classes;
    if (value && value->IsArray()) {
      for (std::size_t i = 0; i < value->size(); ++i) {
        classes.push_back((*value)[i].AsString());
      }
    } else if (value && !value->AsString().empty()) {
      classes.push_back(value->AsString());
    }
    std::erase_if(classes, IsContainer);
    return classes;
  }

  std::string Text(const JsonValue& value, const LoopValues& loops) {
    std::optional<std::string> text = Substitute(value.AsString(), loops);
    if (!text) {
      throw InputError(value.path().str(), '"' + value.AsString() + '"',
                       "loop variables in braces, such as {i} or {i+1}, of a repeat around it");
    }
    CountName(*text);
    return *std::move(text);
  }

  // Each is kept in a table besides.
  void CountName(const std::string& name) {
    constexpr std::int64_t kEntry = 32;
    names_budget_.Take(kEntry + std::ssize(name));
  }

  static bool Flag(const JsonValue& json, std::string_view key) {
    const std::optional<JsonValue> value = json.Find(key);
    return value && value->AsBool();
  }

  // The caller's size, or the file's; a file without the key has no such size.
  std::int64_t ReadSize(std::string_view key, std::int64_t wanted, std::int64_t max) const {
    const std::optional<JsonValue> value = file_.Find(key);
    const std::int64_t size = value ? value->AsInt(1, max) : 0;
    if (wanted < 0 || wanted > max) {
      throw InputError(key, std::to_string(wanted), "1 to " + std::to_string(max));
    }
    return value && wanted > 0 ? wanted : size;
  }

  void ReadSizes() {
    sizes_.sequence_length =
        ReadSize("sequence_length", options_.sequence_length, ModelLimits::kTokens);
    sizes_.image_size = ReadSize("image_size", options_.image_size, ModelLimits::kPixels);
  }

  // Another length than the file's must change something, and the file may say why it cannot.
  void CheckLength() const {
    const std::optional<JsonValue> value = file_.Find("sequence_length");
    if (!value || sizes_.sequence_length == value->AsInt()) {
      return;
    }
    const std::optional<JsonValue> reason = file_.Find("fixed_length");
    if (!reason && sizes_.reads_sequence_length) {
      return;
    }
    throw InputError(
        value->path().str(), std::to_string(sizes_.sequence_length) + " asked for",
        "its own length " + std::to_string(value->AsInt()) + ": " +
            (reason ? reason->AsString() : "no size of the file depends on sequence_length"),
        "export the model at the other length");
  }

  std::int64_t Dimension(const JsonValue& value, std::int64_t max) {
    return EvaluateSize(value, sizes_, 1, max);
  }

  // Calls `each` once per iteration of the entry's "repeat", or once when it has none.
  template <class Each>
  void Repeat(const JsonValue& entry, LoopValues& loops, const Each& each) {
    const std::optional<JsonValue> repeat = entry.Find("repeat");
    if (!repeat) {
      each();
      return;
    }
    const std::int64_t count = repeat->AsInt(1, ModelLimits::kLayers);
    const std::optional<JsonValue> from = entry.Find("from");
    const std::int64_t first = from ? from->AsInt(0, ModelLimits::kLayers) : 0;
    if (loops.size() == kDeepestRepeat) {
      throw repeat->Error("at most " + std::to_string(kDeepestRepeat) + " nested repeats");
    }
    loops.emplace_back(TextOr(entry, "index", "i"), 0);
    for (std::int64_t i = first; i < first + count; ++i) {
      CountExpansion(entry);
      loops.back().second = i;
      each();
    }
    loops.pop_back();
  }

  void CountExpansion(const JsonValue& entry) {
    ThrowIfStopped();
    const std::size_t most = source_ == nullptr ? kLargestExpansion : kLargestOfTemplate;
    if (++expanded_ > most) {
      throw InputError(entry.path().str(),
                       "more than " + std::to_string(most) +
                           " modules, ops and iterations when repeats are written out",
                       "fewer");
    }
  }

  // What an entry of a template repeats: its own, or what the first one with its number has.
  const JsonValue& BodyOf(const JsonValue& entry) {
    const std::optional<JsonValue> number = source_ == nullptr ? std::nullopt : entry.Find("body");
    return number ? bodies_.try_emplace(number->AsInt(), entry).first->second : entry;
  }

  void ReadModules(const JsonValue& list, ModuleId parent, LoopValues& loops) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      const JsonValue entry = list[i];
      const JsonValue& body = BodyOf(entry);
      body.AllowOnly({"name", "class", "params", "buffers", "full_precision", "modules", "same_as",
                      "repeat", "index", "from", source_ == nullptr ? "from" : "body"});
      Repeat(entry, loops, [&] { ReadModule(body, parent, loops); });
    }
  }

  void ReadModule(const JsonValue& entry, ModuleId parent, LoopValues& loops) {
    CountExpansion(entry);
    const JsonValue name = entry.At("name");
    const std::string text = Text(name, loops);
    if (text.empty() || text.find('.') != std::string::npos) {
      throw name.Error("a name without dots");
    }
    const std::string class_name = entry.At("class").AsString();
    CountName(class_name);
    const ModuleId module = builder_.AddModule(parent, text, class_name);
    const std::string& fqn = builder_.model().modules[module.value].fqn;
    CountName(fqn);
    if (!modules_.emplace(fqn, module).second) {
      throw InputError(name.path().str(), '"' + text + "\" a second time", "unique names");
    }
    if (const std::optional<JsonValue> first = entry.Find("same_as")) {
      const ModuleId id = ModuleNamed(*first, loops);
      builder_.model().modules[module.value].same_as = id;
    }
    ReadOwn(entry, module, loops);
    if (const std::optional<JsonValue> children = entry.Find("modules")) {
      ReadModules(*children, module, loops);
    }
  }

  // What the module holds itself; also of the root.
  void ReadOwn(const JsonValue& entry, ModuleId module, LoopValues& loops) {
    if (const std::optional<JsonValue> buffers = entry.Find("buffers")) {
      builder_.AddBuffer(module, buffers->AsInt());
    }
    if (const std::optional<JsonValue> params = entry.Find("params")) {
      for (std::size_t i = 0; i < params->size(); ++i) {
        const JsonValue param = (*params)[i];
        ReadParam(param, module, Flag(entry, "full_precision"), loops);
      }
    }
  }

  // A parameter of the file, read once for all repeats around it.
  struct FileParam {
    JsonValue json, name;
    std::optional<JsonValue> tied_to;
    std::vector<std::int64_t> shape;
    bool is_frozen = false;
    bool is_unused = false;  // it never gets a gradient, which not every framework bears
  };

  void ReadParam(const JsonValue& entry, ModuleId module, bool full_precision, LoopValues& loops) {
    std::vector<FileParam> params;
    const std::optional<JsonValue> group = entry.Find("params");
    if (group) {
      entry.AllowOnly(
          {"repeat", "index", "from", "params", source_ == nullptr ? "params" : "body"});
      (void)entry.At("repeat");
    }
    for (std::size_t i = 0; i < (group ? group->size() : 1); ++i) {
      params.push_back(ParseParam(group ? (*group)[i] : entry));
    }
    Repeat(entry, loops, [&] {
      for (const FileParam& param : params) {
        AddParam(param, module, full_precision, loops);
      }
    });
  }

  static FileParam ParseParam(const JsonValue& entry) {
    entry.AllowOnly({"name", "shape", "frozen", "unused", "tied_to"});
    FileParam param{.json = entry,
                    .name = entry.At("name"),
                    .tied_to = entry.Find("tied_to"),
                    .shape = {},
                    .is_frozen = Flag(entry, "frozen"),
                    .is_unused = Flag(entry, "unused")};
    if (!param.tied_to) {
      const JsonValue shape = entry.At("shape");
      for (std::size_t i = 0; i < shape.size(); ++i) {
        param.shape.push_back(shape[i].AsInt(1, ModelLimits::kVocabulary));
      }
    }
    return param;
  }

  void AddParam(const FileParam& read, ModuleId module, bool full_precision,
                const LoopValues& loops) {
    const std::string name = Text(read.name, loops);
    names_budget_.Take(static_cast<std::int64_t>(read.shape.size() * sizeof(std::int64_t)));
    const ParamId id = read.tied_to ? ReadTied(read.json, *read.tied_to, module, name, loops)
                                    : builder_.AddParam(module, name, read.shape);
    Parameter& param = builder_.model().params[id.value];
    param.full_precision = full_precision;
    if (!read.tied_to) {
      param.trainable = !read.is_frozen;
    }
    if (read.is_unused && !read.tied_to) {
      MarkUsed(id);
    }
    CountName(param.fqn);
    if (!params_.emplace(param.fqn, id).second) {
      throw InputError(read.json.path().str(), '"' + param.fqn + "\" a second time",
                       "unique names");
    }
  }

  ParamId ReadTied(const JsonValue& entry, const JsonValue& target, ModuleId module,
                   const std::string& name, const LoopValues& loops) {
    const std::string fqn = Text(target, loops);
    const auto found = params_.find(fqn);
    if (found == params_.end()) {
      throw InputError(target.path().str(), '"' + fqn + '"', "the name of an earlier parameter",
                       DidYouMean(fqn, ParamNames()));
    }
    if (entry.Find("shape") || entry.Find("frozen")) {
      throw InputError(entry.path().str(), "a tied parameter with a shape or a frozen flag",
                       "neither; both are those of \"" + fqn + '"');
    }
    const ParamId id = builder_.AddTied(module, name, found->second);
    std::vector<Parameter>& params = builder_.model().params;
    params[id.value].trainable = params[params[id.value].tied_to.value].trainable;
    return id;
  }

  [[nodiscard]] std::vector<std::string> ParamNames() const {
    std::vector<std::string> names;
    for (const auto& [name, id] : params_) {
      names.push_back(name);
    }
    SortAll(names);
    return names;
  }

  void ReadInputs(const JsonValue& inputs) {
    for (const std::string& name : inputs.Keys()) {
      const JsonValue entry = inputs.At(name);
      entry.AllowOnly({"shape", "ids", "positions", "kind"});
      tensors_[name] = AddFileInput(builder_, entry, sizes_);
    }
  }

  void ExpandOps(const JsonValue& list, LoopValues& loops) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      const JsonValue entry = list[i];
      const JsonValue& body = BodyOf(entry);
      if (const std::optional<JsonValue> nested = body.Find("ops")) {
        body.AllowOnly({"repeat", "index", "from", "ops", source_ == nullptr ? "ops" : "body"});
        (void)entry.At("repeat");
        Repeat(entry, loops, [&] { ExpandOps(*nested, loops); });
        continue;
      }
      ExpandOp(entry, loops);
    }
  }

  void ExpandOp(const JsonValue& entry, const LoopValues& loops) {
    CountExpansion(entry);
    const JsonValue kind = entry.At("op");
    if (!IsKnownOp(kind.AsString())) {
      throw InputError(kind.path().str(), kind.Shown(), "an op of docs/model_json.md",
                       DidYouMean(kind.AsString(), KnownOps()));
    }
    ExpandedOp op{.json = entry, .loops = loops, .inputs = {}, .outputs = {}};
    if (const std::optional<JsonValue> inputs = entry.Find("inputs")) {
      for (std::size_t i = 0; i < inputs->size(); ++i) {
        op.inputs.push_back(Text((*inputs)[i], loops));
      }
    }
    if (const std::optional<JsonValue> outputs = entry.Find("outputs")) {
      for (std::size_t i = 0; i < outputs->size(); ++i) {
        op.outputs.push_back(Text((*outputs)[i], loops));
      }
    } else {
      op.outputs.push_back(Text(entry.At("output"), loops));
    }
    const std::size_t expected = kind.AsString() == "rope" ? 2 : 1;
    if (op.outputs.size() != expected && kind.AsString() != "other") {
      throw InputError(entry.path().Field("outputs").str(),
                       std::to_string(op.outputs.size()) + " tensors", std::to_string(expected));
    }
    if (source_ != nullptr) {  // in execution order, and a tensor may be written again
      for (std::size_t i = 0; i < op.inputs.size(); ++i) {
        if (!tensors_.contains(op.inputs[i])) {
          FailUnknown(op, i);
        }
      }
      AddOp(op);
      return;
    }
    for (const std::string& output : op.outputs) {
      if (tensors_.contains(output) || !writers_.emplace(output, ops_.size()).second) {
        throw InputError(entry.path().str(), "a tensor \"" + output + "\" that exists already",
                         "a new name; each tensor has one producer");
      }
    }
    ops_.push_back(std::move(op));
  }

  [[noreturn]] void FailUnknown(const ExpandedOp& op, std::size_t input) const {
    throw InputError(op.json.path().Field("inputs").Index(input).str(),
                     '"' + op.inputs[input] + '"', "an input of the model or the output of an op",
                     DidYouMean(op.inputs[input], TensorNames()));
  }

  // Names every tensor that nothing defines, then a cycle or disorder.
  void CheckOrder() const {
    Model skeleton;
    skeleton.modules.emplace_back();
    std::unordered_map<std::string, TensorId> ids;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      ThrowIfStopped();
      ModelOp op;
      op.module = ModelBuilder::Root();
      op.name = OpName(ops_[i]);
      for (const std::string& output : ops_[i].outputs) {
        ids[output] = TensorId(skeleton.tensors.size());
        op.outputs.push_back(TensorId(skeleton.tensors.size()));
        skeleton.tensors.push_back(
            {.role = TensorRole::kActivation, .elements = 1, .producer = ModelOpId(i)});
      }
      skeleton.ops.push_back(std::move(op));
    }
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      for (std::size_t k = 0; k < ops_[i].inputs.size(); ++k) {
        const std::string& input = ops_[i].inputs[k];
        if (const auto found = ids.find(input); found != ids.end()) {
          skeleton.ops[i].inputs.push_back(found->second);
        } else if (!tensors_.contains(input)) {
          FailUnknown(ops_[i], k);
        }
      }
    }
    CheckExecutionOrder(skeleton, file_.path().Field("ops").str());
  }

  // For messages about order: the output tells an op apart even where names repeat.
  [[nodiscard]] static std::string OpName(const ExpandedOp& op) {
    return op.json.At("op").AsString() + " -> " + op.outputs[0];
  }

  [[nodiscard]] std::vector<std::string> TensorNames() const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) {
      names.push_back(name);
    }
    for (const auto& [name, writer] : writers_) {
      names.push_back(name);
    }
    SortAll(names);
    return names;
  }

  [[nodiscard]] ModuleId FindModuleOf(const ExpandedOp& op) {
    const std::optional<JsonValue> value = op.json.Find("module");
    return value ? ModuleNamed(*value, op.loops) : ModelBuilder::Root();
  }

  [[nodiscard]] ModuleId ModuleNamed(const JsonValue& value, const LoopValues& loops) {
    const std::string fqn = Text(value, loops);
    const auto found = modules_.find(fqn);
    if (found == modules_.end()) {
      std::vector<std::string> names;
      for (const auto& [name, id] : modules_) {
        names.push_back(name);
      }
      SortAll(names);
      throw InputError(value.path().str(), '"' + fqn + '"', "the name of a module",
                       DidYouMean(fqn, names));
    }
    return found->second;
  }

  [[nodiscard]] std::vector<ParamId> FindParams(const ExpandedOp& op, ModuleId module) {
    const std::optional<JsonValue> names = op.json.Find("params");
    if (!names && TakesParams(op.json.At("op").AsString())) {
      const std::vector<ParamId>& all = builder_.model().modules[module.value].params;
      names_budget_.Take(std::ssize(all) * static_cast<std::int64_t>(sizeof(ParamId)));
      return all;
    }
    if (!names) {
      return {};
    }
    std::vector<ParamId> params;
    for (std::size_t i = 0; i < names->size(); ++i) {
      const std::string fqn = Text((*names)[i], op.loops);
      const auto found = params_.find(fqn);
      if (found == params_.end()) {
        throw InputError((*names)[i].path().str(), '"' + fqn + '"', "the name of a parameter",
                         DidYouMean(fqn, ParamNames()));
      }
      params.push_back(found->second);
    }
    return params;
  }

  // The given name, or the module's for a layer and the kind otherwise; numbered when taken.
  std::string UniqueName(const ExpandedOp& op, ModuleId module, bool is_layer) {
    const std::string& layer = builder_.model().modules[module.value].name;
    std::string name = is_layer && !layer.empty() ? layer : op.json.At("op").AsString();
    if (const std::optional<JsonValue> given = op.json.Find("name")) {
      name = Text(*given, op.loops);
    }
    const int count = ++names_[std::to_string(module.value) + ' ' + name];
    return count == 1 ? name : name + '_' + std::to_string(count);
  }

  void CountLaunches(const ExpandedOp& op) {
    for (const char* key : {"forward", "backward_data", "backward_weight", "saved"}) {
      if (const std::optional<JsonValue> list = op.json.Find(key)) {
        launches_budget_.Take(static_cast<std::int64_t>(list->size()));
      }
    }
  }

  void AddOp(const ExpandedOp& expanded) {
    CountLaunches(expanded);
    const ModuleId module = FindModuleOf(expanded);
    FileOp op{.json = expanded.json,
              .module = module,
              .name = {},
              .inputs = {},
              .params = FindParams(expanded, module),
              .output_count = expanded.outputs.size(),
              .sizes = &sizes_,
              .angles = source_ == nullptr ? nullptr : &source_->angles};
    op.name = UniqueName(expanded, module, !op.params.empty());
    for (const std::string& input : expanded.inputs) {
      op.inputs.push_back(tensors_.at(input));
    }
    for (const ParamId id : op.params) {
      MarkUsed(id);
    }
    const std::size_t before = builder_.model().ops.size();
    const std::vector<FileTensor> outputs = AddFileOp(builder_, op);
    MarkCall(expanded, before);
    MarkReturns(expanded, before);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      tensors_[expanded.outputs[i]] = outputs[i];
    }
  }

  void MarkCall(const ExpandedOp& op, std::size_t first) {
    const std::optional<JsonValue> module = op.json.Find("called_again");
    if (!module) {
      return;
    }
    if (builder_.model().ops.size() == first) {
      throw InputError(module->path().str(), op.json.At("op").Shown() + ", of which no op is made",
                       "the first op of the call");
    }
    builder_.model().ops[first].called_again = ModuleNamed(*module, op.loops);
  }

  void MarkReturns(const ExpandedOp& op, std::size_t first) {
    const std::optional<JsonValue> modules = op.json.Find("returns_input");
    if (!modules) {
      return;
    }
    std::vector<ModelOp>& ops = builder_.model().ops;
    if (ops.size() == first) {
      throw InputError(modules->path().str(), op.json.At("op").Shown() + ", of which no op is made",
                       "the last op of the call");
    }
    for (std::size_t i = 0; i < modules->size(); ++i) {
      ops.back().returns_input.push_back(ModuleNamed((*modules)[i], op.loops));
    }
  }

  // A tied parameter is read when its storage is, under whatever name.
  [[nodiscard]] std::size_t StorageOf(ParamId id) const {
    const ParamId tied_to = builder_.model().params[id.value].tied_to;
    return tied_to.valid() ? tied_to.value : id.value;
  }

  void MarkUsed(ParamId id) {
    used_.resize(std::max(used_.size(), builder_.model().params.size()));
    used_[StorageOf(id)] = true;
  }

  void CheckParamsAreUsed() {
    const std::vector<Parameter>& params = builder_.model().params;
    used_.resize(params.size());
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!used_[StorageOf(ParamId(i))]) {
        throw InputError(file_.path().Field("ops").str(),
                         "no op that reads parameter \"" + params[i].fqn + '"', "at least one");
      }
    }
  }

  const JsonValue& file_;
  const LoadOptions& options_;
  const TemplateSource* source_;  // null: a user's file
  Budget names_budget_;
  Budget launches_budget_;
  ModelBuilder builder_;
  FileSizes sizes_;
  std::size_t expanded_ = 0;
  std::map<std::int64_t, JsonValue> bodies_;
  std::vector<ExpandedOp> ops_;
  std::unordered_map<std::string, ModuleId> modules_;
  std::unordered_map<std::string, ParamId> params_;
  std::unordered_map<std::string, FileTensor> tensors_;
  std::unordered_map<std::string, std::size_t> writers_;
  std::unordered_map<std::string, int> names_;  // ops by the number of their module and their name
  std::vector<bool> used_;  // per parameter, those of ties at the one whose storage they are
};

}  // namespace

Model ReadModelFile(const JsonValue& file, const std::string& name, const LoadOptions& options,
                    const TemplateSource* source) {
  return FileReader(file, name, options, source).Read();
}

}  // namespace shardwright
