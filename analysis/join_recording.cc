// Which op of a program each collective of a foreign recording is.

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "analysis/recording_steps.h"
#include "core/error.h"
#include "core/json.h"

namespace shardwright {
namespace {

constexpr std::string_view kRoot = "root";  // what programs call what no other unit has
constexpr std::size_t kMostFindings = 20;

std::string WithoutWrappers(std::string_view name) {
  std::string text = "." + std::string(name);
  for (const std::string_view part :
       {".module", "._fsdp_wrapped_module", "._checkpoint_wrapped_module", "._orig_mod"}) {
    std::size_t at = 0;
    while ((at = text.find(part, at)) != std::string::npos) {
      const std::size_t end = at + part.size();
      if (end == text.size() || text[end] == '.') {
        text.erase(at, part.size());
      } else {
        at = end;
      }
    }
  }
  return text.empty() ? text : text.substr(1);
}

Phase PassOf(Phase phase) {
  return phase == Phase::kRecompute ? Phase::kBackward : phase;
}

// What a collective is, apart from its place in order.
struct Key {
  OpCode code = OpCode::kAllGather;
  std::uint32_t unit = kNoSubject;
  std::uint32_t micro_batch = 0;
  Phase phase = Phase::kForward;

  auto operator<=>(const Key&) const = default;
};

class Joiner {
 public:
  Joiner(const Program& program, const ProfilerRecording& recording, RecordingJoin& result)
      : program_(program), recording_(recording), result_(result) {
    for (std::size_t i = 0; i < program.step.size(); ++i) {
      const Op& op = program.step.ops[i];
      const OpShape& shape = program.ShapeOf(op);
      if (InfoOf(shape.code).is_collective && shape.code != OpCode::kBarrier &&
          program.groups[shape.group.value].size > 1) {
        ops_.push_back({{shape.code, op.subject, op.micro_batch, PassOf(op.phase)}, OpId(i)});
      }
    }
    for (const std::string& unit : recording.units) {
      units_.push_back(FindUnit(program, unit));
    }
  }

  void Run(const std::vector<RecordingStep>& steps) {
    std::map<OpId, RecordingJoin::Collective> found;
    for (const RecordingStep& step : steps) {
      JoinStep(step, found);
    }
    for (auto& [op, collective] : found) {
      collective.seconds /= static_cast<double>(collective.count);
      result_.collectives.push_back(collective);
    }
    CheckUnits();
    CheckBytes();
  }

 private:
  struct ProgramRow {
    Key key;
    OpId op;
  };
  struct RecordedRow {
    Key key;
    const Activity* activity = nullptr;
  };

  void JoinStep(const RecordingStep& step, std::map<OpId, RecordingJoin::Collective>& found) {
    std::vector<RecordedRow> rows;
    for (const Activity& activity : recording_.activities) {
      if (activity.step == step.step && activity.kind == ActivityKind::kCollective &&
          activity.collective != OpCode::kBarrier) {
        const std::uint32_t unit = activity.unit == kNoSubject ? kNoSubject : units_[activity.unit];
        rows.push_back(
            {{activity.collective, unit, activity.micro_batch, activity.phase}, &activity});
      }
    }
    std::stable_sort(rows.begin(), rows.end(), [](const RecordedRow& a, const RecordedRow& b) {
      return a.activity->issue_begin < b.activity->issue_begin;
    });
    result_.recorded += std::ssize(rows);
    std::vector<ProgramRow> ops = ops_;
    if (recording_.has_units) {
      Pair(rows, ops, found, [](const Key& key) { return key; });
    }
    const auto kind_of = [](const Key& key) { return Key{key.code, kNoSubject, 0, {}}; };
    if (std::ssize(rows) > 0 || !ops.empty()) {
      PairKinds(rows, ops, found, kind_of);
    }
    Report(step, rows, ops);
  }

