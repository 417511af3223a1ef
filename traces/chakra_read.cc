#include "traces/chakra_read.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "traces/internal/chakra_nodes.h"
#include "traces/internal/raw_recording.h"

namespace shardwright {
namespace {

using internal::ChakraFile;
using internal::ChakraNode;
using internal::ChakraType;
using internal::RawRecording;
using internal::RawSpan;
using internal::RawWork;

constexpr std::int64_t kNanoseconds = 1000;  // per microsecond

// "step.3.et" -> 3; -1 without a number at the end.
std::int64_t RankOfName(std::string_view file) {
  for (const std::string_view end : {".gz", ".et"}) {
    file.remove_suffix(file.ends_with(end) ? end.size() : 0);
  }
  const std::string_view digits = file.substr(file.find_last_not_of("0123456789") + 1);
  std::int32_t rank = -1;
  const auto [last, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  return error == std::errc() ? rank : -1;
}

std::optional<OpCode> CollectiveOf(const ChakraNode& node) {
  for (const internal::ChakraCollective& row : internal::kChakraCollectives) {
    if (node.comm_type == row.comm_type) {
      return row.code;
    }
  }
  constexpr std::uint64_t kReduceScatterBlock = 8;
  return node.comm_type == kReduceScatterBlock ? std::optional(OpCode::kReduceScatter)
                                               : std::nullopt;
}

class ChakraReader {
 public:
  explicit ChakraReader(const std::string& file)
      : name_(file), file_(internal::ReadChakraNodes(file)) {}

  ProfilerRecording Run() {
    FindDeps();
    const bool has_starts = std::any_of(file_.nodes.begin(), file_.nodes.end(),
                                        [](const ChakraNode& node) { return node.start > 0; });
    if (!has_starts) {
      Replay();
    }
    ProfilerRecording result = Recorded();
    if (RankOfName(name_) < 0) {
      result.notes.emplace_back("no rank in the file's name (as in step.3.et): taken as rank 0");
    }
    if (!has_starts) {
      result.notes.emplace_back(
          "no start times: each node begins when what it depends on has ended and its stream is "
          "free, as a replay has it");
    }
    if (no_sizes_ > 0) {
      result.notes.push_back(std::to_string(no_sizes_) +
                             " all-gathers of groups whose size is not in the file: their bytes "
                             "are not known");
    }
    if (others_ > 0) {
      result.notes.push_back(std::to_string(others_) +
                             " sends, receives and collectives of other kinds are left out");
    }
    return result;
  }

 private:
  [[nodiscard]] std::string_view NameAt(std::uint32_t index) const {
    return index == kNoSubject ? std::string_view() : file_.names.names()[index];
  }

  // Indices of nodes in place of their ids. Chakra's converter drops nodes and keeps their ids in
  // others' lists.
  void FindDeps() {
    std::unordered_map<std::uint64_t, std::uint32_t> indices;
    for (std::uint32_t i = 0; i < file_.nodes.size(); ++i) {
      if (!indices.emplace(file_.nodes[i].id, i).second) {
        throw InputError(name_ + ": node " + std::to_string(i),
                         "id " + std::to_string(file_.nodes[i].id) + ", as an earlier node has",
                         "ids of their own");
      }
    }
    for (const std::uint64_t id : file_.deps) {
      const auto found = indices.find(id);
      deps_.push_back(found == indices.end() ? kNoSubject : found->second);
    }
  }

  // Begins of nodes from dependencies and durations. O(nodes log nodes + dependencies).
  void Replay() {
    const auto count = static_cast<std::uint32_t>(file_.nodes.size());
    std::vector<std::uint32_t> missing(count, 0), first(count + 1, 0);
    ForEachDep([&](std::uint32_t node, std::uint32_t dep) {
      ++missing[node];
      ++first[dep + 1];
    });
    std::partial_sum(first.begin(), first.end(), first.begin());
    std::vector<std::uint32_t> next(first.back()), at(first.begin(), first.end() - 1);
    ForEachDep([&](std::uint32_t node, std::uint32_t dep) { next[at[dep]++] = node; });
    std::priority_queue<std::uint32_t, std::vector<std::uint32_t>, std::greater<>> ready;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (missing[i] == 0) {
        ready.push(i);
      }
    }
    std::map<std::uint32_t, std::int64_t> free;  // when a stream is
    std::uint32_t done = 0;
    for (; !ready.empty(); ++done) {
      const std::uint32_t i = ready.top();
      ready.pop();
      ChakraNode& node = file_.nodes[i];
      if (!node.on_host && node.stream != kNoSubject) {
        std::int64_t& end = free[node.stream];
        node.start = std::max(node.start, end);
        end = node.start + node.duration;
      }
      for (std::uint32_t k = first[i]; k < first[i + 1]; ++k) {
        ChakraNode& after = file_.nodes[next[k]];
        after.start = std::max(after.start, node.start + node.duration);
        if (--missing[next[k]] == 0) {
          ready.push(next[k]);
        }
      }
    }
    if (done < count) {
      throw InputError(name_, "dependencies that go round in a circle", "a graph without circles");
    }
  }

  template <class Use>
  void ForEachDep(Use use) const {
    for (std::uint32_t i = 0; i < file_.nodes.size(); ++i) {
      const ChakraNode& node = file_.nodes[i];
      for (std::size_t k = 0; k < std::size_t{node.ctrl_deps} + node.data_deps; ++k) {
        if (const std::uint32_t dep = deps_[node.deps_begin + k]; dep != kNoSubject) {
          use(i, dep);
        }
      }
    }
  }

  // Of the full array; 0: not known. Chakra has what one rank puts in.
  [[nodiscard]] Bytes BytesOf(const ChakraNode& node, OpCode code, std::int64_t group_size) {
    if (code != OpCode::kAllGather) {
      return Bytes(node.comm_size);
    }
    no_sizes_ += group_size == 0 ? 1 : 0;
    constexpr std::int64_t kMost = std::int64_t{1} << 50;
    const bool is_too_much = group_size > 0 && node.comm_size > kMost / group_size;
    return Bytes(is_too_much ? 0 : node.comm_size * group_size);
  }

  [[nodiscard]] std::int64_t GroupSize(const ChakraNode& node) const {
    const auto found = file_.group_sizes.find(std::string(NameAt(node.group)));
    return found != file_.group_sizes.end() ? found->second : 0;
  }

  // The op of the host that called the node; kNoSubject: none.
  [[nodiscard]] std::uint32_t CallerOf(std::uint32_t i) const {
    const ChakraNode& node = file_.nodes[i];
    for (std::size_t k = 0; k < node.ctrl_deps; ++k) {
      const std::uint32_t dep = deps_[node.deps_begin + k];
      if (dep != kNoSubject && dep != i && file_.nodes[dep].on_host) {
        return dep;
      }
    }
    return kNoSubject;
  }

  // When each op of the host ends with all that it calls: durations in the file are without these.
  [[nodiscard]] std::vector<std::int64_t> EndsWithCalls() const {
    std::vector<std::int64_t> ends;
    for (const ChakraNode& node : file_.nodes) {
      ends.push_back(node.start + node.duration);
    }
    std::vector<std::uint32_t> order(ends.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return ends[a] > ends[b]; });
    // The latest come first, so that each op is widened once.
    std::vector<bool> is_done(ends.size(), false);
    for (std::uint32_t i : order) {
      const std::int64_t end = ends[i];
      while (i != kNoSubject && file_.nodes[i].on_host && !is_done[i]) {
        ends[i] = end;
        is_done[i] = true;
        i = CallerOf(i);
      }
    }
    return ends;
  }

