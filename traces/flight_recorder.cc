#include "traces/flight_recorder.h"

#include <cctype>
#include <charconv>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include <sys/stat.h>

#include "core/budget.h"
#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/parallel.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/text.h"
#include "traces/gzip.h"
#include "traces/internal/pickle.h"

namespace shardwright {
namespace {

using internal::Pickle;

constexpr std::string_view kFlightRule = "a dump of PyTorch's Flight Recorder, version 2";
constexpr std::int64_t kMostFlightCalls = 1'000'000;
constexpr std::int64_t kMostFlightRanks = std::int64_t{1} << 24;
// References let a small file name one list many times; no dump does that much.
constexpr std::int64_t kFlightVisitsPerByte = 32;

class FlightReader {
 public:
  FlightReader(const std::string& file, Pickle pickle)
      : file_(file), pickle_(std::move(pickle)), calls_(file, "collectives", kMostFlightCalls) {}

  FlightDump Run() {
    const Ref root = pickle_.root();
    if (pickle_.KindOf(root) != Kind::kDict) {
      pickle_.Fail("root", "no dictionary");
    }
    dump_.file = file_;
    dump_.version = Name(pickle_.Required(root, "version", Kind::kText));
    if (!dump_.version.starts_with("2.")) {
      pickle_.Fail("version", '"' + dump_.version + '"');
    }
    ReadGroups(root);
    const Ref entries = pickle_.Find(root, "entries");  // JSON leaves out an empty list
    if (entries != Pickle::kNothing) {
      if (pickle_.KindOf(entries) != Kind::kList) {
        pickle_.Fail("entries", "a value of another type");
      }
      for (const Ref entry : pickle_.ItemsOf(entries)) {
        ReadCall(entry);
      }
    }
    return std::move(dump_);
  }

 private:
  using Ref = Pickle::Ref;
  using Kind = Pickle::Kind;

  void Visit(std::size_t count = 1) {
    constexpr std::int64_t kLeast = 10'000;
    visits_ += static_cast<std::int64_t>(count);
    if (visits_ > kLeast + kFlightVisitsPerByte * pickle_.file_size()) {
      pickle_.Fail("entries", "more entries than a file of this size can hold");
    }
  }

  // Of a name from a stranger: one printable line that is not too long.
  [[nodiscard]] std::string Name(Ref text) const {
    constexpr std::size_t kLongest = 300;
    return PrintableLine(std::string_view(pickle_.TextOf(text)).substr(0, kLongest));
  }
  [[nodiscard]] std::string NameAt(Ref dict, std::string_view key) const {
    const Ref value = pickle_.Find(dict, key);
    const bool is_text = value != Pickle::kNothing && pickle_.KindOf(value) == Kind::kText;
    return is_text ? Name(value) : std::string();
  }
  // 0 where there is none, or no number.
  [[nodiscard]] std::int64_t NumberAt(Ref dict, std::string_view key) const {
    const Ref value = pickle_.Find(dict, key);
    const bool is_number = value != Pickle::kNothing && (pickle_.KindOf(value) == Kind::kInt ||
                                                         pickle_.KindOf(value) == Kind::kBool);
    return is_number ? std::max<std::int64_t>(pickle_.IntOf(value), 0) : 0;
  }