  // Pairs what has equal keys, in order, and leaves the rest.
  template <class KeyOf>
  void Pair(std::vector<RecordedRow>& rows, std::vector<ProgramRow>& ops,
            std::map<OpId, RecordingJoin::Collective>& found, KeyOf key_of) {
    std::map<Key, std::vector<const ProgramRow*>> open;
    for (auto it = ops.rbegin(); it != ops.rend(); ++it) {
      open[key_of(it->key)].push_back(&*it);
    }
    std::vector<RecordedRow> left;
    std::set<OpId> taken;
    for (const RecordedRow& row : rows) {
      auto& list = open[key_of(row.key)];
      if (list.empty()) {
        left.push_back(row);
        continue;
      }
      const OpId op = list.back()->op;
      list.pop_back();
      taken.insert(op);
      RecordingJoin::Collective& collective = found[op];
      collective.op = op;
      collective.seconds += ToSeconds(row.activity->end - row.activity->start).value;
      ++collective.count;
      collective.bytes = row.activity->bytes;
      ++result_.matched;
    }
    rows = std::move(left);
    std::erase_if(ops, [&](const ProgramRow& row) { return taken.contains(row.op); });
  }

  // Kinds with as many recorded ones as the program has.
  template <class KeyOf>
  void PairKinds(std::vector<RecordedRow>& rows, std::vector<ProgramRow>& ops,
                 std::map<OpId, RecordingJoin::Collective>& found, KeyOf kind_of) {
    std::array<std::ptrdiff_t, kOpCodeCount> difference{};
    for (const RecordedRow& row : rows) {
      ++difference[static_cast<std::size_t>(row.key.code)];
    }
    for (const ProgramRow& row : ops) {
      --difference[static_cast<std::size_t>(row.key.code)];
    }
    const auto is_uneven = [&](const auto& row) {
      return difference[static_cast<std::size_t>(row.key.code)] != 0;
    };
    std::vector<RecordedRow> uneven_rows;
    std::vector<ProgramRow> uneven_ops;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(uneven_rows), is_uneven);
    std::copy_if(ops.begin(), ops.end(), std::back_inserter(uneven_ops), is_uneven);
    std::erase_if(rows, is_uneven);
    std::erase_if(ops, is_uneven);
    Pair(rows, ops, found, kind_of);
    rows = std::move(uneven_rows);
    ops = std::move(uneven_ops);
  }

  void Add(std::string finding) {
    if (result_.findings.size() < kMostFindings) {
      result_.findings.push_back(std::move(finding));
    }
  }

  void Report(const RecordingStep& step, const std::vector<RecordedRow>& rows,
              const std::vector<ProgramRow>& ops) {
    std::map<OpCode, std::pair<std::int64_t, std::string>> extra, missing;
    for (const RecordedRow& row : rows) {
      auto& [count, example] = extra[row.key.code];
      const Activity& activity = *row.activity;
      if (count++ == 0) {
        example = activity.unit == kNoSubject ? recording_.names[activity.name]
                                              : "of unit \"" + recording_.units[activity.unit] +
                                                    "\", " + std::string(NameOf(activity.phase));
      }
    }
    for (const ProgramRow& row : ops) {
      auto& [count, example] = missing[row.key.code];
      if (count++ == 0) {
        example = OpName(program_, program_.step.ops[row.op.value]);
      }
    }
    const std::string& name = recording_.steps[step.step].name;
    for (const auto& [code, entry] : extra) {
      const std::string text = name + ": " + std::to_string(entry.first) + " " +
                               std::string(InfoOf(code).name) +
                               " that the program does not have, the first one " + entry.second;
      // Training loops add up losses and the like; they gather no weights.
      if (code == OpCode::kAllGather || code == OpCode::kReduceScatter) {
        Add(text);
      } else if (result_.notes.size() < kMostFindings) {
        result_.notes.push_back(text);
      }
    }
    for (const auto& [code, entry] : missing) {
      Add(name + ": " + std::to_string(entry.first) + " " + std::string(InfoOf(code).name) +
          " of the program are missing, the first one " + entry.second);
    }
  }

  void CheckUnits() {
    for (std::size_t i = 0; i < units_.size(); ++i) {
      if (units_[i] == kNoSubject) {
        Add("unit \"" + recording_.units[i] + "\" is not one of the program's");
      }
    }
    const std::int64_t ranks = program_.shard_size * program_.replicate_size;
    if (recording_.ranks > 0 && recording_.ranks != ranks) {
      Add(std::to_string(recording_.ranks) + " ranks recorded, " + std::to_string(ranks) +
          " in the plan");
    }
  }

  void CheckBytes() {
    std::int64_t count = 0;
    std::string example;
    for (const RecordingJoin::Collective& row : result_.collectives) {
      const Op& op = program_.step.ops[row.op.value];
      const Bytes expected = program_.ShapeOf(op).bytes;
      if (row.bytes != Bytes(0) && row.bytes != expected && count++ == 0) {
        example = OpName(program_, op) + ": " + Format(row.bytes) + " recorded, " +
                  Format(expected) + " in the program";
      }
    }
    if (count > 0) {
      Add(std::to_string(count) + " collectives of other sizes, the first one " + example);
    }
  }

