// Which op of a program each collective of a foreign recording is.

#include <array>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "analysis/recording_steps.h"
#include "core/json.h"
#include "core/ranges.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

constexpr std::string_view kRoot = "root";  // what programs call what no other unit has
constexpr std::size_t kMostFindings = 20;

// The parts of a name between its dots, but those that wrappers add.
std::string WithoutWrappers(std::string_view name) {
  static constexpr std::array<std::string_view, 4> kWrappers = {
      "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"};
  std::string text;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('.', at), name.size());
    const std::string_view part = name.substr(at, end - at);
    if (!IsIn(kWrappers, part)) {
      text.append(text.empty() ? "" : ".").append(part);
    }
    at = end + 1;
  }
  return text;
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
  // `units`: of the program, by unit of the recording.
  Joiner(const Program& program, const ProfilerRecording& recording,
         const std::vector<std::uint32_t>& units, RecordingJoin& result)
      : program_(program), recording_(recording), result_(result), units_(units) {
    for (std::size_t i = 0; i < program.step.size(); ++i) {
      const Op& op = program.step.ops[i];
      const OpShape& shape = program.ShapeOf(op);
      if (InfoOf(shape.code).is_collective && shape.code != OpCode::kBarrier &&
          program.groups[shape.group.value].size > 1) {
        ops_.push_back({{shape.code, op.subject, op.micro_batch, PassOf(op.phase)}, OpId(i)});
      }
    }
  }

  void Run(const std::vector<RecordingStep>& steps) {
    std::vector<std::vector<RecordedRow>> rows(recording_.steps.size());  // by step
    for (const Activity& activity : recording_.activities) {
      if (activity.kind == ActivityKind::kCollective && activity.collective != OpCode::kBarrier) {
        const std::uint32_t unit = activity.unit == kNoSubject ? kNoSubject : units_[activity.unit];
        rows[activity.step].push_back(
            {{activity.collective, unit, activity.micro_batch, activity.phase}, &activity});
      }
    }
    std::map<OpId, RecordingJoin::Collective> found;
    for (const RecordingStep& step : steps) {
      for (const RecordedIdle& one : step.idle) {
        idle_.emplace(&recording_.activities[one.activity], one.seconds);
      }
    }
    for (const RecordingStep& step : steps) {
      JoinStep(step, std::move(rows[step.step]), found);
    }
    for (auto& [op, collective] : found) {
      collective.seconds /= static_cast<double>(collective.count);
      collective.idle /= static_cast<double>(collective.count);
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

  void JoinStep(const RecordingStep& step, std::vector<RecordedRow> rows,
                std::map<OpId, RecordingJoin::Collective>& found) {
    StableSort(rows, [](const RecordedRow& a, const RecordedRow& b) {
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
      const auto idle = idle_.find(row.activity);
      collective.idle += idle == idle_.end() ? 0 : idle->second;
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
    const std::int64_t ranks = MeshOf(program_).RankCount();
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
  const std::vector<std::uint32_t>& units_;
  std::vector<ProgramRow> ops_;             // in issue order
  std::map<const Activity*, double> idle_;  // seconds around it
};

// Finds units of a program by what traces call them: wrappers' parts of names do not count, and
// either name may have a prefix that the other lacks. O(names) once, then O(length) each.
class UnitFinder {
 public:
  explicit UnitFinder(const Program& program) {
    for (std::size_t i = 0; i < program.units.size(); ++i) {
      const std::string_view name = program.units[i].name;
      const auto unit = static_cast<std::uint32_t>(i);
      whole_.emplace(name, unit);
      ForEachEnd(name, [&](std::string_view end) { Note(ends_[end], unit); });
    }
  }

  // kNoSubject: none, or several.
  [[nodiscard]] std::uint32_t Find(std::string_view name) const {
    const std::string wanted = name.empty() ? std::string(kRoot) : WithoutWrappers(name);
    if (const auto found = whole_.find(wanted); found != whole_.end()) {
      return found->second;
    }
    Match match;
    if (const auto found = ends_.find(wanted); found != ends_.end()) {
      match = found->second;
    }
    ForEachEnd(wanted, [&](std::string_view end) {
      if (const auto found = whole_.find(end); found != whole_.end()) {
        Note(match, found->second);
      }
    });
    // A group of modules is called by all of them ("norm, lm_head"): its first one decides.
    const std::size_t comma = wanted.find(", ");
    if (match.count == 0 && comma != std::string::npos) {
      return Find(wanted.substr(0, comma));
    }
    return match.count == 1 ? match.unit : kNoSubject;
  }

  // The innermost unit that is the module `name` or around it; `root` where none is.
  [[nodiscard]] std::uint32_t Around(std::string_view name, std::uint32_t root) const {
    while (true) {
      if (const auto found = whole_.find(name); found != whole_.end()) {
        return found->second;
      }
      const std::size_t dot = name.rfind('.');
      if (dot == name.npos) {
        return root;
      }
      name = name.substr(0, dot);
    }
  }

 private:
  struct Match {
    std::uint32_t unit = kNoSubject;
    std::size_t count = 0;
  };
  // What follows each dot. Of absurd names nothing: their ends are quadratic in their length.
  template <class Use>
  static void ForEachEnd(std::string_view name, Use use) {
    constexpr std::size_t kLongestName = 1000;
    for (std::size_t dot = name.size() > kLongestName ? name.npos : name.find('.');
         dot != name.npos; dot = name.find('.', dot + 1)) {
      use(name.substr(dot + 1));
    }
  }
  static void Note(Match& match, std::uint32_t unit) {
    match.unit = unit;
    ++match.count;
  }

  std::unordered_map<std::string_view, std::uint32_t> whole_;
  std::unordered_map<std::string_view, Match> ends_;
};

}  // namespace

std::vector<SegmentKey> SegmentsOf(const Program& program, bool by_unit) {
  const UnitFinder finder(program);
  const std::uint32_t root = finder.Find("");
  const std::vector<std::uint32_t> unit_of_op = Mapped<std::uint32_t>(
      program.model_op_names, [&](const std::string& name) { return finder.Around(name, root); });
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
  std::vector<std::uint32_t> units;
  const UnitFinder finder(program);
  result.by_unit = recording.has_units;
  for (const std::string& unit : recording.units) {
    units.push_back(finder.Find(unit));
    result.by_unit = result.by_unit && units.back() != kNoSubject;
  }
  Joiner(program, recording, units, result).Run(steps);
  std::set<std::uint32_t> counted;
  std::map<std::size_t, double> idle;
  for (const RecordingStep& step : steps) {
    counted.insert(step.step);
    for (const RecordedIdle& one : step.idle) {
      idle.emplace(one.activity, one.seconds);
    }
  }
  std::map<std::pair<SegmentKey, OpClass>, std::pair<double, double>> sums;
  for (std::size_t i = 0; i < recording.activities.size(); ++i) {
    const Activity& activity = recording.activities[i];
    const bool is_compute =
        activity.kind == ActivityKind::kKernel || activity.kind == ActivityKind::kWithinDevice;
    if (!is_compute || !counted.contains(activity.step)) {
      continue;
    }
    SegmentKey key{kNoSubject, 0, activity.phase};
    if (activity.phase != Phase::kOptimizer) {
      key.micro_batch = activity.micro_batch;
      if (result.by_unit && activity.unit != kNoSubject) {
        key.unit = units[activity.unit];
      }
    }
    auto& [seconds, before] = sums[{key, ClassOf(activity)}];
    seconds += ToSeconds(activity.end - activity.start).value;
    const auto found = idle.find(i);
    before += found == idle.end() ? 0 : found->second;
  }
  const auto count = static_cast<double>(counted.size());
  for (const auto& [key, sum] : sums) {
    result.kernels.push_back({key.first, key.second, sum.first / count, sum.second / count});
  }
  return result;
}

}  // namespace shardwright