  ProfilerRecording Recorded() {
    RawRecording raw(name_, "chakra");
    raw.rank = std::max<std::int64_t>(RankOfName(name_), 0);
    raw.events = std::ssize(file_.nodes);
    const std::vector<std::int64_t> ends = EndsWithCalls();
    std::set<std::uint32_t> callers;
    for (std::uint32_t i = 0; i < file_.nodes.size(); ++i) {
      const ChakraNode& node = file_.nodes[i];
      if (node.type == ChakraType::kMetadata || node.type == ChakraType::kInvalid) {
        continue;
      }
      raw.rows.Take();
      RawSpan span{node.start * kNanoseconds, ends[i] * kNanoseconds,
                   raw.names.Find(NameAt(node.name)), 0};
      if (node.on_host) {
        span.thread = static_cast<std::uint32_t>(node.thread);
        AddHost(raw, span);
        continue;
      }
      const std::uint32_t caller = CallerOf(i);
      AddWork(raw, node, span, caller);
      if (caller != kNoSubject && callers.insert(caller).second) {
        raw.launches.push_back({static_cast<std::int64_t>(caller) + 1,
                                file_.nodes[caller].start * kNanoseconds,
                                ends[caller] * kNanoseconds});
      }
    }
    ProfilerRecording result = Resolve(std::move(raw));
    result.notes.emplace_back(
        "whole microseconds, and no launches: work counts as issued by the op that called it");
    return result;
  }