  const Program& program_;
  const ProfilerRecording& recording_;
  RecordingJoin& result_;
  std::vector<ProgramRow> ops_;       // in issue order
  std::vector<std::uint32_t> units_;  // of the program, by unit of the recording
};

}  // namespace

std::uint32_t FindUnit(const Program& program, std::string_view name) {
  const std::string wanted = name.empty() ? std::string(kRoot) : WithoutWrappers(name);
  const auto ends_with_part = [](const std::string& text, const std::string& end) {
    return text.size() > end.size() && text.ends_with(end) &&
           text[text.size() - end.size() - 1] == '.';
  };
  std::uint32_t found = kNoSubject;
  std::size_t count = 0;
  for (std::size_t i = 0; i < program.units.size(); ++i) {
    const std::string& unit = program.units[i].name;
    if (unit == wanted) {
      return static_cast<std::uint32_t>(i);
    }
    if (ends_with_part(unit, wanted) || ends_with_part(wanted, unit)) {
      found = static_cast<std::uint32_t>(i);
      ++count;
    }
  }
  // A group of modules is called by all of them ("norm, lm_head"): its first one decides.
  const std::size_t comma = wanted.find(", ");
  if (count == 0 && comma != std::string::npos) {
    return FindUnit(program, wanted.substr(0, comma));
  }
  return count == 1 ? found : kNoSubject;
}

std::vector<SegmentKey> SegmentsOf(const Program& program, bool by_unit) {
  const std::uint32_t root = FindUnit(program, "");
  std::vector<std::uint32_t> unit_of_op;
  for (const std::string& name : program.model_op_names) {
    std::uint32_t unit = root;
    std::size_t longest = 0;
    for (std::size_t i = 0; i < program.units.size(); ++i) {
      const std::string& prefix = program.units[i].name;
      const bool is_inside = name == prefix || name.starts_with(prefix + '.');
      if (is_inside && prefix.size() >= longest) {
        longest = prefix.size();
        unit = static_cast<std::uint32_t>(i);
      }
    }
    unit_of_op.push_back(unit);
  }
  std::vector<SegmentKey> segments;
  segments.reserve(program.step.size());
  for (const Op& op : program.step.ops) {
    const OpCode code = program.ShapeOf(op).code;
    const bool of_model = code == OpCode::kCompute || code == OpCode::kAccumulateGrad;
    SegmentKey key{kNoSubject, 0, PassOf(op.phase)};
    if (key.phase == Phase::kForward || key.phase == Phase::kBackward) {
      key.micro_batch = op.micro_batch;
      if (by_unit && op.subject != kNoSubject) {
        key.unit = of_model ? unit_of_op[op.subject] : op.subject;
      }
    }
    segments.push_back(key);
  }
  return segments;
}

RecordingJoin JoinRecording(const Program& program, const ProfilerRecording& recording,
                            const std::vector<RecordingStep>& steps) {
  RecordingJoin result;
  Joiner(program, recording, result).Run(steps);
  std::vector<std::uint32_t> units;
  result.by_unit = recording.has_units;
  for (const std::string& unit : recording.units) {
    units.push_back(FindUnit(program, unit));
    result.by_unit = result.by_unit && units.back() != kNoSubject;
  }
  std::set<std::uint32_t> counted;
  for (const RecordingStep& step : steps) {
    counted.insert(step.step);
  }
  std::map<std::pair<SegmentKey, OpClass>, double> sums;
  for (const Activity& activity : recording.activities) {
    if (activity.kind != ActivityKind::kKernel || !counted.contains(activity.step)) {
      continue;
    }
    SegmentKey key{kNoSubject, 0, activity.phase};
    if (activity.phase != Phase::kOptimizer) {
      key.micro_batch = activity.micro_batch;
      if (result.by_unit && activity.unit != kNoSubject) {
        key.unit = units[activity.unit];
      }
    }
    sums[{key, ClassOf(activity)}] += ToSeconds(activity.end - activity.start).value;
  }
  for (const auto& [key, seconds] : sums) {
    result.kernels.push_back(
        {key.first, key.second, seconds / static_cast<double>(counted.size())});
  }
  return result;
}

}  // namespace shardwright