  // "[0, 1, 2]".
  [[nodiscard]] std::vector<std::int64_t> RanksOf(const std::string& text) const {
    std::vector<std::int64_t> ranks;
    for (std::size_t at = text.find_first_of("0123456789"); at != std::string::npos;) {
      std::int64_t rank = 0;
      const char* end = text.data() + text.size();
      const auto [next, error] = std::from_chars(text.data() + at, end, rank);
      if (error != std::errc() || rank >= kMostFlightRanks) {
        pickle_.Fail("pg_config", "a rank that is too large");
      }
      ranks.push_back(rank);
      at = text.find_first_of("0123456789", static_cast<std::size_t>(next - text.data()));
    }
    SortAll(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  void ReadGroups(Ref root) {
    const Ref config = pickle_.Find(root, "pg_config");
    if (config == Pickle::kNothing || pickle_.KindOf(config) != Kind::kDict) {
      return;
    }
    const std::vector<Ref>& items = pickle_.ItemsOf(config);
    for (std::size_t i = 1; i < items.size(); i += 2) {
      Visit();
      if (pickle_.KindOf(items[i]) != Kind::kDict) {
        pickle_.Fail("pg_config", "a group that is no dictionary");
      }
      const Ref ranks = pickle_.Required(items[i], "ranks", Kind::kText);
      dump_.groups.push_back(
          {NameAt(items[i], "name"), NameAt(items[i], "desc"), RanksOf(pickle_.TextOf(ranks))});
    }
  }

  // Gloo calls its default group "" where it lists the groups, and "0" where it is used.
  std::size_t GroupOf(const std::string& name, const std::string& description) {
    std::size_t unnamed = dump_.groups.size();
    for (std::size_t i = 0; i < dump_.groups.size(); ++i) {
      if (dump_.groups[i].name == name) {
        dump_.groups[i].description = description;
        return i;
      }
      if (dump_.groups[i].name.empty()) {
        unnamed = i;
      }
    }
    if (description == "default_pg" && unnamed < dump_.groups.size()) {
      dump_.groups[unnamed].name = name;
      dump_.groups[unnamed].description = description;
      return unnamed;
    }
    dump_.groups.push_back({name, description, {}});
    return dump_.groups.size() - 1;
  }

  // Elements of all tensors of a list of sizes.
  std::int64_t ElementsAt(Ref entry, std::string_view key) {
    const Ref tensors = pickle_.Find(entry, key);
    if (tensors == Pickle::kNothing || pickle_.KindOf(tensors) != Kind::kList) {
      return 0;
    }
    constexpr double kMost = 1e15;
    double sum = 0.0;
    for (const Ref sizes : pickle_.ItemsOf(tensors)) {
      Visit();
      double product = 1.0;
      if (pickle_.KindOf(sizes) != Kind::kList) {
        pickle_.Fail(key, "sizes that are no list");
      }
      Visit(pickle_.ItemsOf(sizes).size());
      for (const Ref size : pickle_.ItemsOf(sizes)) {
        product *=
            pickle_.KindOf(size) == Kind::kInt ? static_cast<double>(pickle_.IntOf(size)) : 0;
      }
      sum += product;
    }
    if (!(sum >= 0.0 && sum < kMost)) {
      pickle_.Fail(key, "sizes that no tensor has");
    }
    return static_cast<std::int64_t>(sum);
  }

  std::string FirstAt(Ref entry, std::string_view key) const {
    const Ref list = pickle_.Find(entry, key);
    if (list == Pickle::kNothing || pickle_.KindOf(list) != Kind::kList ||
        pickle_.ItemsOf(list).empty() || pickle_.KindOf(pickle_.ItemsOf(list)[0]) != Kind::kText) {
      return "";
    }
    return Name(pickle_.ItemsOf(list)[0]);
  }

  void ReadFrames(Ref entry, FlightCall& call) {
    const Ref frames = pickle_.Find(entry, "frames");
    if (frames == Pickle::kNothing || pickle_.KindOf(frames) != Kind::kList) {
      return;
    }
    constexpr std::size_t kMostFrames = 200;
    const std::vector<Ref>& items = pickle_.ItemsOf(frames);
    for (std::size_t i = 0; i < std::min(items.size(), kMostFrames); ++i) {
      Visit();
      const auto [known, is_new] = frame_of_.try_emplace(items[i], dump_.frames.size());
      if (is_new) {
        if (pickle_.KindOf(items[i]) != Kind::kDict) {
          pickle_.Fail("frames", "a frame that is no dictionary");
        }
        dump_.frames.push_back(
            {NameAt(items[i], "name"), NameAt(items[i], "filename"), NumberAt(items[i], "line")});
      }
      call.frames.push_back(known->second);
    }
  }

  void ReadCall(Ref entry) {
    Visit();
    calls_.Take();
    if (pickle_.KindOf(entry) != Kind::kDict) {
      pickle_.Fail("entries", "an entry that is no dictionary");
    }
    FlightCall call;
    const Ref group = pickle_.Required(entry, "process_group", Kind::kList);
    const std::vector<Ref>& names = pickle_.ItemsOf(group);
    if (names.size() != 2 || pickle_.KindOf(names[0]) != Kind::kText ||
        pickle_.KindOf(names[1]) != Kind::kText) {
      pickle_.Fail("process_group", "something else than a name and a description");
    }
    call.group = GroupOf(Name(names[0]), Name(names[1]));
    const std::string name = Name(pickle_.Required(entry, "profiling_name", Kind::kText));
    const std::size_t colon = name.find(':');
    call.name = colon == std::string::npos ? name : name.substr(colon + 1);
    call.is_message = NumberAt(entry, "is_p2p") != 0 || call.name.starts_with("send ") ||
                      call.name.starts_with("recv ");
    call.sequence = call.is_message
                        ? NumberAt(entry, "p2p_seq_id")
                        : pickle_.IntOf(pickle_.Required(entry, "collective_seq_id", Kind::kInt));
    constexpr std::int64_t kMostSequence = std::int64_t{1} << 50;
    if (call.sequence < 0 || call.sequence > kMostSequence) {
      pickle_.Fail("collective_seq_id", std::to_string(call.sequence));
    }
    call.elements_in = ElementsAt(entry, "input_sizes");
    call.elements_out = ElementsAt(entry, "output_sizes");
    call.dtype = FirstAt(entry, call.elements_in > 0 ? "input_dtypes" : "output_dtypes");
    call.created = NumberAt(entry, "time_created_ns");
    call.started = NumberAt(entry, "time_discovered_started_ns");
    call.completed = NumberAt(entry, "time_discovered_completed_ns");
    if (call.completed == 0 && NameAt(entry, "state") == "completed") {
      call.completed = std::max<std::int64_t>(call.created, 1);
    }
    call.is_scheduled = call.started == 0 && NameAt(entry, "state") == "scheduled";
    call.retired = NumberAt(entry, "retired") != 0;
    ReadFrames(entry, call);
    dump_.calls.push_back(std::move(call));
  }

  std::string file_;
  Pickle pickle_;
  Budget calls_;
  FlightDump dump_;
  std::map<Ref, std::size_t> frame_of_;
  std::int64_t visits_ = 0;
};

// The file without endings that say how it is written.
std::string_view WithoutEndings(std::string_view name) {
  for (bool is_cut = true; is_cut;) {
    is_cut = false;
    for (const std::string_view ending : {".json", ".gz", ".pickle", ".pkl", ".pt", ".bin"}) {
      if (name.ends_with(ending)) {
        name.remove_suffix(ending.size());
        is_cut = true;
      }
    }
  }
  return name;
}

std::int64_t TimeOf(const std::string& file) {
  struct stat status {};
  constexpr std::int64_t kNanoseconds = 1'000'000'000;
  return ::stat(file.c_str(), &status) == 0
             ? static_cast<std::int64_t>(status.st_mtim.tv_sec) * kNanoseconds +
                   status.st_mtim.tv_nsec
             : 0;
}

std::vector<std::string> DumpsIn(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& file : EntriesOf(folder, "a folder of dumps of PyTorch's Flight Recorder")) {
    if (RankOfDump(file.string()) >= 0 && IsRegularFile(file)) {
      files.push_back(file.string());
    }
  }
  if (files.empty()) {
    throw InputError(folder, "a folder without dumps",
                     "files whose names end with their rank, such as nccl_trace_rank_0");
  }
  return files;
}

}  // namespace

std::int64_t RankOfDump(const std::string& file) {
  const std::size_t slash = file.rfind('/');
  const std::string_view name =
      WithoutEndings(std::string_view(file).substr(slash == std::string::npos ? 0 : slash + 1));
  std::size_t begin = name.size();
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(name[begin - 1])) != 0) {
    --begin;
  }
  const std::int64_t rank = IntegerIn(name.substr(begin)).value_or(-1);
  return rank < kMostFlightRanks ? rank : -1;
}