  static void AddHost(RawRecording& raw, RawSpan span) {
    const std::string_view name = raw.names.names()[span.name];
    if (internal::IsMarker(name)) {
      raw.ranges.push_back(span);
      return;
    }
    if (name.starts_with("c10d::")) {
      if (const auto code = internal::CollectiveOfName(name)) {
        raw.calls.push_back({span, Bytes(0), *code});
      }
    }
    raw.host.push_back(span);
  }

  void AddWork(RawRecording& raw, const ChakraNode& node, RawSpan span, std::uint32_t caller) {
    const std::string_view name = NameAt(node.name);
    RawWork work;
    work.span = span;
    work.correlation = caller == kNoSubject ? 0 : static_cast<std::int64_t>(caller) + 1;
    if (node.type == ChakraType::kCollective || node.type == ChakraType::kSend ||
        node.type == ChakraType::kReceive) {
      const std::optional<OpCode> code = CollectiveOf(node);
      if (node.type != ChakraType::kCollective || !code) {
        ++others_;
        return;
      }
      work.kind = ActivityKind::kCollective;
      work.collective = *code;
      work.group_size = static_cast<std::int32_t>(GroupSize(node));
      work.bytes = BytesOf(node, *code, work.group_size);
    } else if (node.type == ChakraType::kLoad || name.starts_with("Memcpy HtoD")) {
      work.kind = ActivityKind::kToDevice;
    } else if (node.type == ChakraType::kStore || name.starts_with("Memcpy DtoH")) {
      work.kind = ActivityKind::kToHost;
    } else if (name.starts_with("Memcpy") || name.starts_with("Memset")) {
      work.kind = ActivityKind::kWithinDevice;
    }
    // Streams by name; without any, collectives have one of their own per group.
    const bool is_collective = work.kind == ActivityKind::kCollective;
    const std::pair queue(node.stream == kNoSubject && is_collective,
                          node.stream == kNoSubject && is_collective ? node.group : node.stream);
    work.span.thread =
        queues_.emplace(queue, static_cast<std::uint32_t>(queues_.size())).first->second;
    raw.work.push_back(work);
  }

  const std::string& name_;
  ChakraFile file_;
  std::vector<std::uint32_t> deps_;  // indices of nodes; kNoSubject: not in the file
  std::map<std::pair<bool, std::uint32_t>, std::uint32_t> queues_;
  std::int64_t no_sizes_ = 0;
  std::int64_t others_ = 0;
};

}  // namespace

bool IsChakra(std::string_view beginning) {
  const auto byte = [&](std::size_t i) {
    return i < beginning.size() ? static_cast<unsigned char>(beginning[i]) : 0U;
  };
  // The size of the metadata, in one or two bytes; then a version, or an attribute's name.
  const std::size_t at = byte(0) > 0x7f ? 2 : 1;
  constexpr unsigned kText = 10, kMessage = 18;  // tags of fields 1 and 2
  if (byte(at) == kText) {
    const std::string_view version =
        beginning.substr(std::min(at + 2, beginning.size()), byte(at + 1));
    constexpr std::size_t kLongest = 16;
    return !version.empty() && version.size() <= kLongest &&
           version.find_first_not_of("0123456789.") == std::string_view::npos;
  }
  return byte(0) > 0 && byte(at) == kMessage && (byte(at + 2) == kText || byte(at + 3) == kText);
}

ProfilerRecording ReadChakra(const std::string& file) {
  return ChakraReader(file).Run();
}

}  // namespace shardwright