FlightDump ReadFlightDump(const std::string& file) {
  const std::int64_t rank = RankOfDump(file);
  if (rank < 0) {
    throw InputError(file, "a name without a rank",
                     "one that ends with its rank, such as nccl_trace_rank_0");
  }
  char first = '\0';
  (void)TextSource(file).Read(&first, 1);
  FlightDump dump;
  if (first == '\x80') {
    dump = FlightReader(file, Pickle::Read(file, kFlightRule)).Run();
  } else if (first == '{') {
    dump = FlightReader(file, Pickle::OfJson(JsonValue::ReadFile(file), file, kFlightRule)).Run();
  } else {
    throw InputError(file, first == '\0' ? "an empty file" : "something else", kFlightRule);
  }
  dump.rank = rank;
  dump.written = TimeOf(file);
  return dump;
}

std::vector<FlightDump> ReadFlightDumps(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (!Exists(name)) {
      throw InputError(name, "no file and no folder", kFlightRule);
    }
    const std::vector<std::string> inside =
        IsFolder(name) ? DumpsIn(name) : std::vector<std::string>{name};
    files.insert(files.end(), inside.begin(), inside.end());
  }
  std::vector<FlightDump> dumps(files.size());
  ParallelFor(files.size(), ThreadCount(),
              [&](std::size_t i, std::size_t) { dumps[i] = ReadFlightDump(files[i]); });
  SortAll(dumps, [](const FlightDump& a, const FlightDump& b) {
    return std::tie(a.rank, a.file) < std::tie(b.rank, b.file);
  });
  for (std::size_t i = 1; i < dumps.size(); ++i) {
    if (dumps[i].rank == dumps[i - 1].rank) {
      throw InputError(
          dumps[i].file,
          "rank " + std::to_string(dumps[i].rank) + ", as " + dumps[i - 1].file + " has",
          "one dump per rank");
    }
  }
  return dumps;
}

}  // namespace shardwright
